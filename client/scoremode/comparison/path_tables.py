"""Shows a run of `ppl-client paths`: as text for a terminal, and as a section of the report with one picture."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from scoremode._texts import Column, aligned, one_line, printable
from scoremode.comparison.excess import Excess
from scoremode.comparison.figures import NOT_KNOWN, Figure, plain, with_interval
from scoremode.comparison.paths import DEFAULT, LaneFigures, PathRow, PathsRun
from scoremode.comparison.plot_style import Theme, add_tip, legend, marker, plain_log_axis
from scoremode.comparison.plots import Plot
from scoremode.comparison.size_plots import label_points, set_size_scale
from scoremode.comparison.sizes import Point
from scoremode.comparison.tables import paragraphs, short_labels
from scoremode.kld import NEGLIGIBLE_KLD, over_noise_floor, times_the_floor
from scoremode.runs import weights_in_words

_MAX_NAME = 32
"""Limit on the characters of a path's name in the table and in the picture."""
_MOST_BLOCKS = 10
_LONG_CONTEXT = 4096
"""Divergences by position are shown for windows of at least this many tokens."""
_HEADERS = ("path", "lane", "KLD", "floor", "times", "excess, 95 %", "from", "tokens/s", "verdict")
_NOTE = "In nats per token; times: KLD / floor; excess: KLD - floor; from: the position from which on the path differs."


Details = tuple[list[str], list[list[Column]]]
"""Sentences on a path that differs, and tables: its blocks that stand out, and each lane's divergence by position."""


@dataclass(frozen=True, slots=True)
class PathsView:
    """The parts of the text and of the report's section about a run of `ppl-client paths`."""

    title: str
    heading: list[str]
    table: list[Column]
    notes: list[str]
    plot: Plot | None
    """None if no path has a speed."""
    details: list[Details]
    """One entry per path that differs; the last has the reasons why paths failed or are refused."""


def paths_as_text(run: PathsRun) -> str:
    """Format how many paths differ, a table, a paragraph per path that differs, and why others failed."""
    view = paths_view(run)
    details = [
        [*sentences, *(line for table in tables for line in aligned(table))] for sentences, tables in view.details
    ]
    return paragraphs(view.heading, [*aligned(view.table), *view.notes], *details)


def paths_view(run: PathsRun) -> PathsView:
    names = [row.name for row in run.rows]
    labels = dict(zip(names, short_labels([*map(_shown, names)], _MAX_NAME), strict=True))
    lines = [_line(row, lane, labels) for row in run.rows for lane in (row.lanes or (None,))]
    columns = zip(_HEADERS, zip(*lines, strict=True), strict=True)
    same = [f"{row.name} reports the same kernels as {row.same_as}." for row in run.rows if row.same_as]
    failures = [f"{row.name} {'failed' if row.lanes else 'is refused'}: {row.reason}" for row in run.rows if row.reason]
    return PathsView(
        _shown(f"Kernel paths of {run.model}"),
        [*map(_shown, _heading(run))],
        [Column(header, cells, header not in ("path", "lane", "verdict")) for header, cells in columns],
        [_NOTE, *map(_shown, same)],
        _plot(run, labels),
        [*(_details(run, row) for row in run.differing), ([*map(_shown, failures)], [])],
    )


def _shown(text: str) -> str:
    return printable(one_line(text))


def _heading(run: PathsRun) -> Iterator[str]:
    """Say how many paths differ, where the floor is from, and what was measured."""
    counts, server = Counter(row.verdict for row in run.rows), run.server
    differ = "paths differs" if counts["differs"] == 1 else "paths differ"
    others = [f"; {verdict}: {counts[verdict]}" for verdict in ("refused", "failed", "no verdict") if counts[verdict]]
    num_paths = len(run.rows) - counts["default"]
    yield f"{counts['differs']} of {num_paths} {differ} from the default path{''.join(others)}."
    windows = f"{run.num_tokens:,} tokens in {run.num_windows:,} windows of {run.context_length:,}"
    yield f"Each path was compared {run.num_repeats} times over {windows}, and as the floor the default path again."
    versions = f"scoremode {server.scoremode_version}, vLLM {server.vllm_version}, {server.devices or 'unknown device'}"
    yield f"{run.model}: {weights_in_words(server)}; {versions}; text {run.text[:12]}."


def _line(row: PathRow, lane: LaneFigures | None, labels: Mapping[str, str]) -> list[str]:
    """Format the cells of a path in a lane; `lane` is None for a refused path."""
    if lane is None:
        return [labels[row.name], *[NOT_KNOWN] * (len(_HEADERS) - 2), row.verdict]
    test, speed = lane.excess, lane.tokens_per_second
    interval = with_interval(Figure(test.value, None, test.low, test.high)).errors if row.name != DEFAULT else ()
    verdict = "differs" if lane.differs else "no verdict" if test.p is None else "agrees"
    return [
        labels[row.name],
        lane.lane,
        plain(test.mean).in_text,
        plain(test.floor).in_text,
        plain(over_noise_floor(test.mean, test.floor), 1).in_text,
        interval[-1] if interval else NOT_KNOWN,
        NOT_KNOWN if lane.differs_from is None else f"{lane.differs_from:,}",
        NOT_KNOWN if speed is None else f"{speed:,.0f}",
        DEFAULT if row.name == DEFAULT else verdict,
    ]


