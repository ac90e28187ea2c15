"""Makes the plots of a comparison with their captions, and writes the files of `--plots`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from scoremode.comparison import size_plots, sizes, token_plots
from scoremode.comparison.agreement import agreement_of, floor_of, has_answers
from scoremode.comparison.figures import Figure, RunComparison, plain
from scoremode.comparison.plot_style import DARK, LIGHT, Theme, as_png, as_svg, new_axes
from scoremode.comparison.run_file import RunFile
from scoremode.comparison.sizes import Point, is_simulated
from scoremode.comparison.tables import measured_by, short_labels
from scoremode.kld import NEGLIGIBLE_KLD
from scoremode.runs import write_together

EXPERT_ROUTES = "expert-routes"
"""The name of the plot of choices of experts, which a report shows in a section of its own."""
MAX_LABEL = 40
"""Limit on the characters of a run's name in a plot and its caption."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture that can be drawn in any colors, and the text that belongs below it."""

    name: str
    subject: str
    """Description for readers who cannot see the picture."""
    caption: str
    """Caption for this plot only; `common_caption` has the part that applies to all plots."""
    drawn: Callable[[Drawing, Axes, Theme], None]
    formats: Sequence[int] = ()
    """The index of each run's color: runs with the same format share it, unless all have one."""
    note: str = ""
    """The line in the picture that describes the measurement."""

    def draw(self, theme: Theme) -> Drawing:
        """Draw the picture. Names stay as they are: text between two `$` is not parsed as a formula."""
        theme = replace(theme, runs=tuple(theme.run(index) for index in self.formats), note=self.note)
        with matplotlib.rc_context({"text.parse_math": False}):
            drawing, axes = new_axes(theme)
            self.drawn(drawing, axes, theme)
            return drawing


def plots(comparison: RunComparison) -> list[Plot]:
    """Make all plots that the comparison has data for, the most important first. Long labels are shortened, in captions
    too."""
    labels = short_labels([run.label for run in comparison.files], MAX_LABEL)
    runs = [
        replace(figures, run=replace(figures.run, label=label))
        for figures, label in zip(comparison.runs, labels, strict=True)
    ]
    comparison = replace(comparison, runs=runs)
    diverging = [(index, run) for index, run in enumerate(comparison.files) if _has_divergence(run)]
    drawable = (
        _mean_kld(comparison),
        _perplexity_ratio(comparison) if comparison.pairs else _perplexity(comparison),
        _kld_distribution(comparison, diverging) if diverging else None,
        _kld_by_confidence(comparison, diverging) if diverging else None,
        _agreement(comparison),
        _running_difference(comparison),
        _expert_routes(comparison),
    )
    distinct = list(dict.fromkeys(run.format for run in comparison.files))
    formats = [distinct.index(run.format) for run in comparison.files] if len(distinct) > 1 else [*range(len(runs))]
    return [
        replace(plot, formats=plot.formats or formats, note=measurement_in_words(comparison))
        for plot in drawable
        if plot is not None
    ]


