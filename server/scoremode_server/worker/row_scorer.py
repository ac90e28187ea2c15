"""The rows that a step scores: collected from all of its requests, grouped, and computed a group at a time.

Vocabulary-sized tensors exist for one chunk of rows only, as many as the working memory holds. All ranks of a
tensor-parallel group form the same groups and chunks in the same order: these follow from the requests of the step and
from nothing that one rank alone knows.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from scoremode_server.kernels import fused_logprobs, working_memory
from scoremode_server.kernels.fused_logprobs import LogitsFunction
from scoremode_server.kernels.reduced_rows import JoinedRows, agreed
from scoremode_server.kernels.working_memory import MAX_TOP, RESERVED_TOP, LogitsShape
from scoremode_server.references.worker import kl_divergence, llama_cpp
from scoremode_server.references.worker.heads import ReferenceHead
from scoremode_server.references.worker.sinks import ComparedWindow, RecordedWindow, WorkerWindows
from scoremode_server.worker.lm_head import LMHead, examine
from scoremode_server.worker.row_spec import RowSpec

COMPARISON_BUDGETS = 4
"""On a GPU a comparison may use so many times the budget: 2,048 rows take 6 % less time than 512 (1B, H200)."""

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens and logprobs [rows, columns], ranks [rows]."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """What a step computed of a prompt of `num_fed` tokens: `num_tokens` tokens from `position` on, whose hidden states
    are at `row` and after in the step's. Those after the prompt are placeholders for drafts, which are ignored."""

    request_id: str
    position: int
    row: int
    num_tokens: int
    num_fed: int


@dataclass(slots=True, eq=False)
class RequestRows:
    """The rows of one request, as steps compute them."""

    spec: RowSpec
    candidates: torch.Tensor | None
    """[1 or rows, m] int32."""
    window: RecordedWindow | ComparedWindow | None
    end: int = 0
    """The position after the last computed one."""
    parts: list[LogprobsTensors] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A request's rows from row `first` on, which are `rows` of the step's hidden states. `num_wanted` of them have a
    target: all, or all but the last."""

    request: RequestRows
    first: int
    rows: slice
    num_wanted: int

    @property
    def compared(self) -> ComparedWindow | None:
        """The window that the rows belong to, if they are compared."""
        return self.request.window if isinstance(self.request.window, ComparedWindow) else None

    def candidates(self, table: torch.Tensor) -> torch.Tensor:
        """[rows, m], of the request's table."""
        num_rows = self.rows.stop - self.rows.start
        own = self.request.spec.has_own_candidates
        return table[self.first : self.first + num_rows] if own else table.expand(num_rows, -1)

    def store(self, columns: Columns, start: int, hidden_states: torch.Tensor) -> None:
        """Store these rows with the request; they begin at `start` in the columns of their group."""
        tokens, logprobs, ranks = (column[start : start + self.num_wanted] for column in columns)
        spec, window = self.request.spec, self.request.window
        if not self.compared and spec.num_top >= 0:
            tokens, logprobs = tokens[:, : spec.num_columns], logprobs[:, : spec.num_columns]
        self.request.parts.append(LogprobsTensors(tokens, logprobs, ranks))
        if isinstance(window, RecordedWindow):
            window.add(hidden_states[self.rows], logprobs[:, 0])


