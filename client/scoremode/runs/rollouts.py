"""Reads rollouts of a training job: each sequence's tokens, and the logprobs that its sampler and its trainer wrote."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scoremode.errors import CorpusError
from scoremode.kld import Floats
from scoremode.runs.corpora import read_file
from scoremode.wire import ROUNDING, ServerInfo

_log = logging.getLogger(__name__)

Source = Literal["sampler", "trainer"]
SOURCES: tuple[Source, ...] = ("sampler", "trainer")
_NEUTRAL = {"top_k": (-1, 0), "top_p": (1,), "min_p": (0,)}
"""Sampling parameters, and the values with which they change no distribution."""
TEMPERATURES = (0.01, 1000)
"""The lowest and the highest temperature at which a server scores."""
MAX_TOKENS = 20_000_000
"""Limit on the tokens of all rows that are read, because all of their values are held in memory: some 3 GB."""


@dataclass(frozen=True, slots=True)
class RolloutColumns:
    """The names of the columns of a file of rollouts. Those that a file does not have are not used."""

    token_ids: tuple[str, ...] = ("token_ids",)
    """One column with the whole sequence, or two: the prompt and the completion."""
    prompt_length: str = "prompt_length"
    mask: str = "mask"
    """Column that has 1 for each token to compare."""
    padding: tuple[str, ...] = ("attention_mask",)
    """Columns that have 0 for padding, one per column of `token_ids`."""
    sampler: str = "sampler_logprobs"
    trainer: str = "trainer_logprobs"
    temperature: float = 1.0
    """The temperature of rows without one in a column `temperature`."""
    required: tuple[str, ...] = ()
    """Columns that the file must have, in addition to those of `token_ids`."""


COLUMNS = {
    "nemo-rl": RolloutColumns(mask="token_loss_mask", sampler="generation_logprobs", trainer="prev_logprobs"),
    "verl": RolloutColumns(("input_ids",), mask="response_mask", sampler="rollout_log_probs", trainer="old_log_probs"),
    "trl": RolloutColumns(
        ("prompt_ids", "completion_ids"),
        mask="tool_mask",
        padding=("prompt_mask", "completion_mask"),
        sampler="sampling_per_token_logps",
        trainer="old_per_token_logps",
    ),
    "skyrl": RolloutColumns(
        ("prompt_token_ids", "response_ids"),
        mask="loss_masks",
        padding=(),
        sampler="rollout_logprobs",
        trainer="action_log_probs",
    ),
}
"""The names in the dumps and batches of RL libraries."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    token_ids: NDArray[np.int32]
    """[tokens], up to the last target, without padding."""
    targets: NDArray[np.intp]
    """[n], places of the compared tokens in `token_ids`, ascending."""
    logprobs: dict[Source, Floats]
    """The logprobs [n] of the targets, by who wrote them."""
    temperature: float


def read_rollouts(
    path: Path, columns: RolloutColumns, server: ServerInfo, num_rows: int | None = None
) -> Iterator[Rollout]:
    """Yield the first `num_rows` rows of a jsonl or parquet file, as far as they have `MAX_TOKENS` tokens.

    Raises:
        CorpusError: the file cannot be read, or has no row; or a row is not a rollout of the server's model. The
            message names file, row and column.
    """
    logprobs = [columns.sampler, columns.trainer]
    optional = [columns.prompt_length, columns.mask, *columns.padding, *logprobs, "temperature", *_NEUTRAL]
    sources: list[Source] = []
    num_tokens = 0
    for where, row in islice(read_file(path, [*columns.token_ids, *columns.required], optional), num_rows):
        # All rows must have the columns of the first one.
        sources = sources or [source for source in SOURCES if row.get(getattr(columns, source)) is not None]
        if not sources:
            raise CorpusError(f"{where} has no logprobs: neither column {logprobs[0]!r} nor {logprobs[1]!r} has any")
        rollout = _rollout(where, row, columns, sources, server)
        num_tokens += len(rollout.token_ids)
        if num_tokens > MAX_TOKENS:
            _log.warning(
                "%s and the rows after it are left out: the rows have over %s tokens", where, f"{MAX_TOKENS:,}"
            )
            return
        yield rollout
    if not sources:
        raise CorpusError(f"{path} has no rows")