def write_plots(comparison: RunComparison, folder: Path) -> list[Path]:
    """Write every plot as SVG and PNG for light and dark pages, and `captions.md`; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[str, bytes] = {}
    all_plots = plots(comparison)
    for plot in all_plots:
        for name, theme in (("light", LIGHT), ("dark", DARK)):
            drawing = plot.draw(theme)
            contents[f"{plot.name}-{name}.svg"] = as_svg(drawing, text_as_paths=True).encode()
            contents[f"{plot.name}-{name}.png"] = as_png(drawing)
    captions = [*(f"**{plot.name}**: {plot.caption}" for plot in all_plots), common_caption(comparison)]
    contents["captions.md"] = "".join(f"{caption}\n\n" for caption in captions).encode()
    write_together({folder / name: content for name, content in contents.items()})
    return [folder / name for name in contents]


def _perplexity(comparison: RunComparison) -> Plot | None:
    size, points = sizes.points(comparison, [figures.perplexity for figures in comparison.runs])
    if not points:
        return None
    return Plot(
        "perplexity",
        f"Perplexity against {size or 'runs'}",
        f"Perplexity{_front(size, points)}. {_not_drawn(comparison, comparison.files, points)}".rstrip(),
        partial(size_plots.draw, points, size, "perplexity", None),
    )


def _perplexity_ratio(comparison: RunComparison) -> Plot | None:
    """Plot ratios paired by token: a passage that is difficult for all runs does not widen their intervals."""
    ratios = [Figure(0, None, None, None), *(pair.ln_ppl_ratio for pair in comparison.base_pairs.values())]
    base = comparison.base.label
    size, points = sizes.points(comparison, ratios)
    if not points:
        return None
    return Plot(
        "perplexity-ratio",
        f"Logarithm of the perplexity over that of {base}, against {size or 'runs'}",
        f"ln(perplexity / perplexity of {base}), paired token by token,{_front(size, points)}. At 0 a run is as good "
        f"as {base}, and 0.01 is 1 % more. {_not_drawn(comparison, comparison.files, points)}".rstrip(),
        partial(size_plots.draw, points, size, "ln(perplexity / the base's)", None),
    )


def _mean_kld(comparison: RunComparison) -> Plot | None:
    diverging = [figures.kld if _has_divergence(figures.run) else None for figures in comparison.runs]
    size, points = sizes.points(comparison, diverging)
    if not points:
        return None
    references = (run.reference for run in comparison.files)
    names = dict.fromkeys(reference.model for reference in references if reference is not None)
    return Plot(
        "kl-divergence",
        f"Mean KL divergence against {size or 'runs'}",
        f"Mean KL divergence from {', '.join(names)}{_front(size, points)}. "
        f"{_without_place(comparison, points)}{_floor(comparison)}",
        partial(size_plots.draw, points, size, "mean KL divergence (nats)", noise_floor(comparison)),
    )


def _kld_distribution(comparison: RunComparison, runs: token_plots.Numbered) -> Plot:
    floor = noise_floor(comparison)
    infinite = sum(int(np.isinf(run.kld).sum()) for _, run in runs if run.kld is not None)
    unbounded = f" {infinite:,} infinite values lie beyond the right edge." if infinite else ""
    return Plot(
        "kl-divergence-distribution",
        "Share of tokens by KL divergence",
        f"Share of tokens whose KL divergence from the reference is larger.{unbounded} "
        f"{_without_place(comparison, [run for _, run in runs])}{_floor(comparison)}",
        partial(token_plots.draw_kld_distribution, runs, floor),
    )


def _kld_by_confidence(comparison: RunComparison, runs: token_plots.Numbered) -> Plot:
    return Plot(
        "kl-divergence-by-confidence",
        "Mean KL divergence by the reference's confidence",
        "Mean KL divergence of the tokens, grouped by the probability that the reference gave its top token, the most "
        f"confident at the right. {_without_place(comparison, [run for _, run in runs])}Infinite values are left out. "
        "Intervals are 95 %, from errors that take windows as independent and tokens within one as dependent.",
        partial(token_plots.draw_kld_by_confidence, runs),
    )


def _agreement(comparison: RunComparison) -> Plot | None:
    files = [run.answers or run for run in comparison.files]
    runs = [(index, run) for index, run in enumerate(files) if has_answers(run, are_greedy=True)]
    if not runs:
        return None
    with_floors = ((run.lane, floor_of(run, files)) for _, run in runs if not run.as_noise_floor)
    floors = {lane: floor for lane, floor in with_floors if floor is not None}
    curves: list[token_plots.Curve] = [(index, run.label, agreement_of(run)) for index, run in runs]
    curves += [(None, f"the original itself ({lane})", floor) for lane, floor in floors.items()]
    missing = "" if floors else " How the original agrees with itself was not measured (ppl-client kld --floor)."
    return Plot(
        "agreement",
        "Share of answers that are the same, by number of tokens",
        "Share of the original's answers for which a run gives at least this many same tokens, by its top token after "
        "each beginning of the answer. Answers that end before they part are censored: the curve is the Kaplan-Meier "
        f"estimate. No errors are drawn.{missing}",
        partial(token_plots.draw_agreement, curves),
    )


def _running_difference(comparison: RunComparison) -> Plot | None:
    base = comparison.base
    runs = list(enumerate(comparison.files))[1:]
    if not runs or not all(np.isfinite(run.nlls).all() for run in comparison.files):
        return None
    return Plot(
        "running-difference",
        "Running difference of NLL along the text",
        f"Mean NLL minus that of {base.label}, over the text up to a token. If the models differ, and not only in a "
        "few passages, the curve is level long before the end. No errors are drawn.",
        partial(token_plots.draw_running_difference, base, runs),
    )


def _expert_routes(comparison: RunComparison) -> Plot | None:
    runs = [(index, run) for index, run in enumerate(comparison.files) if run.routes is not None]
    if not runs:
        return None
    return Plot(
        EXPERT_ROUTES,
        "Share of tokens with the same experts, by layer",
        "Share of tokens for which a layer chooses the same set of experts as the reference's. Solid: after the run's "
        "own experts; dashed: after the reference's, so that only rounding and the layer's own router differ. No "
        "errors are drawn.",
        partial(token_plots.draw_same_experts, runs),
        # Dashes tell passes apart, so runs of one format need colors of their own.
        range(len(comparison.files)),
    )


def noise_floor(comparison: RunComparison) -> float | None:
    """Mean KL divergence of the reference's model from itself, in nats; None if no run has it, or runs have several."""
    floors = {run.noise_floor for run in comparison.files} - {None}
    return floors.pop() if len(floors) == 1 else None


