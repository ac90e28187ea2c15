"""Compares the logprobs of rollouts with those that servers compute for the same tokens, for `ppl-client parity` and
for Python.

Every row is scored in the decode lane, then in prefill, then again in both, with fewer in flight: the floor.
"""

import hashlib
import logging
from asyncio import Semaphore
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from scoremode._texts import model_name
from scoremode.client import AsyncScoreClient
from scoremode.errors import ResponseError, ScoremodeError
from scoremode.kld import Floats
from scoremode.metrics import finite_or_none
from scoremode.results import ScoredRollout
from scoremode.runs.lanes import range_of
from scoremode.runs.plan import server_header
from scoremode.runs.pool import Pool
from scoremode.runs.ratios import AGAIN, Finding, Targets, figures, judge, range_in_words, shifted
from scoremode.runs.report import Arrays, record_beginning
from scoremode.runs.rollouts import Rollout, RolloutColumns, Source, read_rollouts
from scoremode.runs.run import OnProgress, StartJournal, measure
from scoremode.wire import Lane, ServerInfo

_log = logging.getLogger(__name__)

_LANES: tuple[Lane, ...] = ("decode", "prefill")
"""Decode comes first, so that a server that does not have the lane refuses it at once."""
_RUNS = (*_LANES, *(lane + AGAIN for lane in _LANES))
_HYPOTHESIS_ROWS = 32
"""Limit on the rows with which hypotheses are tested."""
_NUM_FAR, _NUM_BEFORE = 20, 24
_CLASSES = {0: "others", 1: "first of a completion", 2: "EOS"}
_LOGPROB_EDGES = (-10.0, -3.0, -1.0, -0.1, -0.01)
HISTOGRAM_EDGES = np.geomspace(1e-7, 10, 33)
"""Edges of the bins for absolute differences, in nats; smaller and larger ones count in the first and the last."""


@dataclass(frozen=True, eq=False)
class ParityPlan:
    """The rows to score, as the `Measurement` of their journal. Its windows are all rows in the first of `_RUNS`, then
    in the next."""

    rollouts: list[Rollout]
    server: ServerInfo
    model: str
    fewer: Semaphore
    """Limit on requests in flight in the second run of a lane."""

    @property
    def num_windows(self) -> int:
        return len(_RUNS) * len(self.rollouts)

    async def measure(self, client: AsyncScoreClient, index: int) -> ScoredRollout:
        run, row = divmod(index, len(self.rollouts))
        async with self.fewer if AGAIN in _RUNS[run] else nullcontext():
            logprobs = await _served(client, _LANES[run % len(_LANES)], self.rollouts[row])
        return ScoredRollout(index=index, logprobs=logprobs)

    def nats(self, window: ScoredRollout) -> float:
        column = next(iter(self._rollout(window).logprobs.values()))
        return float(np.square(column - window.logprobs).sum()) / 2

    def header(self) -> dict[str, object]:
        digest = hashlib.sha256()
        for rollout in self.rollouts:
            for part in (rollout.token_ids, rollout.targets, *rollout.logprobs.values(), rollout.temperature):
                digest.update(np.asarray(part, np.float64).tobytes())
        return {"kind": "parity", "sha256": digest.hexdigest(), "model": self.model, **server_header(self.server)}

    def from_line(self, line: dict[str, object]) -> ScoredRollout:
        window = ScoredRollout.model_validate(line)
        if window.num_scored != len(self._rollout(window).targets):
            raise ResponseError(f"{window.num_scored} logprobs do not fit row {window.index}")
        return window

    def _rollout(self, window: ScoredRollout) -> Rollout:
        return self.rollouts[window.index % len(self.rollouts)]

    def targets(self, scored: Sequence[ScoredRollout]) -> Targets:
        number, columns = len(self.rollouts), self.rollouts[0].logprobs
        served = {run: scored[at * number : (at + 1) * number] for at, run in enumerate(_RUNS)}
        return Targets(
            np.repeat(np.arange(number), [len(rollout.targets) for rollout in self.rollouts]),
            np.concatenate([rollout.targets for rollout in self.rollouts]),
            np.concatenate([rollout.token_ids[rollout.targets] for rollout in self.rollouts]),
            {
                **{name: np.concatenate([rollout.logprobs[name] for rollout in self.rollouts]) for name in columns},
                **{
                    run: np.concatenate([window.logprobs for window in windows], dtype=np.float64)
                    for run, windows in served.items()
                },
            },
        )


class FarToken(BaseModel):
    """A token whose logprob in a column is far from the lane's that the column is nearer to."""

    source: Source
    row: int
    """The row's number in the file, from 1."""
    position: int
    """How many tokens come before it."""
    logprob: float
    served: float
    """The lane's logprob."""
    before: str = ""
    """The text before it."""
    token: str = ""


