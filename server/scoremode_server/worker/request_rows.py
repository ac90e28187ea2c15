"""The rows of a request in an engine worker, and the parts of a prompt that a step computes."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from vllm.v1.outputs import LogprobsTensors

from scoremode_server.kernels import working_memory
from scoremode_server.rows import Columns, num_words
from scoremode_server.worker.row_spec import RowSpec
from scoremode_server.worker.sinks import Sink


@dataclass(slots=True)
class StepPart:
    """The part of a prompt that a step computes: `num_tokens` tokens from `position` on. Their hidden states start at
    row `row` of the step's hidden states. The prompt has `num_fed` tokens; later tokens are placeholders for drafts and
    are ignored."""

    request_id: str
    position: int
    row: int
    num_tokens: int
    num_fed: int


@dataclass(eq=False)
class RequestRows:
    """The rows of one request, collected step by step until its prompt is complete."""

    spec: RowSpec
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    """Sinks by name, in the order of `spec.sink_columns`."""
    candidates: torch.Tensor | None = None
    """[1 or rows, m] int32: `spec.candidates` on the device; None if there are none."""
    end: int = 0
    """Position after the last computed token."""
    parts: list[LogprobsTensors] = field(default_factory=list)
    """The rows to return, in order: packed tables, or tensors of vLLM's own prompt logprobs."""

    @cached_property
    def key(self) -> Hashable:
        """Requests with equal keys are computed together."""
        scores = self.spec.temperature, self.spec.num_candidates, self._has_few_top
        return scores, tuple((name, sink.key) for name, sink in self.sinks.items())

    @cached_property
    def can_wait(self) -> bool:
        """Whether this request's rows may wait, to be computed with rows of later steps. Outside the prefill lane, a
        step has few rows per request."""
        return self.spec.chunk > 0 and self._has_few_top

    @property
    def _has_few_top(self) -> bool:
        return 0 <= self.spec.num_top <= working_memory.MAX_TOP

    def is_ready(self, *, local: bool) -> bool:
        """Whether all sinks are ready on this rank. Set `local` if the LM head can compute this rank's part of the
        vocabulary alone."""
        return all(sink.is_ready(self.end, local=local and self._has_few_top) for sink in self.sinks.values())

    def store_table(self, table: torch.Tensor) -> None:
        """Store the request's next rows, in the form of `Rows.table`. API servers receive it as the first of the three
        tensors of vLLM's prompt logprobs."""
        nothing = torch.empty(0)
        self.parts.append(LogprobsTensors(table, nothing, nothing))

    def store_own(self, columns: Mapping[str, torch.Tensor]) -> None:
        """Store the request's next rows as vLLM's own prompt logprobs."""
        tokens, logprobs = columns["token_ids"], columns["logprobs"]
        if self.spec.num_top >= 0:
            tokens, logprobs = tokens[:, : self.spec.width], logprobs[:, : self.spec.width]
        self.parts.append(LogprobsTensors(tokens, logprobs, columns["ranks"]))

    def store_missing(self, num_rows: int, device: torch.device) -> None:
        """Store rows in which every number is NaN."""
        words = torch.full((num_rows, num_words(self.spec.columns)), torch.nan, device=device)
        self.store_table(words.view(torch.int32))


def pack(columns: Mapping[str, torch.Tensor], wanted: Columns) -> torch.Tensor:
    """Pack columns into a table [rows, words] int32, each column cut to its wanted width: see `Rows.table`. The table
    is on the host if any column is."""
    parts = [columns[column.name].reshape(len(columns["ranks"]), -1)[:, : column.num_words] for column in wanted]
    if any(part.device.type == "cpu" for part in parts):
        parts = [part.cpu() for part in parts]
    return torch.cat([part.view(torch.int32) for part in parts], 1)


@dataclass(slots=True, eq=False)
class RowPiece:
    """Consecutive rows of a request in one step: `num_rows` rows from the request's row `first` on. Their hidden states
    start at row `start` of the step's hidden states. The first `num_wanted` rows have a target: all, or all but the
    last."""

    request: RequestRows
    first: int
    start: int
    num_rows: int
    num_wanted: int

    def candidates(self) -> torch.Tensor:
        """The candidates [rows, m] of these rows."""
        table = self.request.candidates
        assert table is not None
        is_own = self.request.spec.has_own_candidates
        return table[self.first : self.first + self.num_rows] if is_own else table.expand(self.num_rows, -1)
