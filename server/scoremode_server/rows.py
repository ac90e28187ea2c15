"""Tables of scores and other figures, with one row per token and named columns. Engine workers and API servers both
import this module."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput

from scoremode.wire.protocol import LOWEST_LOGPROB
from scoremode_server.errors import EngineOutputError, UnfinishedError

NO_RANK = 0
"""The rank of a sequence's first token, which has no context; all other ranks count from 1."""

NO_TOKEN = -1
"""The id that stands for a top token that a row does not have."""


@dataclass(frozen=True, slots=True)
class Column:
    """A named column of a table of rows. Each of its numbers has four bytes."""

    name: str
    dtype: Literal["float32", "int32"] = "float32"
    width: int | None = None
    """Numbers per row; None for one number, so that the column's array has no second axis."""

    @property
    def num_words(self) -> int:
        return 1 if self.width is None else self.width


Columns = tuple[Column, ...]
"""The columns of a table, from left to right."""


@lru_cache
def score_columns(num_tokens: int) -> Columns:
    """The columns that all rows have. `num_tokens` is 1 + m + k: the actual token, m candidates and the top k."""
    return (
        Column("token_ids", "int32", num_tokens),
        Column("logprobs", "float32", num_tokens),
        Column("ranks", "int32"),
    )


def with_more_top(columns: Columns, num_more: int) -> Columns:
    """Widen the columns of scores by `num_more` top tokens."""
    scores, others = columns[: len(score_columns(1))], columns[len(score_columns(1)) :]
    return score_columns(scores[0].num_words + num_more) + others


def num_words(columns: Columns) -> int:
    """Numbers in each row of a table with these columns."""
    return sum(column.num_words for column in columns)


