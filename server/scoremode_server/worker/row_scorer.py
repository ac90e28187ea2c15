"""Scores the rows of a step: collects them from all requests, groups them, and computes one group at a time.

Logits are held only in `WaitingRows` and for one chunk of rows at a time, which fits the working memory. All ranks of a
tensor-parallel group form the same groups and chunks in the same order, because these depend on the step's requests
alone.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from scoremode_server.kernels import fused_logprobs, working_memory
from scoremode_server.kernels.reduced_rows import JoinedRows, true_on_every_rank
from scoremode_server.worker.lm_head import LMHead, examine
from scoremode_server.worker.request_rows import RequestRows, RowPiece, StepPart, pack
from scoremode_server.worker.row_spec import RowSpec
from scoremode_server.worker.sinks import SinkMaker
from scoremode_server.worker.waiting_rows import WaitingRows


@dataclass(slots=True)
class RowScorer:
    """Scores the rows of all requests of a model runner, step by step, within `budget_bytes` of working memory."""

    budget_bytes: int
    shape: working_memory.LogitsShape
    group: Any
    """vLLM's group of the tensor-parallel ranks."""
    makers: Mapping[str, SinkMaker] = field(default_factory=dict)
    """The makers of sinks, by name."""
    requests: dict[str, RequestRows] = field(default_factory=dict)
    """Requests that have begun and are not complete, by id."""
    waiting: WaitingRows = field(default_factory=WaitingRows)
    _logits_fn: fused_logprobs.LogitsFunction | None = None
    _lm_head: LMHead = field(init=False)

    def begin(self, request_id: str, spec: RowSpec) -> None:
        """Begin a request, or begin it again after a preemption."""
        writes = self.group.rank_in_group == 0
        sinks = {name: self.makers[name].begin(spec, data, writes=writes) for name, data in spec.sinks.items()}
        request = RequestRows(spec, sinks)
        if spec.num_candidates:
            table = torch.frombuffer(bytearray(spec.candidates), dtype=torch.int32).view(-1, spec.num_candidates)
            request.candidates = async_tensor_h2d(table, device=self.group.device)
        self.requests[request_id] = request

    def around_forward(self, model: torch.nn.Module, parts: Sequence[StepPart]) -> AbstractContextManager[Any]:
        """Enter the `around_forward` of each sink maker for a step, with the parts of requests that have its sinks."""
        stack = ExitStack()
        for name, maker in self.makers.items():
            sinks = ((self.requests[part.request_id].sinks.get(name), part) for part in parts)
            own = [(sink, part) for sink, part in sinks if sink is not None]
            stack.enter_context(maker.around_forward(model, own))
        return stack

    def score(
        self,
        parts: Iterable[StepPart],
        hidden_states: torch.Tensor,
        targets: torch.Tensor,
        logits_fn: fused_logprobs.LogitsFunction,
        logits: torch.Tensor | None = None,
    ) -> dict[str, LogprobsTensors]:
        """Score a step's rows of requests that have begun. Every rank must call this at the same time.

        Args:
            hidden_states: [at least the step's tokens, hidden], after the final norm.
            targets: [tokens] int64, the token after each. A last target that is not fed (`spec.last_token`) is filled
                in here.
            logits: [tokens, vocabulary], if the step has already projected all tokens.

        Returns:
            The rows of each request whose prompt is complete, by id. Positions from the prefix cache have no rows.
        """
        head = self._head(logits_fn, hidden_states)
        if self.waiting and not any(request.can_wait for request in self.requests.values()):
            # All requests with waiting rows were aborted: this drops their logits.
            self._compute_waiting(head)
        pieces, ended = self._pieces(parts, targets)
        for group in self._groups(pieces, head):
            if not (group[0].request.can_wait and self._let_wait(group, hidden_states, targets, head, logits)):
                self._compute(group, hidden_states, targets, head)
        if any(self.requests[request_id].can_wait for request_id in ended):
            self._compute_waiting(head)
        results = {}
        for request_id in ended:
            request = self.requests.pop(request_id)
            for sink in request.sinks.values():
                sink.finish()
            if request.parts:
                results[request_id] = LogprobsTensors.cat(request.parts)
        return results

    def _pieces(self, parts: Iterable[StepPart], targets: torch.Tensor) -> tuple[list[RowPiece], list[str]]:
        """Find the wanted rows of each part, and the ids of requests whose prompt ends in this step. If their last
        target is not fed, writes it into `targets`."""
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
                pieces.append(RowPiece(request, start - spec.first + 1, offset + start, end - start, num_wanted))
        if last_rows:
            last = async_tensor_h2d([last_rows, last_tokens], device=targets.device, dtype=torch.int64)
            targets.scatter_(0, last[0], last[1])
        return pieces, ended

    def reserve(self, runner: Any, hidden_states: torch.Tensor) -> None:
        """Compute the largest chunks, so that vLLM counts their memory while it profiles."""
        head = self._head(runner.model.compute_logits, hidden_states)
        # Without top tokens a chunk has more rows; with them, more bytes per row. Either may need more memory.
        for num_top in (0, working_memory.RESERVED_TOP):
            rows = min(self.chunk_rows(head, num_top, 0), runner.max_num_tokens)
            targets, states = zeros(rows, hidden_states)
            fused_logprobs.compute(targets, states, head.project, num_top, rows, head.shard)
        for maker in self.makers.values():
            maker.reserve(self, runner, hidden_states, head)

    def _head(self, logits_fn: fused_logprobs.LogitsFunction, hidden_states: torch.Tensor) -> LMHead:
        """The LM head, which is examined again if the model has changed."""
        if self._logits_fn != logits_fn:
            self._lm_head = examine(logits_fn, hidden_states.shape[-1], hidden_states.dtype, self.group)
            self._logits_fn = logits_fn
        return self._lm_head

    def _groups(self, pieces: Sequence[RowPiece], head: LMHead) -> Iterable[list[RowPiece]]:
        """Group the pieces of requests with equal keys: a group is computed together. If a request's sinks are not
        ready on every rank, its rows are NaN."""
        groups: dict[Hashable, list[RowPiece]] = {}
        ready = self._ready([piece.request for piece in pieces], head)
        for piece in pieces:
            request = piece.request
            if request in ready:
                groups.setdefault((request.key, request.can_wait), []).append(piece)
            else:
                # Earlier rows of the request may still be waiting: compute them first, to keep its rows in order.
                self._compute_waiting(head)
                request.store_missing(piece.num_wanted, self.group.device)
        return groups.values()

    def _ready(self, requests: Collection[RequestRows], head: LMHead) -> set[RequestRows]:
        """The requests whose sinks are ready on every rank. Ranks exchange this, so all must call it together."""
        with_sinks = [request for request in requests if request.sinks]
        answers = [request.is_ready(local=head.shard is not None) for request in with_sinks]
        on_all_ranks = true_on_every_rank(self.group, answers) if with_sinks else []
        return set(requests) - {
            request for request, is_ready in zip(with_sinks, on_all_ranks, strict=True) if not is_ready
        }

    def _compute(
        self, pieces: list[RowPiece], hidden_states: torch.Tensor, targets: torch.Tensor, head: LMHead
    ) -> None:
        """Compute a group's rows, and store them with their requests."""
        slices, num_rows = slices_of(pieces)
        states = JoinedRows([hidden_states[rows] for rows in slices])
        columns = self._columns(pieces, states, JoinedRows([targets[rows] for rows in slices])[0:num_rows], head)
        # Packed requests of a group with the same number of top tokens have the same columns, so they share a table.
        specs = {piece.request.spec.num_top: piece.request.spec for piece in pieces if piece.request.spec.is_packed}
        tables = {num_top: pack(columns, spec.columns) for num_top, spec in specs.items()}
        start = 0
        for piece in pieces:
            rows, request = slice(start, start + piece.num_wanted), piece.request
            if request.spec.is_packed:
                request.store_table(tables[request.spec.num_top][rows])
            else:
                request.store_own({name: column[rows] for name, column in columns.items()})
            for sink in request.sinks.values():
                own = {name: column[rows] for name, column in columns.items()}
                sink.store(own, hidden_states[piece.start : piece.start + piece.num_rows])
            start += piece.num_rows

    def _columns(
        self, pieces: list[RowPiece], states: JoinedRows, targets: torch.Tensor, head: LMHead
    ) -> dict[str, torch.Tensor]:
        """Compute the columns of a group's rows. The first request's sinks compute for all requests of the group."""
        request = pieces[0].request
        num_tops = [piece.request.spec.num_top for piece in pieces]
        num_top = self.shape.vocab_size if -1 in num_tops else max(num_tops)
        if num_top > working_memory.MAX_TOP:
            # So many top tokens, up to the whole vocabulary, are found in gathered logits.
            head = replace(head, project=head.whole, shard=None)
        candidates = torch.cat([piece.candidates() for piece in pieces]) if request.spec.num_candidates else None
        limits = [limit for sink in request.sinks.values() if (limit := sink.chunk_rows(self, head)) is not None]
        limit = min((self.chunk_rows(head, num_top, request.spec.num_candidates), *limits))
        sinks = [partial(sink.compute, pieces=pieces) for sink in request.sinks.values()]
        return fused_logprobs.compute(
            targets, states, head.project, num_top, limit, head.shard, candidates, request.spec.temperature, sinks
        )

    def _let_wait(
        self,
        pieces: list[RowPiece],
        hidden_states: torch.Tensor,
        targets: torch.Tensor,
        head: LMHead,
        logits: torch.Tensor | None,
    ) -> bool:
        """Hold a group's logits for `_compute_waiting`; False if they do not fit. Logits are projected in the step of
        their rows, because the number of rows decides which kernel the model uses, and so the exact logits."""
        slices, num_rows = slices_of(pieces)
        num_bytes = num_rows * self.shape.padded * self.shape.logit_bytes
        if self.waiting.num_bytes + num_bytes > self.waiting.max_bytes:
            self._compute_waiting(head)
        if num_bytes > self.waiting.max_bytes:
            return False
        if logits is None or head.shard is not None:
            group_logits = head.project(JoinedRows([hidden_states[rows] for rows in slices])[0:num_rows])
        else:
            # A part is copied, because a view would keep the step's whole logits in memory.
            group_logits = logits if num_rows == len(logits) else torch.cat([logits[rows] for rows in slices])
        self.waiting.add(pieces, [targets[rows] for rows in slices], group_logits, num_bytes)
        return True

    def _compute_waiting(self, head: LMHead) -> None:
        """Compute all waiting rows, except those of requests that were aborted or begun again, or whose sinks are no
        longer ready."""
        projected = replace(head, project=lambda logits: logits)
        requests = [request for request in self.requests.values() if request.can_wait] if self.waiting else []
        for pieces, targets, logits in self.waiting.pop_all(self._ready(requests, head)):
            self._compute(pieces, logits, targets, projected)

    def chunk_rows(self, head: LMHead, num_top: int, num_candidates: int) -> int:
        """How many rows' logits fit the working memory at once."""
        row_bytes = working_memory.row_bytes_fused(self.shape, num_top, head.copies, head.shard is not None)
        return self.rows_within(
            row_bytes + working_memory.RESULT_BYTES * num_candidates, in_blocks=num_top > working_memory.MAX_TOP
        )

    def rows_within(self, row_bytes: int, num_budgets: int = 1, *, in_blocks: bool = False) -> int:
        """How many rows of `row_bytes` fit `num_budgets` times the budget. The kernels in PyTorch, which run on a CPU
        and if `in_blocks`, also need memory for one block."""
        block_bytes = working_memory.block_bytes(self.shape) if in_blocks or self.group.device.type == "cpu" else 0
        return working_memory.rows_per_chunk(max(1, num_budgets * self.budget_bytes - block_bytes), row_bytes)


def slices_of(pieces: Sequence[RowPiece]) -> tuple[list[slice], int]:
    """Merge the pieces' rows into as few slices of the step's rows as possible. Also returns their number of rows."""
    slices: list[slice] = []
    for piece in pieces:
        start, stop = piece.start, piece.start + piece.num_rows
        if slices and slices[-1].stop == start:
            start = slices.pop().start
        slices.append(slice(start, stop))
    return slices, sum(piece.num_rows for piece in pieces)


def zeros(rows: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make targets [rows] and hidden states [rows, hidden] of zeros, because those of a dummy run may be NaN."""
    return like.new_zeros(rows, dtype=torch.int64), like.new_zeros((rows, like.shape[-1]))
