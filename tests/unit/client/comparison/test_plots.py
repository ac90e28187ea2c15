"""Plots of a comparison: what is drawn is what was measured."""

from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from made_up_runs import MODELS, NOISE_FLOOR, NUM_PARAMETERS, write_runs
from PIL import Image

from scoremode.comparison import Figure, as_text, compare, load_runs, size_plots
from scoremode.comparison.plot_style import DARK, HEIGHT, LIGHT, as_svg, new_axes
from scoremode.comparison.plots import plots, write_plots
from scoremode.comparison.run_file import with_bits
from scoremode.comparison.sizes import Point, is_simulated
from scoremode.comparison.summary import effects
from scoremode.comparison.tables import best_at_each_size, short_labels
from scoremode.comparison.token_plots import confidence_means, running_difference, survival
from scoremode.errors import RunError
from scoremode.wire import NoiseFloor

NUM_TOKENS = 5000
KLD, DISTRIBUTION, BY_CONFIDENCE = (f"kl-divergence{end}" for end in ("", "-distribution", "-by-confidence"))
PERPLEXITY, DIFFERENCE = "perplexity-ratio", "running-difference"
ALL = [KLD, PERPLEXITY, DISTRIBUTION, BY_CONFIDENCE, DIFFERENCE]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return compare(load_runs(write_runs(tmp_path_factory.mktemp("runs"), NUM_TOKENS)), num_resamples=50)


def changed(comparison, change):
    """The comparison with every run changed."""
    return replace(comparison, runs=[replace(figures, run=change(figures.run)) for figures in comparison.runs])


def without(comparison, *names):
    """A comparison of runs whose servers did not tell these facts."""
    return changed(comparison, lambda run: replace(run, server=run.server.model_copy(update=dict.fromkeys(names))))


def drawn(comparison, name):
    """The figure of a plot, and its axes."""
    figure = next(plot for plot in plots(comparison) if plot.name == name).draw(LIGHT)
    return figure, figure.axes[0]


def markers(axes):
    """The points with error bars, as (x, y), in the order in which they were drawn."""
    return [tuple(float(value[0]) for value in container[0].get_data()) for container in axes.containers]


def log_ratios(comparison):
    """The log ratio of each run's perplexity to the first's, from both."""
    base = comparison.runs[0].nll.value
    return [0, *(pytest.approx(figures.nll.value - base, rel=1e-9) for figures in comparison.runs[1:])]


def test_every_plot_is_written_for_both_schemes_with_a_caption(comparison, tmp_path):
    folder, names = tmp_path / "new" / "plots", [PERPLEXITY, DIFFERENCE]
    write_plots(changed(comparison, lambda run: replace(run, kld=None)), folder)
    pictures = {f"{name}-{kind}" for name in names for kind in ("light.svg", "light.png", "dark.svg", "dark.png")}
    assert {file.name for file in folder.iterdir() if file.stat().st_size} == pictures | {"captions.md"}
    captions = (folder / "captions.md").read_text()
    texts = (*(f"**{name}**: " for name in names), f"{NUM_TOKENS:,} tokens scored", "vLLM 0.32.0", "50 resamples")
    assert [text for text in texts if text not in captions] == []
    for scheme, theme in (("light", LIGHT), ("dark", DARK)):
        corner = Image.open(folder / f"perplexity-ratio-{scheme}.png").convert("RGB").getpixel((0, 0))
        assert "#{:02x}{:02x}{:02x}".format(*corner) == theme.paper


@pytest.mark.parametrize(
    ("size", "axis", "places"),
    [
        ("gib", "weight files (GiB)", [NUM_PARAMETERS * model.bits / 8 / 2**30 for model in MODELS]),
        ("bits_per_weight", "bits per weight", [model.bits for model in MODELS]),
    ],
)
def test_perplexity_is_drawn_against_size(comparison, size, axis, places):
    axes = drawn(replace(comparison, size=size), PERPLEXITY)[1]
    values = log_ratios(comparison)
    assert (axes.get_xlabel(), axes.get_ylabel()) == (axis, "ln(perplexity / the base's)")
    assert markers(axes) == [(pytest.approx(x, rel=1e-6), y) for x, y in zip(places, values, strict=True)]


def test_where_no_size_is_known_runs_have_a_row_each(comparison):
    axes = drawn(without(comparison, "num_parameters", "weight_bytes"), PERPLEXITY)[1]
    assert markers(axes) == [(value, row) for row, value in enumerate(log_ratios(comparison))]
    assert [label.get_text() for label in axes.get_yticklabels()] == [model.name for model in MODELS]
    assert "Pareto front" not in [line.get_label() for line in axes.lines]
    # Nor is it known that one simulates a quantization.
    another = without(comparison, "quantization", "weight_bytes", "num_parameters")
    assert len(markers(drawn(another, PERPLEXITY)[1])) == len(MODELS)


