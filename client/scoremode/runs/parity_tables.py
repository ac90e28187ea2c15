"""Shows a run of `ppl-client parity` as text, and makes its tables for the report."""

import json
from collections.abc import Callable, Iterator

from scoremode._texts import printable, two_columns
from scoremode.kld import NEGLIGIBLE_KLD
from scoremode.runs.parity import ParityRun
from scoremode.runs.ratios import AGAIN, Finding
from scoremode.runs.report import weights_in_words

Table = tuple[str, list[list[str]]]
"""A title, and rows of cells, the first of which are headings."""


def _nats(value: float | None) -> str:
    if value is None:
        return "inf"
    return "0" if abs(value) < NEGLIGIBLE_KLD else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


_MOST_FAR = 10

_DIFFERENCES: dict[str, Callable[[float | None], str]] = {
    "num_tokens": lambda number: f"{number:,.0f}",
    **dict.fromkeys(("mean", "mean_absolute", "median", "p90", "p99", "p999", "largest"), _nats),
}
_RATIOS = {
    **dict.fromkeys(("k1", "k2", "k3"), _nats),
    **dict.fromkeys(("ratio_share", "ess_tokens", "ess_batch", "masked_by_mean", "masked_by_token"), _percent),
}


def parity_tables(run: ParityRun) -> Iterator[Table]:
    items, threshold = run.differences, f"{run.mask_threshold:g}"
    lanes = {finding.source: finding.lane for finding in run.findings}

    def rows(formats: dict[str, Callable[[float | None], str]]) -> list[list[str]]:
        return [[item.pair, *(form(item.figures[name]) for name, form in formats.items())] for item in items]

    yield (
        "Differences of logprobs, in nats",
        [["", "tokens", "mean", "mean abs", "median", "90%", "99%", "99.9%", "largest"], *rows(_DIFFERENCES)],
    )
    yield (
        f"Ratios: KL divergence, share off 1 ± 0.2, effective sample sizes, sequences masked at {threshold}",
        [["", "k1", "k2", "k3", "off", "ESS tokens", "ESS batch", "by mean", "by a token"], *rows(_RATIOS)],
    )
    columns = {name: pair for finding in run.findings for name, pair in _with_floor(finding)}
    parts = [
        [
            f"{part.by} {part.name}",
            f"{part.num_tokens:,}",
            *(_nats(part.mean_absolute[pair]) for pair in columns.values()),
        ]
        for part in run.parts
    ]
    yield "Mean absolute differences of the sample's tokens, in nats", [["", "tokens", *columns], *parts]
    far = [
        [
            _quoted(token.token),
            f"{token.row:,}",
            f"{token.position:,}",
            token.source,
            f"{token.logprob:.4f}",
            f"{token.served:.4f} {lanes[token.source]}",
            _quoted(token.before[-40:]),
        ]
        for token in run.far[:_MOST_FAR]
    ]
    yield "Farthest tokens", [["token", "row", "position", "column", "logprob", "served", "after"], *far]


def _with_floor(finding: Finding) -> Iterator[tuple[str, str]]:
    """A column's pair in its nearer lane, and the lane's floor, by the headings of a table."""
    yield finding.source, f"{finding.source} / {finding.lane}"
    yield f"{finding.lane} floor", f"{finding.lane}{AGAIN} / {finding.lane}"


def parity_as_text(run: ParityRun) -> str:
    """Format what was compared, the tables, and the verdict."""
    rows = [
        ("model", f"{run.model}: {weights_in_words(run.server)}"),
        ("server", f"scoremode {run.server.scoremode_version}, vLLM {run.server.vllm_version}"),
        ("computed on", run.server.devices or "-"),
        ("rollouts", f"{run.rollouts}: {run.num_rows:,} rows, {run.differences[0].figures['num_tokens']:,.0f} tokens"),
        ("sample", f"{run.num_sample_rows:,} rows, for quantiles, parts and the floor"),
        ("time", f"{run.seconds:,.1f} s"),
    ]
    paragraphs = ["\n".join([f"====== {title} ======", *_aligned(cells)]) for title, cells in parity_tables(run)]
    return "\n\n".join(
        [two_columns(rows), *paragraphs, printable("; ".join(finding.sentence for finding in run.findings))]
    )


def _aligned(cells: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        aligned = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *aligned])


def _quoted(text: str) -> str:
    return printable(json.dumps(text, ensure_ascii=False))