def _has_divergence(run: RunFile) -> bool:
    """Whether the run has KL divergences that a log axis can show: their finite values are not negligible."""
    return run.kld is not None and float(run.kld.sum(where=np.isfinite(run.kld))) >= NEGLIGIBLE_KLD * len(run.kld)


def _without_place(comparison: RunComparison, drawn: Sequence[RunFile | Point]) -> str:
    """Name the runs that a plot of KL divergences leaves out, and say why."""
    runs = [run for run in comparison.files if run.kld is not None]
    return _not_drawn(comparison, runs, drawn, "a log axis cannot show 0 or infinity")


def _not_drawn(
    comparison: RunComparison,
    runs: Sequence[RunFile],
    drawn: Sequence[RunFile | Point],
    reason: str = "it is infinite",
) -> str:
    labels, against_size = {item.label for item in drawn}, any(isinstance(item, Point) for item in drawn)
    reasons: dict[str, list[str]] = {}
    for run in (run for run in runs if run.label not in labels):
        if against_size and is_simulated(run, comparison.base):
            why = "its files do not say what it would take (--bits does)"
        elif against_size and run.is_reference and run.gib is None:
            why = "the reference does not say its model's size"
        else:
            why = reason
        reasons.setdefault(why, []).append(run.label)
    return "".join(f"Not drawn, because {why}: {', '.join(names)}. " for why, names in reasons.items())


def _front(size: str | None, points: Sequence[Point]) -> str:
    if size is None:
        return " of each run"
    if len(points) < sizes.MIN_FRONT:
        return f" against {size}"
    return f" against {size}; no run is at once smaller and better than one on the Pareto front"


def _floor(comparison: RunComparison) -> str:
    floor = noise_floor(comparison)
    if floor is None:
        return "No noise floor is drawn: it is not known, not informative, or not the same for all runs."
    return f"The noise floor, the mean of the reference's model against itself, is {plain(floor).text} nats."


def common_caption(comparison: RunComparison) -> str:
    """The caption for all plots, which says how intervals were computed and describes the measurement."""
    return f"{comparison.intervals_in_words('Intervals are 95 %')} {measurement_in_words(comparison)}"


def measurement_in_words(comparison: RunComparison) -> str:
    """Describe the measurement: the base's model, corpus, method, tokens, dtypes, versions, devices and days. Without
    a corpus, the text is named by its hash."""
    run = comparison.base
    corpus = run.text_in_words if comparison.corpus is None else comparison.corpus.in_words
    dtypes = ", ".join(dict.fromkeys(run.server.dtype for run in comparison.files))
    return (
        f"Base: {run.model}. Corpus: {corpus}. Method: {run.method}, context length {run.context_length:,}, stride "
        f"{run.stride:,}. "
        f"{run.num_scored:,} tokens scored in {run.num_windows:,} windows. {dtypes}; {measured_by(comparison)}."
    )