@dataclass(slots=True, eq=False)
class Rows:
    """A table with a row for each of n tokens, and named columns."""

    table: np.ndarray
    """[n, `num_words(columns)`] int32: the columns side by side. A float32 number is stored as its bits."""
    columns: Columns

    @classmethod
    def empty(cls, num_rows: int, columns: Columns) -> "Rows":
        """Allocate rows without setting them."""
        return cls(np.empty((num_rows, num_words(columns)), np.int32), columns)

    @classmethod
    def from_arrays(cls, token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> "Rows":
        """Make rows of scores: token ids and logprobs [n, tokens], ranks [n]."""
        arrays = token_ids.astype(np.int32), logprobs.astype(np.float32).view(np.int32), ranks.astype(np.int32)[:, None]
        return cls(np.concatenate(arrays, 1), score_columns(token_ids.shape[1]))

    @classmethod
    def from_bytes(cls, data: bytes, columns: Columns) -> "Rows":
        """Make rows from `table.tobytes()`. The table is read-only."""
        return cls(np.frombuffer(data, np.int32).reshape(-1, num_words(columns)), columns)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(self.table[rows], self.columns)

    def column(self, name: str) -> np.ndarray:
        """A view of a column, [n] or [n, width]. KeyError if no column has this name."""
        start = 0
        for column in self.columns:
            if column.name == name:
                values: np.ndarray = self.table[:, start : start + column.num_words].view(column.dtype)
                return values[:, 0] if column.width is None else values
            start += column.num_words
        raise KeyError(name)

    @property
    def width(self) -> int:
        """The number of tokens in each row."""
        return self.columns[0].num_words

    @property
    def token_ids(self) -> np.ndarray:
        """[n, tokens] int32: the actual token, the candidates, the top k."""
        return self.column("token_ids")

    @property
    def logprobs(self) -> np.ndarray:
        """[n, tokens] float32, nats."""
        return self.column("logprobs")

    @property
    def ranks(self) -> np.ndarray:
        """[n] int32: how many tokens of the vocabulary are at least as likely as the actual one."""
        return self.column("ranks")

    @property
    def has_nan(self) -> np.ndarray:
        """[n] bool: whether a row has a NaN."""
        floats = (self.column(column.name) for column in self.columns if column.dtype == "float32")
        # A NaN makes its row's sum NaN. Checking sums takes less time than checking each number.
        has_nan = np.zeros(len(self), bool)
        for values in floats:
            has_nan |= np.isnan(values if values.ndim == 1 else values.sum(1))
        return has_nan

    def narrowed(self, columns: Columns) -> "Rows":
        """Copy the columns that are in `columns`, each cut to the width that it has there."""
        parts = [np.atleast_2d(self.column(column.name).T).T[:, : column.num_words] for column in columns]
        return Rows(np.concatenate([part.view(np.int32) for part in parts], 1), columns)


class PromptLogprobs:
    """Replaces `RequestOutput.prompt_logprobs` of scoring requests. Once the prompt is complete, `arrays` has vLLM's
    token ids, logprobs and ranks. If a worker packed the rows, the first array is their table."""

    def __init__(self, tensors: Sequence[Any] = ()) -> None:
        self.arrays = [tensor.numpy() for tensor in tensors[:3]]

    def rows(self, columns: Columns) -> Rows:
        """The rows that a worker packed; none if no row was computed. EngineOutputError if the table has another
        width."""
        if not self.arrays:
            return Rows.empty(0, columns)
        if self.arrays[0].shape[1] != num_words(columns):
            raise EngineOutputError(f"the engine computed rows of {self.arrays[0].shape[1]} numbers")
        return Rows(self.arrays[0], columns)


def received_rows(output: RequestOutput, columns: Columns) -> Rows:
    """The rows of a finished request, as workers packed them. EngineOutputError if the output is not of a scoring
    request."""
    if not isinstance(output.prompt_logprobs, PromptLogprobs):
        raise EngineOutputError("the engine ended a request without logprobs")
    return output.prompt_logprobs.rows(columns)


def own_rows(logprobs: Any, num_tokens: int) -> Rows:
    """Make rows from vLLM's own logprobs, `PromptLogprobs` or `FlatLogprobs`. EngineOutputError if `logprobs` is
    neither."""
    if isinstance(logprobs, PromptLogprobs):
        return Rows.from_arrays(*logprobs.arrays) if logprobs.arrays else Rows.empty(0, score_columns(num_tokens))
    if not isinstance(logprobs, FlatLogprobs):
        raise EngineOutputError("the engine ended a request without logprobs")
    return Rows.from_arrays(
        np.asarray(logprobs.token_ids, np.int32).reshape(-1, num_tokens),
        np.asarray(logprobs.logprobs, np.float32).reshape(-1, num_tokens),
        np.asarray(logprobs.ranks[::num_tokens], np.int32),
    )


def complete_rows(token_ids: Sequence[int] | np.ndarray, computed: Rows, first: int = 0) -> tuple[Rows, int]:
    """Check rows that the engine computed for tokens [n]. Row i is for token i + 1, and `computed` begins with row
    `first`. A row with a NaN or a wrong token id is invalid, as are all rows before it. If `computed` has too many or
    too few rows, all are invalid.

    Returns:
        Rows of all tokens after the first, [n - 1], and how many rows at the start are invalid.
    """
    actual = np.asarray(token_ids, np.int32)[1:]
    rows = Rows.empty(len(actual), computed.columns)
    if len(computed) != len(actual) - first:
        return rows, len(actual)
    rows.table[first:] = computed.table
    trusted = (computed.token_ids[:, 0] == actual[first:]) & ~computed.has_nan
    return rows, first + (0 if trusted.all() else int(np.flatnonzero(~trusted)[-1]) + 1)


def check_finished(output: RequestOutput) -> None:
    """Raise UnfinishedError if the engine ended a request early."""
    reason = output.outputs[0].finish_reason
    if reason in ("abort", "error"):
        raise UnfinishedError(reason)


def missing_row(position: int) -> EngineOutputError:
    """Make the error for a row that the engine left out."""
    return EngineOutputError(f"the engine computed no logprob, or NaN, for the token at position {position}")


def json_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """Convert float32 logprobs to float64, because the shortest digits of a float32 read back as another float64. Minus
    infinity becomes `LOWEST_LOGPROB`."""
    return np.maximum(logprobs.astype(np.float64), LOWEST_LOGPROB)
