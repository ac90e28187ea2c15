"""Shows a run of `ppl-client parity` as text, and makes its tables for the report."""

import json
from collections.abc import Iterator

from scoremode._texts import Column, aligned, printable, two_columns
from scoremode.kld import NEGLIGIBLE_KLD
from scoremode.runs.parity import ParityRun, pair_of
from scoremode.runs.ratios import AGAIN
from scoremode.runs.report import weights_in_words

_MOST_FAR = 10
_DIFFERENCES = {
    "tokens": ("num_tokens", ",.0f"),
    "mean": ("mean", ".3g"),
    "mean abs": ("mean_absolute", ".3g"),
    "median": ("median", ".3g"),
    "90%": ("p90", ".3g"),
    "99%": ("p99", ".3g"),
    "99.9%": ("p999", ".3g"),
    "largest": ("largest", ".3g"),
}
"""Headings, and for each the figure and its format."""
_RATIOS = {
    "k1": ("k1", ".3g"),
    "k2": ("k2", ".3g"),
    "k3": ("k3", ".3g"),
    "off": ("ratio_share", ".2%"),
    "ESS tokens": ("ess_tokens", ".2%"),
    "ESS batch": ("ess_batch", ".2%"),
    "by mean": ("masked_by_mean", ".2%"),
    "by a token": ("masked_by_token", ".2%"),
}


def parity_tables(run: ParityRun) -> Iterator[tuple[str, list[Column]]]:
    """Yield each table with its title."""
    yield "Differences of logprobs, in nats", _figures(run, _DIFFERENCES)
    masked = f"sequences masked at {run.mask_threshold:g}"
    yield f"Ratios: KL divergence, share off 1 ± 0.2, effective sample sizes, {masked}", _figures(run, _RATIOS)
    parts = {f"{by} {name}": part for by, some in run.parts.items() for name, part in some.items()}
    pairs = dict[str, str]()
    for finding in run.findings:
        pairs[finding.source] = " / ".join(pair_of(finding.source, finding.lane))
        pairs[f"{finding.lane} floor"] = f"{finding.lane}{AGAIN} / {finding.lane}"
    yield (
        "Mean absolute differences, in nats",
        [
            Column("", [*parts], right=False),
            Column("tokens", [_shown(part["num_tokens"], ",.0f") for part in parts.values()]),
            *(Column(name, [_shown(part[pair], ".3g") for part in parts.values()]) for name, pair in pairs.items()),
        ],
    )
    far, lanes = run.far[:_MOST_FAR], {finding.source: finding.lane for finding in run.findings}
    yield (
        "Farthest tokens",
        [
            Column("token", [_quoted(token.token) for token in far], right=False),
            Column("row", [f"{token.row:,}" for token in far]),
            Column("position", [f"{token.position:,}" for token in far]),
            Column("column", [token.source for token in far]),
            Column("logprob", [f"{token.logprob:.4f}" for token in far]),
            Column("served", [f"{token.served:.4f} {lanes[token.source]}" for token in far]),
            Column("after", [_quoted(token.before[-40:]) for token in far]),
        ],
    )


def _figures(run: ParityRun, headings: dict[str, tuple[str, str]]) -> list[Column]:
    return [
        Column("", [*run.figures], right=False),
        *(
            Column(heading, [_shown(figures[name], form) for figures in run.figures.values()])
            for heading, (name, form) in headings.items()
        ),
    ]


def _shown(value: float | None, form: str) -> str:
    if value is None:
        return "inf"
    return format(value if abs(value) >= NEGLIGIBLE_KLD else 0, form)


def _quoted(text: str) -> str:
    return printable(json.dumps(text, ensure_ascii=False))


def parity_as_text(run: ParityRun) -> str:
    """Format what was compared, the tables, and the verdict."""
    num_tokens = next(iter(run.figures.values()))["num_tokens"]
    rows = [
        ("model", f"{run.model}: {weights_in_words(run.server)}"),
        ("server", f"scoremode {run.server.scoremode_version}, vLLM {run.server.vllm_version}"),
        ("computed on", run.server.devices or "-"),
        ("rollouts", f"{run.rollouts}: {run.num_rows:,} rows, {num_tokens:,.0f} tokens"),
        ("time", f"{run.seconds:,.1f} s"),
    ]
    tables = ["\n".join([f"====== {title} ======", *aligned(columns)]) for title, columns in parity_tables(run)]
    verdict = "; ".join(finding.sentence for finding in run.findings)
    return "\n\n".join([two_columns(rows), *tables, printable(verdict)])
