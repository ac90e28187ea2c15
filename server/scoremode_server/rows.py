"""Rows: the scores of consecutive tokens, in the form that all parts of the server use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput

from scoremode.wire.protocol import LOWEST_LOGPROB
from scoremode_server.errors import EngineOutputError, UnfinishedError

NO_RANK = 0
"""The rank of a token that has none; ranks count from 1."""

NO_TOKEN = -1
"""The id of a top token where there is none."""

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Token ids and logprobs (nats) [rows, columns], ranks [rows]."""


@dataclass(slots=True, eq=False)
class Rows:
    """Rows of n tokens, each with 1 + m + k columns: the actual token, m candidates, the top k."""

    table: np.ndarray
    """[n, 2 * columns + 1] int32: token ids, the bits of their float32 logprobs, the actual token's rank."""

    @classmethod
    def empty(cls, num_rows: int, num_columns: int) -> "Rows":
        """Rows with unset content."""
        return cls(np.empty((num_rows, 2 * num_columns + 1), np.int32))

    @classmethod
    def from_arrays(cls, token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> "Rows":
        """Rows of token ids and logprobs [n, columns] and ranks [n]."""
        rows = cls.empty(*token_ids.shape)
        rows.write(0, (token_ids, logprobs, ranks))
        return rows

    @classmethod
    def from_bytes(cls, data: bytes, num_columns: int) -> "Rows":
        """The reverse of `table.tobytes()`; read-only."""
        return cls(np.frombuffer(data, np.int32).reshape(-1, 2 * num_columns + 1))

    def write(self, start: int, columns: Columns) -> None:
        """Replace rows from `start` on."""
        token_ids, logprobs, ranks = columns
        part = self[start : start + len(ranks)]
        part.token_ids[:] = token_ids
        part.logprobs[:] = logprobs
        part.table[:, -1] = ranks

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(self.table[rows])

    @property
    def num_columns(self) -> int:
        """1 + m + k."""
        return int(self.table.shape[1]) // 2

    @property
    def token_ids(self) -> np.ndarray:
        """[n, columns] int32: the actual token, the candidates, the top k."""
        return self.table[:, : self.num_columns]

    @property
    def logprobs(self) -> np.ndarray:
        """[n, columns] float32, nats."""
        return self.table[:, self.num_columns : -1].view(np.float32)

    @property
    def ranks(self) -> np.ndarray:
        """[n] int32: how many tokens of the vocabulary are at least as likely as the actual one."""
        return self.table[:, -1]


class PromptLogprobs:
    """`RequestOutput.prompt_logprobs` of scoring requests: token ids, logprobs and ranks in arrays, made of vLLM's
    tensors on the CPU when the prompt is complete."""

    def __init__(self, tensors: Sequence[Any] = ()) -> None:
        self.columns = [tensor.numpy() for tensor in tensors[:3]]


def read_columns(logprobs: Any, num_columns: int) -> Columns:
    """The columns of arrays, or of vLLM's flat logprobs; EngineOutputError if there are none."""
    if isinstance(logprobs, PromptLogprobs) and logprobs.columns:
        token_ids, values, ranks = logprobs.columns
        return token_ids, values, ranks
    if isinstance(logprobs, PromptLogprobs):
        # No row was computed.
        logprobs = FlatLogprobs()
    if not isinstance(logprobs, FlatLogprobs):
        raise EngineOutputError("the engine ended a request without logprobs")
    return (
        np.asarray(logprobs.token_ids, np.int32).reshape(-1, num_columns),
        np.asarray(logprobs.logprobs, np.float32).reshape(-1, num_columns),
        np.asarray(logprobs.ranks[::num_columns], np.int32),
    )


def read_rows(
    token_ids: Sequence[int] | np.ndarray, num_columns: int, columns: Columns, first: int = 0
) -> tuple[Rows, int]:
    """Check the `columns` of the rows from `first` on, which the engine computed for tokens [n]. Valid are those after
    the last one that is NaN or of another token; none if there are more or fewer than expected.

    Returns:
        Rows of the tokens after the first, [n - 1], and how many of the first rows are not valid.
    """
    actual = np.asarray(token_ids, np.int32)[1:]
    rows = Rows.empty(len(actual), num_columns)
    if columns[0].shape != (len(actual) - first, num_columns):
        return rows, len(actual)
    rows.write(first, columns)
    computed = rows[first:]
    trusted = (computed.token_ids[:, 0] == actual[first:]) & ~np.isnan(computed.logprobs.sum(axis=1))
    return rows, first + (0 if trusted.all() else int(np.flatnonzero(~trusted)[-1]) + 1)


def check_finished(output: RequestOutput) -> None:
    """Raise UnfinishedError if the engine ended a request early."""
    reason = output.outputs[0].finish_reason
    if reason in ("abort", "error"):
        raise UnfinishedError(reason)


def missing_row(position: int) -> EngineOutputError:
    """The error for a row that the engine left out."""
    return EngineOutputError(f"the engine computed no logprob, or NaN, for the token at position {position}")


def json_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """float32 logprobs as float64, since the shortest digits of a float32 read back as another float64. Minus infinity
    becomes `LOWEST_LOGPROB`."""
    return np.maximum(logprobs.astype(np.float64), LOWEST_LOGPROB)