@dataclass(slots=True)
class RowScorer:
    """Scores the rows of all requests of a model runner, step by step, within `budget_bytes` of working memory."""

    budget_bytes: int
    shape: LogitsShape
    group: Any
    """vLLM's, of the tensor-parallel ranks."""
    windows: WorkerWindows | None = None
    requests: dict[str, RequestRows] = field(default_factory=dict)
    """Those that were begun, and are not complete."""
    _logits_fn: LogitsFunction | None = None
    _lm_head: LMHead = field(init=False)

    def begin(self, request_id: str, spec: RowSpec) -> None:
        """Begin a request; again after it was preempted."""
        candidates = window = None
        if spec.num_candidates:
            table = torch.frombuffer(bytearray(spec.candidates), dtype=torch.int32).view(-1, spec.num_candidates)
            candidates = async_tensor_h2d(table, device=self.group.device)
        if spec.window is not None and self.windows is not None:
            window = self.windows.begin(spec.window, writes=self.group.rank_in_group == 0)
        self.requests[request_id] = RequestRows(spec, candidates, window)

    def score(
        self, parts: Iterable[StepPart], hidden_states: torch.Tensor, targets: torch.Tensor, logits_fn: LogitsFunction
    ) -> dict[str, LogprobsTensors]:
        """Score what a step computed of requests that were begun. Every rank must come here at the same time.

        Args:
            hidden_states: [at least the step's tokens, hidden], after the final norm.
            targets: [tokens] int64, the token after each; those that are not fed are filled in here.

        Returns:
            The rows of each request whose prompt is complete, by id; none of positions that no step computed.
        """
        head = self._head(logits_fn, hidden_states)
        pieces, ended, last_rows, last_tokens = [], [], [], []
        for part in parts:
            request = self.requests[part.request_id]
            spec, offset = request.spec, part.row - part.position
            request.end = end = min(part.position + part.num_tokens, part.num_fed)
            num_wanted = end - (start := max(part.position, spec.first - 1))
            if end == part.num_fed:
                ended.append(part.request_id)
                if spec.last_token is None:
                    num_wanted -= 1
                else:
                    last_rows.append(offset + end - 1)
                    last_tokens.append(spec.last_token)
            if num_wanted > 0:
                pieces.append(_Piece(request, start - spec.first + 1, slice(offset + start, offset + end), num_wanted))
        if last_rows:
            last = async_tensor_h2d([last_rows, last_tokens], device=targets.device, dtype=torch.int64)
            targets.scatter_(0, last[0], last[1])
        for group in self._groups(pieces, head):
            self._compute(group, hidden_states, targets, head)
        results = {}
        for request_id in ended:
            request = self.requests.pop(request_id)
            if isinstance(request.window, RecordedWindow):
                request.window.finish()
            if request.parts:
                results[request_id] = LogprobsTensors.cat(request.parts)
        return results

    def reserve(self, runner: Any, hidden_states: torch.Tensor) -> None:
        """Compute the largest chunks, and allocate the memory for a reference's head, while vLLM profiles."""
        head = self._head(runner.model.compute_logits, hidden_states)
        # Without top tokens a chunk has more rows, with them more bytes per row: either may need more memory.
        for num_top in (0, RESERVED_TOP):
            rows = min(self._chunk_rows(head, num_top, 0), runner.max_num_tokens)
            targets, states = _zeros(rows, hidden_states)
            fused_logprobs.compute(targets, states, head.project, num_top, rows, head.shard)
        if self.windows is not None:
            self.windows.allocate_head(runner.vllm_config, hidden_states.device)
            targets, states = _zeros(runner.max_num_tokens, hidden_states)
            reference = ReferenceHead(head.project, self.shape.logit_bytes)
            self._compared(targets, states, states, head, reference, RESERVED_TOP)

    def _head(self, logits_fn: LogitsFunction, hidden_states: torch.Tensor) -> LMHead:
        """The LM head, examined again if the model is another one."""
        if self._logits_fn != logits_fn:
            self._lm_head = examine(logits_fn, hidden_states.shape[-1], hidden_states.dtype, self.group)
            self._logits_fn = logits_fn
        return self._lm_head

    def _groups(self, pieces: Sequence[_Piece], head: LMHead) -> Iterable[list[_Piece]]:
        """Group pieces that one call of a kernel can compute. Those whose reference's head a rank lacks get rows of
        NaN: the ranks agree on them, so all must come here together."""
        groups: dict[Hashable, list[_Piece]] = {}
        local = head.shard is not None
        found = [window.head(local=local) is not None for piece in pieces if (window := piece.compared)]
        on_all_ranks = iter(agreed(self.group, found) if found else ())
        for piece in pieces:
            spec = piece.request.spec
            if (window := piece.compared) is None:
                key: Hashable = spec.temperature, spec.num_candidates, 0 <= spec.num_top <= MAX_TOP
            elif next(on_all_ranks):
                key = window.key, window.is_export, spec.num_top
            else:
                piece.request.parts.append(_not_compared(piece, self.group.device))
                continue
            groups.setdefault(key, []).append(piece)
        return groups.values()

    def _compute(self, group: list[_Piece], hidden_states: torch.Tensor, targets: torch.Tensor, head: LMHead) -> None:
        """Compute a group's rows, and store each request's own with it."""
        slices: list[slice] = []
        for piece in group:
            if slices and slices[-1].stop == piece.rows.start:
                slices[-1] = slice(slices[-1].start, piece.rows.stop)
            else:
                slices.append(piece.rows)
        num_rows = sum(rows.stop - rows.start for rows in slices)
        states = JoinedRows([hidden_states[rows] for rows in slices])
        wanted = JoinedRows([targets[rows] for rows in slices])[0:num_rows]
        if (window := group[0].compared) is None:
            columns = self._scored(group, wanted, states, head)
        else:
            recorded = JoinedRows([_reference_states(piece) for piece in group], self.group.device)
            reference = window.head(local=head.shard is not None)
            assert reference is not None
            if window.is_export:
                columns = self._exported(num_rows, recorded, reference)
            else:
                columns = self._compared(wanted, states, recorded, head, reference, group[0].request.spec.num_top)
        start = 0
        for piece in group:
            piece.store(columns, start, hidden_states)
            start += piece.rows.stop - piece.rows.start

    def _scored(self, group: list[_Piece], targets: torch.Tensor, states: JoinedRows, head: LMHead) -> Columns:
        spec = group[0].request.spec
        num_tops = [piece.request.spec.num_top for piece in group]
        num_top = self.shape.vocab_size if -1 in num_tops else max(num_tops)
        if num_top > MAX_TOP:
            # With so many top tokens, a rank would send the others its whole part of the vocabulary anyway.
            head = replace(head, project=head.whole, shard=None)
        tables = [(piece, table) for piece in group if (table := piece.request.candidates) is not None]
        candidates = torch.cat([piece.candidates(table) for piece, table in tables]) if tables else None
        limit = self._chunk_rows(head, num_top, spec.num_candidates)
        return fused_logprobs.compute(
            targets, states, head.project, num_top, limit, head.shard, candidates, spec.temperature
        )

    def _compared(
        self,
        targets: torch.Tensor,
        states: JoinedRows | torch.Tensor,
        recorded: JoinedRows | torch.Tensor,
        head: LMHead,
        reference: ReferenceHead,
        num_top: int,
    ) -> Columns:
        """Columns of tokens [2 (1 + k) + 1]: the served model's target and top k, the reference's, the reference's rank
        of the target. Of logprobs [2 (1 + k) + 3]: in that order, then KL(reference||served), KL(served||reference),
        acceptance. Ranks: the served model's."""
        is_sharded = head.shard is not None
        row_bytes = working_memory.row_bytes_compared(
            self.shape, reference.logit_bytes, num_top, head.copies, is_sharded
        )
        limit = self._rows_within(row_bytes, 1 if self.group.device.type == "cpu" else COMPARISON_BUDGETS)
        found = kl_divergence.compare(
            targets, head.project, states, reference.logits_fn, recorded, num_top, limit, head.shard
        )
        served, other = found.served, found.reference
        divergences = torch.stack((found.kld, found.reverse_kld, found.acceptance), 1)
        return (
            torch.cat((served.tokens, other.tokens, other.ranks[:, None]), 1),
            torch.cat((served.logprobs(), other.logprobs(), divergences), 1),
            served.ranks,
        )

    def _exported(self, num_rows: int, recorded: JoinedRows, reference: ReferenceHead) -> Columns:
        """Rows of llama.cpp's base file in the place of tokens, on the host; logprobs and ranks of 0. Every rank has
        whole rows."""
        row_bytes = self.shape.vocab_size * (reference.logit_bytes + llama_cpp.LOGIT_BYTES)
        step, chunks = self._rows_within(row_bytes), []
        for start in range(0, num_rows, step):
            logits = reference.logits_fn(recorded[start : min(start + step, num_rows)])
            # At once, because many rows do not fit the GPU.
            chunks.append(llama_cpp.quantized(logits).cpu())
            del logits
        rows = torch.cat(chunks)
        return rows, torch.zeros(num_rows, 1), torch.zeros(num_rows, dtype=torch.int32)

    def _chunk_rows(self, head: LMHead, num_top: int, num_candidates: int) -> int:
        row_bytes = working_memory.row_bytes_fused(self.shape, num_top, head.copies, head.shard is not None)
        return self._rows_within(row_bytes + working_memory.RESULT_BYTES * num_candidates, in_blocks=num_top > MAX_TOP)

    def _rows_within(self, row_bytes: int, num_budgets: int = 1, *, in_blocks: bool = False) -> int:
        of_blocks = working_memory.block_bytes(self.shape) if in_blocks or self.group.device.type == "cpu" else 0
        return working_memory.rows_per_chunk(max(1, num_budgets * self.budget_bytes - of_blocks), row_bytes)


def _zeros(rows: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets and hidden states: a dummy run may leave NaN in its own."""
    return like.new_zeros(rows, dtype=torch.int64), like.new_zeros((rows, like.shape[-1]))


def _reference_states(piece: _Piece) -> torch.Tensor:
    window = piece.compared
    assert window is not None
    assert window.hidden_states is not None
    return window.hidden_states[piece.first : piece.first + piece.num_wanted]


def _not_compared(piece: _Piece, device: torch.device) -> LogprobsTensors:
    num_rows, num_columns = piece.num_wanted, 2 * (1 + max(1, piece.request.spec.num_top))
    return LogprobsTensors(
        torch.full((num_rows, num_columns + 1), -1, dtype=torch.int32, device=device),
        torch.full((num_rows, num_columns + 3), torch.nan, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
    )