def test_divergence_has_its_intervals_and_the_noise_floor(comparison):
    _, axes = drawn(comparison, KLD)
    for container, figures in zip(axes.containers, comparison.runs, strict=True):
        bottom, top = container[2][0].get_segments()[0][:, 1]
        assert (bottom, top) == (pytest.approx(figures.kld.low), pytest.approx(figures.kld.high))
    assert any(line.get_label() == "noise floor" and set(line.get_ydata()) == {NOISE_FLOOR} for line in axes.lines)


@pytest.mark.parametrize(("floor", "label"), [(0.0, "0"), (1e-8, "0.00000001")])
def test_a_floor_below_all_runs_is_a_line_too(comparison, floor, label):
    """A log axis with both would show neither, and has no place for 0."""
    known = NoiseFloor(mean=floor, p99=1.0, max=1.0, num_scored=NUM_TOKENS, created=1)
    low = changed(
        comparison,
        lambda run: replace(run, reference=run.reference.model_copy(update={"noise_floor": known, "dtype": "float32"})),
    )
    low = replace(low, runs=low.runs[1:])
    for name, at in ((KLD, 1), (DISTRIBUTION, 0)):
        _, axes = drawn(low, name)
        [line] = [line for line in axes.lines if str(line.get_label()).startswith("noise floor")]
        assert line.get_label().endswith(f": {label}, below the axis")
        assert line.get_data()[at][0] == (axes.get_ylim() if at else axes.get_xlim())[0]


@pytest.mark.parametrize(
    ("sizes", "values"),
    [((0.105, 0.152, 0.25), (0.43, 0.03, 0.02)), ((3, 15), (1e-5, 2e-4)), ((0.7, 140), (1e-6, 0.9))],
)
def test_axes_have_several_ticks_of_few_digits(sizes, values):
    points = [Point(0, "run", size, value, value, value) for size, value in zip(sizes, values, strict=True)]
    drawing, axes = new_axes(LIGHT)
    size_plots.draw(points, "size", "value", None, drawing, axes, LIGHT)
    check_ticks(drawing, axes)


def test_an_axis_of_many_decades_has_ticks_that_are_apart(comparison):
    check_ticks(*drawn(comparison, DISTRIBUTION))


def check_ticks(drawing, axes):
    drawing.draw_without_rendering()
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        boxes = [tick.label1 for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_text()]
        assert 3 <= len(boxes) <= 9
        texts = [label.get_text() for label in boxes]
        assert [text for text in texts if "e" in text or len(text.strip("0.").replace(".", "")) > 2] == []
        extents = [label.get_window_extent() for label in boxes]
        assert not any(one.overlaps(other) for one, other in combinations(extents, 2))


def test_the_pareto_front_has_what_no_run_beats_in_both():
    """From the top to the first, and from the last to the right."""
    values = {"small": (3, 9.0), "beaten": (5, 8.0), "middle": (4, 7.0), "as good, larger": (6, 7.0), "best": (8, 6.0)}
    points = [Point(0, name, size, value, value, value) for name, (size, value) in values.items()]
    drawing, axes = new_axes(LIGHT)
    size_plots.draw(points, "size", "value", None, drawing, axes, LIGHT)
    line = next(line for line in axes.lines if line.get_label() == "Pareto front")
    ends = (3, axes.get_ylim()[1]), (axes.get_xlim()[1], 6)
    assert np.array_equal(line.get_xydata(), [ends[0], (3, 9), (4, 7), (8, 6), ends[1]])
    drawing, few = new_axes(LIGHT)
    size_plots.draw(points[:2], "size", "value", None, drawing, few, LIGHT)
    assert "Pareto front" not in [line.get_label() for line in few.lines]


@pytest.mark.parametrize("name", [PERPLEXITY, KLD])
def test_labels_cover_neither_each_other_nor_a_point(comparison, name):
    figure, axes = drawn(comparison, name)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == [model.name for model in MODELS]
    assert [(one, other) for one, other in combinations(boxes, 2) if one.overlaps(other)] == []
    assert not any(box.contains(*point) for point in axes.transData.transform(markers(axes)) for box in boxes)


def test_the_distribution_is_the_share_of_tokens_with_more(comparison):
    values = np.array([0.0, 0.0, 0.1, 1.0, np.inf])
    np.testing.assert_array_equal(survival(values, np.array([0.0, 0.1, 0.5, 1.0])), [0.6, 0.4, 0.4, 0.2])
    assert np.isnan(survival(values[:4], np.array([1.0]))).all()
    labels = [text.get_text() for text in drawn(comparison, DISTRIBUTION)[0].legends[0].get_texts()]
    assert labels[:2] == [f"BF16 ({(comparison.runs[0].run.kld == 0).mean():.1%} exactly 0)", "W8A8-INT8"]


