"""Plots of a comparison: what is drawn is what was measured."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from made_up_runs import MODELS, NOISE_FLOOR, write_runs

from scoremode.comparison import compare, load_runs
from scoremode.comparison.plot_style import LIGHT
from scoremode.comparison.plots import plots, write_plots
from scoremode.comparison.token_plots import confidence_means, running_difference, survival

NUM_TOKENS = 5000
KLD, DISTRIBUTION, BY_CONFIDENCE = (f"kl-divergence{end}" for end in ("", "-distribution", "-by-confidence"))
PERPLEXITY, DIFFERENCE = "perplexity-ratio", "running-difference"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return compare(load_runs(write_runs(tmp_path_factory.mktemp("runs"), NUM_TOKENS)), num_resamples=50)


def changed(comparison, change):
    """The comparison with every run changed."""
    return replace(comparison, runs=[replace(figures, run=change(figures.run)) for figures in comparison.runs])


def drawn(comparison, name, theme=LIGHT):
    """The figure of a plot, and its axes."""
    figure = next(plot for plot in plots(comparison) if plot.name == name).draw(theme)
    return figure, figure.axes[0]


def test_every_plot_is_written_for_both_schemes_with_a_caption(comparison, tmp_path):
    folder, names = tmp_path / "new" / "plots", [PERPLEXITY, DIFFERENCE]
    write_plots(changed(comparison, lambda run: replace(run, kld=None)), folder)
    pictures = {f"{name}-{kind}" for name in names for kind in ("light.svg", "light.png", "dark.svg", "dark.png")}
    assert {file.name for file in folder.iterdir() if file.stat().st_size} == pictures | {"captions.md"}
    captions = (folder / "captions.md").read_text()
    texts = (*(f"**{name}**: " for name in names), f"{NUM_TOKENS:,} tokens scored", "vLLM 0.32.0", "50 resamples")
    assert [text for text in texts if text not in captions] == []


def test_perplexity_is_drawn_against_size(comparison):
    axes, base = drawn(comparison, PERPLEXITY)[1], comparison.runs[0].nll.value
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("bits per weight", "ln(perplexity / the base's)")
    points = [tuple(float(value[0]) for value in container[0].get_data()) for container in axes.containers]
    for (bits, ratio), model, figures in zip(points, MODELS, comparison.runs, strict=True):
        assert bits == pytest.approx(model.bits, rel=1e-6)
        assert ratio == pytest.approx(figures.nll.value - base, rel=1e-9)


def test_divergence_has_its_intervals_and_the_noise_floor(comparison):
    _, axes = drawn(comparison, KLD)
    for container, figures in zip(axes.containers, comparison.runs, strict=True):
        bottom, top = container[2][0].get_segments()[0][:, 1]
        assert (bottom, top) == (pytest.approx(figures.kld.low), pytest.approx(figures.kld.high))
    assert any(line.get_label() == "noise floor" and set(line.get_ydata()) == {NOISE_FLOOR} for line in axes.lines)


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


def test_the_running_difference_is_a_mean_of_what_came_before(comparison):
    base, run = comparison.runs[0].run, comparison.runs[5].run
    means = running_difference(run, base)
    for count in (1, 10, NUM_TOKENS):
        assert means[count - 1] == pytest.approx((run.nlls[:count] - base.nlls[:count]).mean(), rel=1e-9)
    line = next(line for line in drawn(comparison, DIFFERENCE)[1].lines if line.get_label() == "RTN-3bit")
    assert line.get_ydata()[-1] == means[-1]
