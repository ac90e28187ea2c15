"""Plots of a comparison: what is drawn is what was measured."""

import re
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from made_up_runs import MODELS, NOISE_FLOOR, write_runs
from PIL import Image

from scoremode.comparison import Figure, compare, load_runs
from scoremode.comparison.plot_style import DARK, LIGHT, as_svg
from scoremode.comparison.plots import plots, short_labels, write_plots
from scoremode.comparison.size_plots import Point, pareto_front
from scoremode.comparison.token_plots import confidence_means, running_difference, survival

NUM_TOKENS = 5000
ALL = [
    "perplexity",
    "kl-divergence",
    "kl-divergence-distribution",
    "kl-divergence-by-confidence",
    "running-difference",
]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return compare(load_runs(write_runs(tmp_path_factory.mktemp("runs"), NUM_TOKENS)), num_resamples=50)


@pytest.fixture(scope="module")
def folder(comparison, tmp_path_factory):
    """With all that `write_plots` writes."""
    folder = tmp_path_factory.mktemp("plots") / "new" / "plots"
    write_plots(comparison, folder)
    return folder


def changed(comparison, change):
    """The comparison with every run changed."""
    return replace(comparison, runs=[replace(figures, run=change(figures.run)) for figures in comparison.runs])


def without(run, *names):
    """The run of a server that does not say what the names stand for."""
    server = {name: value for name, value in run.record["server"].items() if name not in names}
    return replace(run, record={**run.record, "server": server})


def drawn(comparison, name, theme=LIGHT):
    """The figure of a plot and its axes."""
    figure = next(plot for plot in plots(comparison) if plot.name == name).draw(theme)
    return figure, figure.axes[0]


def markers(axes):
    """The points with error bars, as (x, y), in the order in which they were drawn."""
    return [tuple(float(value[0]) for value in container[0].get_data()) for container in axes.containers]


def test_every_plot_is_written_for_both_schemes_and_with_a_caption(folder):
    pictures = {f"{name}-{kind}" for name in ALL for kind in ("light.svg", "light.png", "dark.svg", "dark.png")}
    assert {file.name for file in folder.iterdir() if file.stat().st_size} == pictures | {"captions.md"}
    captions = (folder / "captions.md").read_text()
    for name in ALL:
        assert f"**{name}**: " in captions
    for said in (f"{NUM_TOKENS:,} tokens scored", "sliding", "scoremode 0.1.0, vLLM 0.32.0", "95 %", "50 resamples"):
        assert said in captions


@pytest.mark.parametrize(("scheme", "theme"), [("light", LIGHT), ("dark", DARK)])
def test_a_picture_is_on_the_paper_of_its_scheme_and_wide_enough_for_print(folder, scheme, theme):
    picture = Image.open(folder / f"perplexity-{scheme}.png").convert("RGB")
    assert picture.getpixel((0, 0)) == tuple(int(theme.paper[at : at + 2], 16) for at in (1, 3, 5))
    assert picture.width == 1600


def test_the_same_comparison_is_the_same_picture(comparison, folder):
    figure, _ = drawn(comparison, "kl-divergence", DARK)
    assert as_svg(figure, text_as_paths=True) == (folder / "kl-divergence-dark.svg").read_text()


def test_perplexity_is_drawn_against_bits_per_weight(comparison):
    _, axes = drawn(comparison, "perplexity")
    assert markers(axes) == [
        (pytest.approx(model.bits, rel=1e-6), figures.perplexity.value)
        for model, figures in zip(MODELS, comparison.runs, strict=True)
    ]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("bits per weight", "perplexity")


def test_intervals_are_those_of_the_comparison(comparison):
    _, axes = drawn(comparison, "kl-divergence")
    for container, figures in zip(axes.containers, comparison.runs, strict=True):
        bottom, top = container[2][0].get_segments()[0][:, 1]
        assert (bottom, top) == (pytest.approx(figures.kld.low), pytest.approx(figures.kld.high))


def test_the_noise_floor_is_a_line(comparison):
    _, axes = drawn(comparison, "kl-divergence")
    assert any(line.get_label() == "noise floor" and set(line.get_ydata()) == {NOISE_FLOOR} for line in axes.lines)


def test_without_sizes_runs_have_a_row_each(comparison):
    _, axes = drawn(changed(comparison, lambda run: without(run, "weight_bytes", "num_parameters")), "perplexity")
    assert [label.get_text() for label in axes.get_yticklabels()] == [model.name for model in MODELS]
    assert [x for x, _ in markers(axes)] == [figures.perplexity.value for figures in comparison.runs]
    assert not any(line.get_label() == "Pareto front" for line in axes.lines)


def test_with_bytes_alone_size_is_in_megabytes(comparison):
    _, axes = drawn(changed(comparison, lambda run: without(run, "num_parameters")), "perplexity")
    assert axes.get_xlabel() == "weight files (MB)"
    assert [x for x, _ in markers(axes)] == [figures.run.weight_bytes / 1e6 for figures in comparison.runs]