def test_means_by_confidence_are_those_of_the_tokens_in_a_bucket(comparison):
    run = comparison.runs[3].run
    windows = np.repeat(np.arange(run.num_windows), run.window_sizes)
    means, errors = confidence_means(run)
    for index, (low, high) in enumerate(pairwise([0, 0.25, 0.5, 0.75, 0.95, 1.0000001])):
        inside = (run.reference_confidence >= low) & (run.reference_confidence < high)
        mean = run.kld[inside].mean()
        sums = [(run.kld[inside & (windows == window)] - mean).sum() for window in range(run.num_windows)]
        clustered = np.sqrt(len(sums) / (len(sums) - 1) * np.square(sums).sum()) / inside.sum()
        # Both are sums of a thousand float64, in another order.
        assert means[index] == pytest.approx(mean, rel=1e-12)
        assert errors[index] == pytest.approx(clustered, rel=1e-9)
    # A bucket without tokens is not drawn.
    sure = np.minimum(run.reference_confidence, 0.9)
    unsure = changed(comparison, lambda run: replace(run, reference_confidence=sure))
    assert np.isnan([values[4] for values in confidence_means(unsure.runs[3].run)]).all()
    assert drawn(unsure, BY_CONFIDENCE)[1].get_xticklabels()[4].get_text() == "0.95 to 1\nnone"


def test_the_running_difference_is_a_mean_of_what_came_before(comparison):
    base, run = comparison.runs[0].run, comparison.runs[5].run
    means = running_difference(run, base)
    for count in (1, 10, NUM_TOKENS):
        assert means[count - 1] == pytest.approx((run.nlls[:count] - base.nlls[:count]).mean(), rel=1e-9)
    line = next(line for line in drawn(comparison, DIFFERENCE)[1].lines if line.get_label() == "RTN-3bit")
    assert line.get_ydata()[-1] == means[-1]


def test_a_plot_without_data_is_left_out(comparison):
    assert [plot.name for plot in plots(comparison)] == ALL
    without_kld = changed(comparison, lambda run: replace(run, kld=None))
    identical = changed(comparison, lambda run: replace(run, kld=np.zeros(NUM_TOKENS)))
    for each in (without_kld, identical):
        assert [plot.name for plot in plots(each)] == [PERPLEXITY, DIFFERENCE]
    assert [plot.name for plot in plots(replace(without_kld, runs=without_kld.runs[:1], pairs=[]))] == ["perplexity"]


NO_PLACE = "Not drawn, because a log axis cannot show 0 or infinity: "
BEYOND = "3 infinite values lie beyond the right edge."


@pytest.mark.parametrize(
    ("place", "factor", "infinite", "captions"),
    [
        (0, 0, 0, dict.fromkeys((KLD, DISTRIBUTION, BY_CONFIDENCE), f"{NO_PLACE}BF16.")),
        (5, 1, 3, {KLD: f"{NO_PLACE}RTN-3bit.", DISTRIBUTION: BEYOND}),
        (5, 0, 3, dict.fromkeys((KLD, DISTRIBUTION, BY_CONFIDENCE), f"{NO_PLACE}RTN-3bit.")),
    ],
)
def test_what_has_no_place_on_a_log_axis_is_in_the_caption(comparison, place, factor, infinite, captions):
    figures = comparison.runs[place]
    kld = factor * figures.run.kld
    kld[:infinite] = np.inf
    runs = comparison.runs.copy()
    runs[place] = replace(figures, kld=Figure(kld.mean(), None, None, None), run=replace(figures.run, kld=kld))
    odd = replace(comparison, runs=runs)
    found = {plot.name: plot.caption for plot in plots(odd)}
    for text in (f"{NO_PLACE}BF16.", f"{NO_PLACE}RTN-3bit.", BEYOND):
        assert {name for name in ALL if text in found[name]} == {name for name in captions if text in captions[name]}
    assert {drawn(odd, name)[1].get_yscale() for name in (KLD, DISTRIBUTION, BY_CONFIDENCE)} == {"log"}
    assert len(markers(drawn(odd, KLD)[1])) == 5


def test_names_are_shortened_and_drawn_as_they_are(comparison):
    """Text between two `$` is not a formula, and one that begins with an underscore is in the legend."""
    figure, _ = drawn(changed(comparison, lambda run: replace(run, label=f"_a$b_{'c' * 60}{run.label}$")), DIFFERENCE)
    figure.draw_without_rendering()
    names = [text.get_text().strip() for text in figure.legends[0].get_texts()]
    assert [name[:5] for name in names] == ["_a$b_"] * 5
    assert (len(set(names)), max(map(len, names))) == (5, 40)
    assert short_labels([f"{'b' * 30}{middle}{'b' * 30}" for middle in "xy"], 40)[1].endswith(" (2)")