class ParityRun(BaseModel):
    """The content of the file that `ppl-client parity` writes. A pair has the names of two computations: a column, a
    lane, or a lane again. The tokens of `p` in `q / p` are the sampler's if one of both is."""

    kind: Literal["parity"] = "parity"
    model: str
    server: ServerInfo
    rollouts: str
    """The file's name."""
    num_rows: int
    mask_threshold: float
    findings: list[Finding]
    figures: dict[str, dict[str, float | None]]
    """Figures of each pair, as `ratios.figures` computes them. None is an infinite figure."""
    histograms: dict[str, list[int]]
    """How many tokens have an absolute difference between two of `HISTOGRAM_EDGES`, for each pair."""
    parts: dict[str, dict[str, dict[str, float]]]
    """Mean absolute differences of each pair, and `num_tokens`, of some tokens: by position, logprob or class."""
    far: list[FarToken]
    seconds: float
    values: dict[str, Any] = Field({}, exclude=True)
    """The arrays of the file next to it; empty in a run that was loaded."""

    @property
    def title(self) -> str:
        return f"Rollouts on {self.model}"

    def record(self, urls: Sequence[str]) -> dict[str, object]:
        return {**self.model_dump(mode="json"), **record_beginning("parity", urls, self.model, self.server)}

    def arrays(self) -> Arrays:
        return self.values


def pair_of(source: Source, lane: Lane) -> tuple[str, str]:
    """The names of q and p for a column and a lane. The sampler is p, because it drew the tokens."""
    return (lane, source) if source == "sampler" else (source, lane)