def _rollout(
    where: str, row: Mapping[str, Any], columns: RolloutColumns, sources: Sequence[Source], server: ServerInfo
) -> Rollout:
    for name, neutral in _NEUTRAL.items():
        problem = (
            f"is {row.get(name)}, and logprobs over a part of the vocabulary cannot be compared: sample without it"
        )
        _check(row.get(name) in (None, *neutral), where, name, problem)
    parts = [_numbers(where, row, name) for name in columns.token_ids]
    ids = np.concatenate(parts)
    num_ids = len(ids)
    mask = np.ones(num_ids) if row.get(columns.mask) is None else _numbers(where, row, columns.mask)
    # A mask that is shorter than the sequence ends with it.
    start = num_ids - len(parts[-1]) if len(parts) > 1 else max(0, num_ids - len(mask))
    if row.get(columns.prompt_length) is not None:
        start = int(_number(where, row, columns.prompt_length, 0, num_ids))
    _check_length(where, columns.mask, mask, [num_ids - start, num_ids])
    padding = [_numbers(where, row, name) for name in columns.padding if row.get(name) is not None]
    is_kept = np.concatenate(padding or [np.ones(num_ids)]) != 0
    _check_length(where, " and ".join(columns.padding), is_kept, [num_ids])
    is_target = is_kept & (np.arange(num_ids) >= start)
    is_target[num_ids - len(mask) :] &= mask != 0
    targets = np.flatnonzero(is_target)
    name = columns.token_ids[0]
    problem = "has an empty completion, or its mask has no 1"
    _check(len(targets), where, columns.token_ids[-1], problem)
    problem = f"begins with a token to compare: give a prompt, and {columns.prompt_length!r} or {columns.mask!r}"
    _check(is_kept[: targets[0]].any(), where, name, problem)
    start = start or int(targets[0])
    values = {source: _logprobs(where, row, getattr(columns, source), targets, start, num_ids) for source in sources}
    ids, targets = ids[is_kept], np.cumsum(is_kept)[targets] - 1
    ids = ids[: targets[-1] + 1]
    problem = f"has {len(ids):,} tokens, and the server takes {server.max_model_len:,}"
    _check(len(ids) <= server.max_model_len, where, name, problem)
    is_right = (ids >= 0) & (ids < server.vocab_size) & (ids % 1 == 0)
    problem = f"has {ids[is_right.argmin()]:g}, and the server's token ids end at {server.vocab_size - 1}"
    _check(is_right.all(), where, name, f"{problem}: the rows are of another tokenizer")
    temperature = columns.temperature
    if row.get("temperature") is not None:
        # As in vLLM, 0 chooses the top token, whose logprob is that at 1.
        temperature = 1.0 if row["temperature"] == 0 else _number(where, row, "temperature", *TEMPERATURES)
    return Rollout(ids.astype(np.int32), targets, values, temperature)


def _logprobs(
    where: str, row: Mapping[str, Any], name: str, targets: NDArray[np.intp], start: int, num_ids: int
) -> Floats:
    """The logprobs of the targets, from a column with an entry per token, per token from `start` on, or per target."""
    values = _numbers(where, row, name)
    _check_length(where, name, values, [num_ids - start, num_ids, len(targets)])
    if len(values) > len(targets):
        values = values[targets - (num_ids - len(values))]
    is_right = (values <= ROUNDING) & np.isfinite(values)
    at = is_right.argmin()
    problem = f"has {values[at]:g} for compared token {at + 1}, and a logprob is finite and at most 0"
    _check(is_right.all(), where, name, problem)
    return values


def _numbers(where: str, row: Mapping[str, Any], name: str) -> Floats:
    cell = row.get(name)
    _check(cell is not None, where, name, "is null or missing")
    if isinstance(cell, list) and len(cell) == 1 and isinstance(cell[0], list):
        # NeMo-RL writes batches of one row.
        cell = cell[0]
    try:
        numbers = np.atleast_1d(np.array(cell, np.float64))
    except (TypeError, ValueError, OverflowError):
        numbers = np.empty((0, 0))
    _check(numbers.ndim == 1, where, name, "is not a list of numbers")
    return numbers


def _number(where: str, row: Mapping[str, Any], name: str, least: float, largest: float) -> float:
    """The only number in a cell."""
    numbers = _numbers(where, row, name)
    _check_length(where, name, numbers, [1])
    _check(least <= numbers[0] <= largest, where, name, f"is {numbers[0]:g}, not from {least:g} to {largest:g}")
    return float(numbers[0])


def _check_length(where: str, name: str, values: NDArray[Any], allowed: Sequence[int]) -> None:
    lengths = " or ".join(f"{length:,}" for length in dict.fromkeys(allowed))
    _check(len(values) in allowed, where, name, f"has {len(values):,} entries instead of {lengths}")


def _check(is_right: object, where: str, name: str, problem: str) -> None:
    if not is_right:
        raise CorpusError(f"{where}: column {name!r} {problem}")