def test_the_pareto_front_has_what_no_run_beats_in_both():
    values = {
        "small": (3, 9.0),
        "beaten": (5, 8.0),
        "middle": (4, 7.0),
        "as good, larger": (6, 7.0),
        "best": (8, 6.0),
    }
    points = [Point(0, name, size, value, value, value) for name, (size, value) in values.items()]
    assert [point.label for point in pareto_front(points)] == ["small", "middle", "best"]


def test_labels_cover_neither_each_other_nor_a_point(comparison):
    for name in ("perplexity", "kl-divergence"):
        figure, axes = drawn(comparison, name)
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.texts]
        assert [text.get_text() for text in axes.texts] == [model.name for model in MODELS]
        assert [(one, other) for one, other in combinations(boxes, 2) if one.overlaps(other)] == []
        pixels = axes.transData.transform(markers(axes))
        assert [point for point in pixels for box in boxes if box.contains(*point)] == []


def test_the_distribution_is_the_share_of_tokens_with_more():
    values = np.array([0.0, 0.0, 0.1, 1.0, np.inf])
    np.testing.assert_array_equal(survival(values, np.array([0.0, 0.1, 0.5, 1.0])), [0.6, 0.4, 0.4, 0.2])
    assert np.isnan(survival(values[:4], np.array([1.0]))).all()


def test_the_distribution_says_how_many_are_exactly_zero(comparison):
    figure, _ = drawn(comparison, "kl-divergence-distribution")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    share = (comparison.runs[0].run.kld == 0).mean()
    assert labels[:2] == [f"BF16 ({share:.1%} exactly 0)", "W8A8-INT8"]


def test_the_distribution_has_no_point_for_each_token(comparison):
    _, axes = drawn(comparison, "kl-divergence-distribution")
    assert all(len(line.get_xdata()) <= 400 for line in axes.lines)


def test_means_by_confidence_are_those_of_the_tokens_in_each_bucket(comparison):
    run = comparison.runs[3].run
    edges = [0, 0.25, 0.5, 0.75, 0.95, 1.0000001]
    windows = np.repeat(np.arange(run.num_windows), run.window_sizes)

    means, errors = confidence_means(run)

    for index, (low, high) in enumerate(pairwise(edges)):
        inside = (run.reference_confidence >= low) & (run.reference_confidence < high)
        mean = run.kld[inside].mean()
        sums = [(run.kld[inside & (windows == window)] - mean).sum() for window in range(run.num_windows)]
        clustered = np.sqrt(len(sums) / (len(sums) - 1) * np.square(sums).sum()) / inside.sum()
        # Both are sums of a thousand float64, in another order.
        assert means[index] == pytest.approx(mean, rel=1e-12)
        assert errors[index] == pytest.approx(clustered, rel=1e-9)


def test_a_bucket_without_tokens_is_not_drawn(comparison):
    unsure = changed(
        comparison, lambda run: replace(run, reference_confidence=np.minimum(run.reference_confidence, 0.9))
    )
    means, errors = confidence_means(unsure.runs[1].run)
    assert np.isnan([means[4], errors[4]]).all()
    figure, axes = drawn(unsure, "kl-divergence-by-confidence")
    assert axes.get_xticklabels()[4].get_text() == "0.95 to 1\nnone"
    figure.draw_without_rendering()


def test_the_running_difference_is_a_mean_of_what_came_before(comparison):
    base, run = comparison.runs[0].run, comparison.runs[5].run
    means = running_difference(run, base)
    for count in (1, 10, NUM_TOKENS):
        assert means[count - 1] == pytest.approx((run.nlls[:count] - base.nlls[:count]).mean(), rel=1e-9)
    _, axes = drawn(comparison, "running-difference")
    line = next(line for line in axes.lines if line.get_label() == "RTN-3bit")
    assert line.get_ydata()[-1] == means[-1]


def test_a_plot_whose_data_are_not_there_is_left_out(comparison):
    assert [plot.name for plot in plots(comparison)] == ALL
    without_kld = replace(
        comparison,
        runs=[replace(figures, kld=None, run=replace(figures.run, kld=None)) for figures in comparison.runs],
    )
    assert [plot.name for plot in plots(without_kld)] == ["perplexity", "running-difference"]
    alone = replace(without_kld, runs=without_kld.runs[:1], pairs=[])
    assert [plot.name for plot in plots(alone)] == ["perplexity"]
    identical = changed(comparison, lambda run: replace(run, kld=np.zeros(NUM_TOKENS)))
    assert [plot.name for plot in plots(identical)] == ["perplexity", "running-difference"]