def _details(run: PathsRun, row: PathRow) -> Details:
    lanes = [lane for lane in row.lanes if lane.differs]
    sentences = [sentence for lane in lanes for sentence in _how_much(row.name, lane)]
    if (test := row.original) is not None and test.p is not None:
        order = "nearer to" if test.value < 0 else "farther from"
        if test.low is not None and test.high is not None and test.low <= 0 <= test.high:
            order = "about as near to"
        nats = f"{plain(test.floor).in_text} nats on the default path, {_more(test)} here"
        sentences.append(f"It is {order} the original: {nats}.")
    traced = [lane for lane in lanes if run.context_length >= _LONG_CONTEXT and len(lane.by_position) > 1]
    blocks = row.blocks[:_MOST_BLOCKS]
    columns = [
        Column("block", [_shown(block.name) for block in blocks], right=False),
        Column("kind", [block.kind for block in blocks], right=False),
        Column("excess", [_more(block.excess) for block in blocks]),
    ]
    sentences.append(_where(row, lanes[0].lane))
    return [*map(_shown, sentences)], [*([columns] if blocks else []), *map(_trace, traced)]


def _how_much(name: str, lane: LaneFigures) -> Iterator[str]:
    where = "" if lane.differs_from is None else f", from position {lane.differs_from:,} on"
    yield f"{name} differs in {lane.lane}: {_size(lane.excess)}{where}."
    if lane.groups:
        most = max(lane.groups, key=lambda group: group.kld - group.floor)
        tokens = "where the default path's top token has" if most.by == "confidence" else f"in {most.by}"
        yield f"Most {tokens} {most.name}: {plain(most.kld).in_text} nats."


def _size(test: Excess) -> str:
    multiple = over_noise_floor(test.mean, test.floor)
    return f"{plain(test.mean).in_text} nats{'' if multiple is None else f', {times_the_floor(multiple)} the floor'}"


def _more(test: Excess) -> str:
    return with_interval(Figure(test.value, None, test.low, test.high), sign="+").in_text


def _where(row: PathRow, lane: str) -> str:
    """Say in how many blocks a path differs, or why none is named; `lane` is the first in which it differs."""
    eager, blocks = row.eager, f"No block stands out.{' The largest excesses:' if row.blocks else ''}"
    if lane != "prefill":
        return f"The difference is in the {lane} lane: blocks are not measured there."
    if eager is None:
        return "Its blocks were not measured."
    if eager.excess.p is None:
        return "With both paths eager, the text is too short for a verdict."
    if row.blocks and row.blocks[0].differs:
        num_shown = f"{min(len(row.blocks), _MOST_BLOCKS)} of {len(row.blocks)}"
        blocks = f"Blocks that cost more than on the default path ({num_shown}):"
    elif not eager.differs:
        return "It agrees when both are eager: compilation or CUDA graphs make the difference."
    return f"With both paths eager: {_size(eager.excess)}. {blocks}"


def _trace(lane: LaneFigures) -> list[Column]:
    return [
        Column(f"positions, {lane.lane}", [part.name for part in lane.by_position], right=False),
        Column("tokens", [f"{part.num_tokens:,}" for part in lane.by_position]),
        Column("KLD", [plain(part.kld).in_text for part in lane.by_position]),
        Column("floor", [plain(part.floor).in_text for part in lane.by_position]),
    ]


def _plot(run: PathsRun, labels: Mapping[str, str]) -> Plot | None:
    """Plot divergence against speed, for the paths and lanes that have both."""
    names = {name: label.removeprefix("attention-backend=") for name, label in labels.items()}
    drawn = [
        (Point(index, names[row.name], lane.tokens_per_second, *[lane.excess.mean] * 3), lane)
        for index, row in enumerate(run.rows)
        for lane in row.lanes
        if lane.tokens_per_second and math.isfinite(lane.excess.value) and (lane.differs or not row.same_as)
    ]
    if not drawn:
        return None
    return Plot(
        "paths-by-speed",
        "Divergence and speed of each path",
        "Mean KL divergence from the default path against compared tokens per second.",
        partial(_draw, drawn),
        range(len(labels)),
    )


def _draw(drawn: Sequence[tuple[Point, LaneFigures]], drawing: Drawing, axes: Axes, theme: Theme) -> None:
    drawing.set_size_inches(7.5, 4.8)
    axes.set(xlabel="compared tokens per second", ylabel="mean KL divergence (nats)")
    set_size_scale(axes, [point.size for point, _ in drawn])
    values = [value for point, lane in drawn for value in (point.value, lane.excess.floor) if value > NEGLIGIBLE_KLD]
    if values:
        axes.set_ylim(min(values) / 2, max(values) * 2)
        plain_log_axis(axes, "y")
    # Values of 0 are drawn near the lower end of the axis.
    lowest = 1.1 * axes.get_ylim()[0]
    for place, name in enumerate(dict.fromkeys(lane.lane for _, lane in drawn)):
        own = [(point, lane.excess) for point, lane in drawn if lane.lane == name]
        for point, test in own:
            dots = axes.plot(point.size, max(point.value, lowest), marker(place), color=theme.run(point.index))
            add_tip(dots, f"{point.label}, {name}: {_size(test)}; {point.size:,.0f} tokens/s")
        axes.plot([], [], marker(place), color=theme.quiet, label=name)
        floor, speeds = own[0][1].floor, sorted(point.size for point, _ in own)
        ends, label = (speeds[0] / 1.1, speeds[-1] * 1.1), f"floor, {name}: {plain(floor).text}"
        axes.hlines(max(floor, lowest), *ends, theme.quiet, ":", label=label)
    legend(drawing, axes, theme)
    label_points(drawing, axes, [point for point, _ in drawn], theme)