async def measure_parity(
    clients: AsyncScoreClient | Sequence[AsyncScoreClient],
    path: Path,
    columns: RolloutColumns,
    *,
    num_samples: int | None = None,
    mask_threshold: float = 1.2,
    concurrency: int | None = None,
    start_journal: StartJournal[ScoredRollout] | None = None,
    on_progress: OnProgress | None = None,
) -> ParityRun:
    """Compare the logprobs of rollouts with those of one server, or of several of the same model.

    Args:
        clients: A client, or one per server.
        path: A jsonl or parquet file with a row per rollout.
        columns: The names of its columns.
        num_samples: Read only this many rows.
        mask_threshold: Ratio beyond which a trainer drops a sequence.
        concurrency: As for `measure_kld`.
        start_journal: Called with the plan; returns the journal, as for `measure_kld`.
        on_progress: Called for each row in each lane.

    Raises:
        ScoremodeError: a row is not a rollout of the served model, before any is scored; or as for `measure_kld`.
    """
    pool = await Pool.connect(clients, concurrency)
    client = pool.clients[0]
    rollouts = [*read_rollouts(path, columns, pool.info, num_samples)]
    fewer = Semaphore(max(1, min(pool.concurrency, len(rollouts)) // 2))
    plan = ParityPlan(rollouts, pool.info, client.model or pool.info.model, fewer)
    run = await measure(plan, pool, start_journal, on_progress)
    targets, sources = plan.targets(run.in_order()), [*rollouts[0].logprobs]
    findings = [judge(source, targets, {}) for source in sources]
    if not all(finding.is_within for finding in findings):
        hypotheses = await _hypotheses(plan, pool, targets)
        findings = [judge(source, targets, hypotheses[source]) for source in sources]
    pairs = [
        *(pair_of(source, lane) for source in sources for lane in _LANES),
        *([("trainer", "sampler")] if len(sources) > 1 else []),
        _LANES,
        *((lane + AGAIN, lane) for lane in _LANES),
    ]
    log_ratios = {f"{q} / {p}": targets.log_ratios(q, p) for q, p in pairs}
    off = {pair: np.abs(values) for pair, values in log_ratios.items()}
    return ParityRun(
        model=model_name(plan.model),
        server=plan.server,
        rollouts=path.name,
        num_rows=len(rollouts),
        mask_threshold=mask_threshold,
        findings=findings,
        figures=finite_or_none(
            {pair: figures(values, targets.rows, mask_threshold) for pair, values in log_ratios.items()}
        ),
        histograms={
            pair: np.histogram(np.clip(values, *HISTOGRAM_EDGES[[0, -1]]), HISTOGRAM_EDGES)[0].tolist()
            for pair, values in off.items()
        },
        parts=_parts(targets, plan.server, off),
        far=await _far_tokens(plan, client, targets, findings),
        seconds=run.seconds(),
        values={
            **{name: getattr(targets, name) for name in ("rows", "positions", "token_ids")},
            **{name.replace(" ", "_"): values for name, values in targets.logprobs.items()},
        },
    )


async def _served(client: AsyncScoreClient, lane: Lane, rollout: Rollout) -> NDArray[np.float32]:
    """The logprobs that a server computes for a rollout's targets."""
    first = int(rollout.targets[0])
    # A stored logprob would be of another batch, and its repeat the same.
    [score] = await client.score(
        [rollout.token_ids.tolist()], temperature=rollout.temperature, logprobs_from=first, lane=lane, use_cache=False
    )
    return score.logprob_array[rollout.targets - first]


async def _hypotheses(plan: ParityPlan, pool: Pool, targets: Targets) -> dict[Source, dict[str, Floats]]:
    """For each column, absolute differences from what the server computes under other hypotheses. The first rows are
    scored for them."""
    jobs = [
        (row, phrase, other)
        for row, rollout in enumerate(plan.rollouts[:_HYPOTHESIS_ROWS])
        for phrase, other in _others(rollout, plan.server)
    ]
    hypotheses = {source: shifted(targets, source) for source in plan.rollouts[0].logprobs}

    async def send(client: AsyncScoreClient, job: tuple[int, str, Rollout]) -> tuple[int, str, NDArray[np.float32]]:
        return *job[:2], await _served(client, "prefill", job[2])

    def store(result: tuple[int, str, NDArray[np.float32]]) -> None:
        row, phrase, logprobs = result
        for source, differences in hypotheses.items():
            off = np.abs(plan.rollouts[row].logprobs[source] - logprobs)
            differences[phrase] = np.append(differences.get(phrase, []), off)

    await pool.score(jobs, send, store)
    return hypotheses


def _others(rollout: Rollout, server: ServerInfo) -> Iterator[tuple[str, Rollout]]:
    """Yield what else the input of a sampler or trainer may have been, each with its phrase."""
    tokens, targets, prefix = rollout.token_ids, rollout.targets, server.prefix_token_id
    if rollout.temperature != 1:
        yield "at temperature 1: its own was not applied", replace(rollout, temperature=1.0)
    if prefix is not None and len(tokens) < server.max_model_len:
        more = replace(rollout, token_ids=np.append(np.int32(prefix), tokens), targets=targets + 1)
        yield "with a BOS before the tokens: its input has one too many", more
    if targets[0] > 1:
        yield "without the first token: its input lacks it", replace(rollout, token_ids=tokens[1:], targets=targets - 1)


def _parts(targets: Targets, server: ServerInfo, off: dict[str, Floats]) -> dict[str, dict[str, dict[str, float]]]:
    ranges = range_of(targets.positions)
    stops = [token for token in (*(server.stop_token_ids or ()), server.eos_token_id) if token is not None]
    names = [*(f"below {edge:g}" for edge in _LOGPROB_EDGES), "above"]
    divisions: dict[str, tuple[NDArray[Any], dict[int, str]]] = {
        "position": (ranges, {number: range_in_words(number) for number in np.unique(ranges).tolist()}),
        "logprob": (np.digitize(targets.logprobs["decode"], _LOGPROB_EDGES), dict(enumerate(names))),
        "class": (np.where(np.isin(targets.token_ids, stops), 2, ~targets.follows), _CLASSES),
    }
    return {
        by: {
            name: {
                "num_tokens": int(members.sum()),
                **{pair: float(values[members].mean()) for pair, values in off.items()},
            }
            for index, name in names.items()
            if (members := indices == index).any()
        }
        for by, (indices, names) in divisions.items()
    }


async def _far_tokens(
    plan: ParityPlan, client: AsyncScoreClient, targets: Targets, findings: Sequence[Finding]
) -> list[FarToken]:
    """The tokens that are farthest from the lane that their column is nearer to, beyond the floor."""
    far = []
    for finding in findings:
        column, served = targets.logprobs[finding.source], targets.logprobs[finding.lane]
        off = np.abs(column - served)
        far += [
            FarToken(
                source=finding.source,
                row=int(targets.rows[at]) + 1,
                position=int(targets.positions[at]),
                logprob=column[at],
                served=served[at],
            )
            for at in np.argsort(-off, kind="stable")[:_NUM_FAR].tolist()
            if off[at] > targets.floor(finding.lane)
        ]
    far = sorted(far, key=lambda token: -abs(token.logprob - token.served))[:_NUM_FAR]
    try:
        for token in far:
            *before, last = plan.rollouts[token.row - 1].token_ids[: token.position + 1].tolist()
            token.before = await client.detokenize(before[-_NUM_BEFORE:])
            token.token = (await client.token_texts({last}))[last]
    except ScoremodeError as error:
        _log.warning("the farthest tokens are shown without their text: %s", error)
    return far