def test_a_run_without_any_divergence_is_named_and_not_drawn(comparison):
    """As the reference's own model on an equal server: a log axis has no 0, and the others need one."""
    base, *others = comparison.runs
    zeros = replace(base, kld=Figure(0, 0, 0, 0), run=replace(base.run, kld=np.zeros(NUM_TOKENS)))
    with_zeros = replace(comparison, runs=[zeros, *others])
    for plot in plots(with_zeros)[1:4]:
        assert "Not drawn, because it is exactly 0 at every token: BF16." in plot.caption
    for name in ("kl-divergence", "kl-divergence-distribution", "kl-divergence-by-confidence"):
        assert drawn(with_zeros, name)[1].get_yscale() == "log"
    assert len(markers(drawn(with_zeros, "kl-divergence")[1])) == len(others)


def test_infinite_values_are_left_out_and_said(comparison):
    kld = comparison.runs[5].run.kld.copy()
    kld[:3] = np.inf
    last = replace(
        comparison.runs[5], kld=Figure(np.inf, None, None, None), run=replace(comparison.runs[5].run, kld=kld)
    )
    infinite = replace(comparison, runs=[*comparison.runs[:5], last])
    captions = {plot.name: plot.caption for plot in plots(infinite)}
    assert "3 infinite values lie beyond the right edge." in captions["kl-divergence-distribution"]
    assert len(markers(drawn(infinite, "kl-divergence")[1])) == 5
    assert "Not drawn, because it is infinite: RTN-3bit." in captions["kl-divergence"]
    assert not any("exactly 0 at every token" in caption for caption in captions.values())
    for plot in plots(infinite):
        plot.draw(LIGHT).draw_without_rendering()


def test_a_run_of_infinite_perplexity_is_named(comparison):
    last = replace(comparison.runs[5], perplexity=Figure(np.inf, None, None, None))
    found = plots(replace(comparison, runs=[*comparison.runs[:5], last]))
    assert "Not drawn, because it is infinite: RTN-3bit." in found[0].caption


def test_a_run_of_zeros_and_infinities_is_not_said_to_be_zero(comparison):
    kld = np.zeros(NUM_TOKENS)
    kld[3] = np.inf
    last = comparison.runs[5]
    last = replace(last, kld=Figure(np.inf, None, None, None), run=replace(last.run, kld=kld))
    captions = {plot.name: plot.caption for plot in plots(replace(comparison, runs=[*comparison.runs[:5], last]))}
    assert "because it is infinite or exactly 0: RTN-3bit." in captions["kl-divergence-distribution"]
    assert not any("at every token" in caption for caption in captions.values())


def test_a_text_too_short_for_intervals_has_none(comparison):
    short = replace(comparison, blocks="no intervals: a text of 3 windows is too short")
    assert "No intervals: a text of 3 windows is too short. Corpus" in plots(short)[0].caption


def test_long_names_are_shortened_and_stay_distinct(comparison):
    long = [f"/models/{'a' * 60}/{end}" for end in ("one", "two")]
    same = [f"{'b' * 30}{middle}{'b' * 30}" for middle in "xy"]
    names = short_labels([*long, *same, "short"])
    assert names[0].endswith("/one")
    assert names[4] == "short"
    assert len(set(names)) == 5
    assert max(map(len, names)) <= 44
    _, axes = drawn(changed(comparison, lambda run: replace(run, label=run.label + "a" * 200)), "perplexity")
    assert max(len(text.get_text()) for text in axes.texts) <= 44


def test_a_name_with_dollars_and_underscores_is_drawn_as_it_is(comparison):
    odd = changed(comparison, lambda run: replace(run, label=f"_a$b_{run.label}$"))
    figure, _ = drawn(odd, "running-difference")
    figure.draw_without_rendering()
    assert [text.get_text().strip() for text in figure.legends[0].get_texts()] == [
        f"_a$b_{model.name}$" for model in MODELS[1:]
    ]


# --- Colours ---

# Linear RGB as it is seen without red and without green cones: Machado, Oliveira and Fernandes (2009), severity 1.
COLOUR_VISION = {
    "full": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def lab(colour, vision):
    """CIE L*a*b* of a colour as it is seen."""
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    seen = np.clip(COLOUR_VISION[vision] @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ seen / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", COLOUR_VISION)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_are_told_apart_with_any_colour_vision(theme, vision):
    """A difference of 10 is seen at a glance; markers and dashes differ as well."""
    pairs = {
        (one, other): round(float(np.linalg.norm(lab(one, vision) - lab(other, vision))), 1)
        for one, other in combinations(theme.runs, 2)
    }
    assert {pair: distance for pair, distance in pairs.items() if distance < 10} == {}


def test_no_two_colours_of_a_theme_are_one():
    """Or the page could not replace them one by one."""
    colours = [LIGHT.paper, LIGHT.ink, LIGHT.quiet, LIGHT.grid, *LIGHT.runs]
    assert len(set(colours)) == len(colours)
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
