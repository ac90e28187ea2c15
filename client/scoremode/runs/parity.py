"""Compares the logprobs of rollouts with those that servers compute for the same tokens, for `ppl-client parity` and
for Python.

Every row is scored in prefill, then every row in the decode lane. Then evenly spaced rows, the sample, are scored again
in both, with fewer in flight: the floor. Of other rows only sums are held, so a file may be of any size.
"""

import hashlib
import logging
from asyncio import Semaphore
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from scoremode._texts import model_name
from scoremode.client import AsyncScoreClient
from scoremode.errors import ScoremodeError
from scoremode.kld import Floats
from scoremode.metrics import finite_or_none
from scoremode.results import ScoredRollout
from scoremode.runs.plan import server_header
from scoremode.runs.pool import Pool
from scoremode.runs.ratios import (
    AGAIN,
    SUMS,
    Finding,
    Sample,
    figures,
    judge,
    range_in_words,
    range_of,
    shifted,
    sums_of,
)
from scoremode.runs.report import Arrays, record_beginning
from scoremode.runs.rollouts import Rollout, RolloutColumns, Source, read_rollouts
from scoremode.runs.run import OnProgress, StartJournal, measure
from scoremode.wire import Lane, ServerInfo

_log = logging.getLogger(__name__)

_LANES: tuple[Lane, ...] = ("prefill", "decode")
_Units = Mapping[Lane, Sequence[ScoredRollout]]
"""The first run of each row in each lane."""
_SAMPLE_TOKENS = 2_000_000
"""Limit on the targets of the sample."""
_HYPOTHESIS_TOKENS = 100_000
"""Limit on the tokens with which each hypothesis is tested; a single row may have more."""
_FAR_PER_ROW, _NUM_FAR, _NUM_BEFORE = 3, 20, 24
_CLASSES = ("others", "first of a completion", "EOS")
_LOGPROB_EDGES = (-10.0, -3.0, -1.0, -0.1, -0.01)
HISTOGRAM_EDGES = np.geomspace(1e-7, 10, 33)
"""Edges of the bins for absolute differences, in nats; smaller and larger ones count in the first and the last."""