def test_formats_have_colors_and_runs_have_markers(comparison):
    """Both of 4 bits have one color."""
    points = drawn(comparison, PERPLEXITY)[1].containers
    colors, shapes = ([getattr(each[0], f"get_{name}")() for each in points] for name in ("color", "marker"))
    gptq, awq = ([model.name for model in MODELS].index(name) for name in ("GPTQ-4bit-128g", "AWQ-4bit"))
    assert colors[gptq] == colors[awq]
    assert (len(set(colors)), len(set(shapes))) == (5, 6)


def test_a_picture_says_what_was_measured(comparison):
    for plot in plots(comparison):
        # The lines of the picture.
        words = " ".join(ElementTree.fromstring(as_svg(plot.draw(DARK), text_as_paths=False)).itertext())
        assert f"{NUM_TOKENS:,} tokens scored" in " ".join(words.split())
        assert "sliding, context length 2,048" in words


def test_a_simulated_quantization_is_drawn_where_it_says_its_bits(comparison):
    """The files of one are as large as the original's."""
    original = comparison.base.server
    of_rounded = {"fingerprint": "of rounded weights", "quantization": None, "weight_bytes": original.weight_bytes}
    runs = [figures.run for figures in comparison.runs]
    runs[5] = replace(runs[5], server=original.model_copy(update=of_rounded))
    unknown = compare(runs, num_resamples=50)
    assert len(markers(drawn(unknown, KLD)[1])) == 5
    [plot] = [plot for plot in plots(unknown) if plot.name == KLD]
    assert "because its files do not say what it would take (--bits does): RTN-3bit." in plot.caption
    with_size = [figures.run.label for figures in unknown.runs if "of the size" in " ".join(effects(unknown, figures))]
    assert sorted({*with_size} ^ {figures.run.label for figures in unknown.runs}) == ["RTN-3bit"]
    # In a wider dtype it is even larger. Where all are simulated, runs have a row each.
    wider = {**of_rounded, "dtype": "float32", "weight_bytes": 2 * original.weight_bytes}
    assert is_simulated(replace(runs[5], server=original.model_copy(update=wider)), runs[0])
    alone = drawn(compare([runs[0], runs[5]], num_resamples=50), KLD)[1]
    assert [label.get_text() for label in alone.get_yticklabels()] == ["BF16", "RTN-3bit"]
    known = compare(with_bits(runs, {"RTN-3bit": 3.5}), num_resamples=50)
    assert markers(drawn(known, KLD)[1])[5][0] == pytest.approx(NUM_PARAMETERS * 3.5 / 8 / 2**30)
    assert "simulating 3.5 bits" in as_text(known)
    with pytest.raises(RunError, match="--bits: no run is called 'RTN'; there are: BF16, "):
        with_bits(runs, {"RTN": 3.5})


def test_the_best_at_each_size_are_those_that_no_smaller_one_beats(comparison):
    labels, sizes, klds = best_at_each_size(comparison)
    assert labels.cells == ["RTN-3bit", "AWQ-4bit", "Q6_K", "W8A8-INT8", "BF16"], "not GPTQ, larger and worse than AWQ"
    assert [float(size) for size in sizes.cells] == sorted(float(size) for size in sizes.cells)
    assert klds.cells[1].startswith(f"{comparison.runs[4].kld.value:.6f} ± ")


@pytest.mark.parametrize("is_reference", [False, True])
def test_runs_of_one_size_have_a_row_each(comparison, is_reference):
    """The first may be a reference of unknown size."""
    one = changed(comparison, lambda run: replace(run, server=comparison.runs[0].run.server))
    if is_reference:
        unknown = one.runs[0].run.server.model_copy(update={"weight_bytes": None, "num_parameters": None})
        one.runs[0] = replace(one.runs[0], run=replace(one.runs[0].run, server=unknown, is_reference=True))
    axes = drawn(one, PERPLEXITY)[1]
    assert [label.get_text() for label in axes.get_yticklabels()] == [model.name for model in MODELS]


def test_runs_of_one_format_have_a_color_each(comparison):
    one = changed(comparison, lambda run: replace(run, server=comparison.runs[0].run.server))
    colors = {container[0].get_color() for container in drawn(one, PERPLEXITY)[1].containers}
    assert len(colors) == len(MODELS)


def test_a_legend_of_many_runs_leaves_the_axes_their_height(comparison):
    runs = [
        replace(figures, run=replace(figures.run, label=f"{figures.run.label} on the path with the number {number}"))
        for number in range(4)
        for figures in comparison.runs
    ]
    figure, axes = drawn(replace(comparison, runs=runs, pairs=[]), DIFFERENCE)
    figure.draw_without_rendering()
    assert axes.get_window_extent().height > figure.dpi * HEIGHT / 2