@dataclass(eq=False)
class ParityPlan:
    """The rows to score, as the `Measurement` of their journal. Its windows are the rows in prefill, then in decode,
    and the sample in both."""

    path: Path
    columns: RolloutColumns
    num_samples: int | None
    server: ServerInfo
    model: str
    concurrency: int
    sizes: list[int] = field(default_factory=list)
    """The number of targets in each row."""

    def __post_init__(self) -> None:
        """Read and check all rows. CorpusError names the first one that is at fault."""
        digest = hashlib.sha256()
        for rollout in self.rollouts():
            self.sizes.append(len(rollout.targets))
            self.sources = [*rollout.logprobs]
            for part in (rollout.token_ids, rollout.targets, *rollout.logprobs.values(), rollout.temperature):
                digest.update(np.asarray(part, np.float64).tobytes())
        self.sha256 = digest.hexdigest()
        self.sample = range(0, len(self.sizes), -(-sum(self.sizes) // _SAMPLE_TOKENS))
        self._units = enumerate(self._each_unit())
        self._in_flight: dict[int, tuple[int, Lane, bool, Rollout]] = {}
        self._fewer = Semaphore(max(1, min(self.concurrency, len(self.sample)) // 2))

    def rollouts(self) -> Iterator[Rollout]:
        return read_rollouts(self.path, self.columns, self.server, self.num_samples)

    def _each_unit(self) -> Iterator[tuple[int, Lane, bool, Rollout]]:
        for is_repeat in (False, True):
            for lane in _LANES:
                for row, rollout in enumerate(self.rollouts()):
                    if row in self.sample or not is_repeat:
                        yield row, lane, is_repeat, rollout

    @property
    def num_windows(self) -> int:
        return len(_LANES) * (len(self.sizes) + len(self.sample))

    async def measure(self, client: AsyncScoreClient, index: int) -> ScoredRollout:
        # Windows are first requested in ascending order, so the file is read once from start to end in each lane.
        if index not in self._in_flight:
            self._in_flight[index] = next(unit for number, unit in self._units if number == index)
        row, lane, is_repeat, rollout = self._in_flight[index]
        async with self._fewer if is_repeat else nullcontext():
            served = await _served(client, lane, rollout)
        del self._in_flight[index]
        columns, sums, values, far = rollout.logprobs, [np.empty(0)], [served], [np.empty(0)]
        if not is_repeat:
            off = [column - served for column in columns.values()]
            sums = [*map(sums_of, off)]
            far = [
                np.array([at, rollout.targets[token], column[token], served[token]])
                for at, column in enumerate(columns.values())
                for token in np.argsort(-np.abs(off[at]), kind="stable")[:_FAR_PER_ROW].tolist()
            ]
            if lane == "prefill":
                sums += [sums_of(columns["trainer"] - columns["sampler"])] if len(columns) > 1 else []
                values = [rollout.targets.astype(float), self._classes(rollout), *columns.values(), served]
        return ScoredRollout(
            index=index,
            num_scored=len(served),
            sums=np.concatenate(sums),
            values=np.concatenate(values) if row in self.sample else np.empty(0),
            far=np.concatenate(far),
        )

    def _classes(self, rollout: Rollout) -> Floats:
        """The index of each target's class in `_CLASSES`."""
        ends = (*(self.server.stop_token_ids or ()), self.server.eos_token_id)
        stops = [token for token in ends if token is not None]
        is_stop = np.isin(np.array(rollout.token_ids)[rollout.targets], stops)
        # A target without a target directly before it is the first of a completion, or of a turn.
        return np.where(is_stop, 2.0, np.diff(rollout.targets, prepend=-1) > 1)

    def nats(self, window: ScoredRollout) -> float:
        return float(window.sums[SUMS.index("k3")]) if len(window.sums) else 0.0

    def header(self) -> dict[str, object]:
        return {"kind": "parity", "sha256": self.sha256, "model": self.model, **server_header(self.server)}

    def from_line(self, line: dict[str, object]) -> ScoredRollout:
        return ScoredRollout.model_validate(line)


class Difference(BaseModel):
    """How the logprobs of tokens differ by two computations: a column, a lane, or a lane again."""

    pair: str
    """Names q, then p: `trainer / prefill`."""
    figures: dict[str, float | None]
    """As `ratios.figures` computes them. None is an infinite figure."""
    histogram: list[int]
    """How many targets of the sample have an absolute difference between two of `HISTOGRAM_EDGES`."""


class Part(BaseModel):
    """Some targets of the sample."""

    by: str
    name: str
    num_tokens: int
    mean_absolute: dict[str, float]
    """The mean absolute difference of each pair, in nats."""


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
    """The content of the file that `ppl-client parity` writes."""

    kind: Literal["parity"] = "parity"
    model: str
    server: ServerInfo
    rollouts: str
    """The file's name."""
    num_rows: int
    num_sample_rows: int
    mask_threshold: float
    findings: list[Finding]
    differences: list[Difference]
    parts: list[Part]
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
    plan = ParityPlan(path, columns, num_samples, pool.info, client.model or pool.info.model, pool.concurrency)
    run = await measure(plan, pool, start_journal, on_progress)
    scored, sources, num_rows = run.in_order(), plan.sources, len(plan.sizes)
    units = {lane: scored[at * num_rows : (at + 1) * num_rows] for at, lane in enumerate(_LANES)}
    sums = {lane: np.stack([unit.sums.reshape(-1, len(SUMS)) for unit in units[lane]]) for lane in _LANES}
    sample = _sample(plan, units, scored[len(_LANES) * num_rows :])
    by_source = {source: {lane: sums[lane][:, at] for lane in _LANES} for at, source in enumerate(sources)}
    findings = [judge(source, by_source[source], sample, {}) for source in sources]
    if not all(finding.is_within for finding in findings):
        hypotheses = await _hypotheses(plan, pool, sample)
        findings = [judge(source, by_source[source], sample, hypotheses[source]) for source in sources]
    rows = {f"{source} / {lane}": by_source[source][lane] for source in sources for lane in _LANES}
    if len(sources) > 1:
        rows["trainer / sampler"] = sums["prefill"][:, -1]
    # The server's own differences are those of the sample.
    ends = np.flatnonzero(np.diff(sample.rows)) + 1
    for pair in ("decode / prefill", *(f"{lane}{AGAIN} / {lane}" for lane in _LANES)):
        rows[pair] = np.array([sums_of(part) for part in np.split(sample.log_ratios(pair), ends)])
    off = {pair: np.abs(sample.log_ratios(pair)) for pair in rows}
    differences = [
        Difference(
            pair=pair,
            figures=finite_or_none(figures(pair_rows, off[pair], mask_threshold)),
            histogram=np.histogram(np.clip(off[pair], *HISTOGRAM_EDGES[[0, -1]]), HISTOGRAM_EDGES)[0].tolist(),
        )
        for pair, pair_rows in rows.items()
    ]
    return ParityRun(
        model=model_name(plan.model),
        server=plan.server,
        rollouts=path.name,
        num_rows=num_rows,
        num_sample_rows=len(plan.sample),
        mask_threshold=mask_threshold,
        findings=findings,
        differences=differences,
        parts=[*_parts(sample, off)],
        far=await _far_tokens(plan, client, units, findings),
        seconds=run.seconds(),
        values={
            **{f"{lane}_sums": lane_sums for lane, lane_sums in sums.items()},
            **{name: getattr(sample, name) for name in ("rows", "positions", "classes")},
            **{name.replace(" ", "_"): values for name, values in sample.logprobs.items()},
        },
    )


async def _served(client: AsyncScoreClient, lane: Lane, rollout: Rollout) -> Floats:
    """The logprobs that a server computes for a rollout's targets."""
    first = int(rollout.targets[0])
    # A stored logprob would be of another batch, and its repeat the same.
    [score] = await client.score(
        [rollout.token_ids], temperature=rollout.temperature, logprobs_from=first, lane=lane, use_cache=False
    )
    return score.logprob_array[rollout.targets - first].astype(np.float64)


def _sample(plan: ParityPlan, units: _Units, repeats: Sequence[ScoredRollout]) -> Sample:
    number = len(plan.sample)
    runs = [*([units[lane][row] for row in plan.sample] for lane in _LANES), repeats[:number], repeats[number:]]
    parts = [
        np.concatenate([unit.values.reshape(-1, unit.num_scored) for unit in row]) for row in zip(*runs, strict=True)
    ]
    positions, classes, *logprobs = np.concatenate(parts, axis=1)
    names = [*plan.sources, *_LANES, *(lane + AGAIN for lane in _LANES)]
    rows = np.repeat(np.array(plan.sample), [part.shape[1] for part in parts])
    return Sample(rows, positions.astype(int), classes.astype(int), dict(zip(names, logprobs, strict=True)))


async def _hypotheses(plan: ParityPlan, pool: Pool, sample: Sample) -> dict[Source, dict[str, Floats]]:
    """For each column, absolute differences from what the server computes under other hypotheses. The first rows of the
    sample are scored for them."""
    jobs, num_tokens = list[tuple[int, str, Rollout]](), 0
    for row, rollout in enumerate(plan.rollouts()):
        if row in plan.sample:
            num_tokens += len(rollout.token_ids)
            if jobs and num_tokens > _HYPOTHESIS_TOKENS:
                break
            jobs += [(row, phrase, other) for phrase, other in _others(rollout, plan.server)]
    results: list[tuple[int, str, Floats]] = []

    async def send(client: AsyncScoreClient, job: tuple[int, str, Rollout]) -> tuple[int, str, Floats]:
        return *job[:2], await _served(client, "prefill", job[2])

    await pool.score(jobs, send, results.append)
    found = {source: shifted(sample, source) for source in plan.sources}
    for row, phrase, logprobs in results:
        for source, differences in found.items():
            off = np.abs(sample.logprobs[source][sample.rows == row] - logprobs)
            differences[phrase] = np.append(differences.get(phrase, []), off)
    return found


def _others(rollout: Rollout, server: ServerInfo) -> Iterator[tuple[str, Rollout]]:
    """Yield what else the input of a sampler or trainer may have been, each with its phrase."""
    tokens, targets, prefix = rollout.token_ids, rollout.targets, server.prefix_token_id
    if rollout.temperature != 1:
        yield "at temperature 1: its own was not applied", replace(rollout, temperature=1.0)
    if prefix is not None and len(tokens) < server.max_model_len:
        more = replace(rollout, token_ids=[prefix, *tokens], targets=targets + 1)
        yield "with a BOS before the tokens: its input has one too many", more
    if targets[0] > 1:
        yield "without the first token: its input lacks it", replace(rollout, token_ids=tokens[1:], targets=targets - 1)


def _parts(sample: Sample, off: Mapping[str, Floats]) -> Iterator[Part]:
    ranges, steps = range_of(sample.positions), np.digitize(sample.logprobs["decode"], _LOGPROB_EDGES)
    divisions = {
        "position": (ranges, {number: range_in_words(number) for number in range(ranges.max() + 1)}),
        "logprob": (steps, dict(enumerate([*(f"below {edge:g}" for edge in _LOGPROB_EDGES), "above"]))),
        "class": (sample.classes, dict(enumerate(_CLASSES))),
    }
    for by, (indices, names) in divisions.items():
        for index, name in names.items():
            if (members := indices == index).any():
                means = {pair: float(values[members].mean()) for pair, values in off.items()}
                yield Part(by=by, name=name, num_tokens=int(members.sum()), mean_absolute=means)


async def _far_tokens(
    plan: ParityPlan, client: AsyncScoreClient, units: _Units, findings: Sequence[Finding]
) -> list[FarToken]:
    """The tokens that are farthest from the lane that their column is nearer to, beyond the floor."""
    far = [
        FarToken(source=finding.source, row=row + 1, position=int(position), logprob=logprob, served=served)
        for at, finding in enumerate(findings)
        for row, unit in enumerate(units[finding.lane])
        for place, position, logprob, served in unit.far.reshape(-1, 4).tolist()
        if place == at and abs(logprob - served) > finding.floor
    ]
    far = sorted(far, key=lambda token: -abs(token.logprob - token.served))[:_NUM_FAR]
    numbers = {token.row for token in far}
    ids = {row: rollout.token_ids for row, rollout in enumerate(plan.rollouts(), 1) if row in numbers}
    shown = [ids[token.row][max(0, token.position - _NUM_BEFORE) : token.position + 1] for token in far]
    try:
        texts = await client.token_texts({tokens[-1] for tokens in shown})
        for token, tokens in zip(far, shown, strict=True):
            token.before, token.token = await client.detokenize(tokens[:-1]), texts[tokens[-1]]
    except ScoremodeError as error:
        _log.warning("the farthest tokens are shown without their text: %s", error)
    return far
