"""The rows that a step scores: collected from all of its requests, grouped, and computed a group at a time.

Vocabulary-sized tensors exist for one chunk of rows only, as many as the working memory holds, and for the rows of
lanes' last steps, which wait on a GPU. All ranks of a
tensor-parallel group form the same groups and chunks in the same order: these follow from the requests of the step and
from nothing that one rank alone knows.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from scoremode_server.kernels import fused_logprobs, working_memory
from scoremode_server.kernels.reduced_rows import JoinedRows, true_on_every_rank
from scoremode_server.worker.lm_head import LMHead, examine
from scoremode_server.worker.row_spec import RowSpec

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens and logprobs [rows, columns], ranks [rows]."""


@dataclass(slots=True)
class StepPart:
    """The part of a prompt of `num_fed` tokens that a step computed: `num_tokens` tokens from `position` on, whose
    hidden states are at `row` and after in the step's. Those after the prompt are placeholders for drafts, which are
    ignored."""

    request_id: str
    position: int
    row: int
    num_tokens: int
    num_fed: int


@dataclass(eq=False)
class RowSink:
    """Takes the rows of one request, step by step, and returns them once its prompt is complete. Extensions derive
    theirs, which `RowSpec.sink` names.

    All methods are called in an engine worker, by its `RowScorer` within a step. Ranks of a tensor-parallel group make
    the same calls in the same order, so what `key` and `compute` do must follow from the request alone.
    """

    spec: RowSpec
    candidates: torch.Tensor = field(init=False)
    """[1 or rows, m] int32, if the request has any."""
    end: int = 0
    """The position after the last computed one."""
    parts: list[LogprobsTensors] = field(default_factory=list)
    """The rows to return."""

    @cached_property
    def key(self) -> Hashable:
        """Rows of requests whose sinks have equal keys are computed together, by one of these."""
        return self.spec.temperature, self.spec.num_candidates, 0 <= self.spec.num_top <= working_memory.MAX_TOP

    @cached_property
    def can_wait(self) -> bool:
        """Whether rows may wait for those of later steps: in a lane, a step has few rows of a request."""
        return self.spec.chunk > 0 and 0 <= self.spec.num_top <= working_memory.MAX_TOP

    def is_ready(self, *, local: bool) -> bool:
        """Whether this rank has all that `compute` needs, with `local` for its own part of the vocabulary. If one rank
        does not, all store `missing` rows."""
        return True

    def missing(self, num_rows: int, device: torch.device) -> Columns:
        """Make rows whose logprobs are NaN, for a sink that may not be ready."""
        raise NotImplementedError

    def compute(
        self,
        scorer: "RowScorer",
        pieces: "Sequence[RowPiece]",
        targets: torch.Tensor,
        hidden_states: JoinedRows,
        head: LMHead,
    ) -> Columns:
        """Compute the rows of all pieces, one after another, from their targets [rows] and hidden states
        [rows, hidden]. For rows that waited these are their logits, which `head.project` returns as they are."""
        num_tops = [piece.sink.spec.num_top for piece in pieces]
        num_top = scorer.shape.vocab_size if -1 in num_tops else max(num_tops)
        if num_top > working_memory.MAX_TOP:
            # With so many top tokens, a rank would send the others its whole part of the vocabulary anyway.
            head = replace(head, project=head.whole, shard=None)
        candidates = torch.cat([piece.candidates() for piece in pieces]) if self.spec.num_candidates else None
        limit = scorer.chunk_rows(head, num_top, self.spec.num_candidates)
        return fused_logprobs.compute(
            targets, hidden_states, head.project, num_top, limit, head.shard, candidates, self.spec.temperature
        )

    def store(self, columns: Columns, hidden_states: torch.Tensor) -> None:
        """Keep the request's next rows, which were computed from hidden states [rows, hidden], or from logits if they
        waited."""
        tokens, logprobs, ranks = columns
        if self.spec.num_top >= 0:
            tokens, logprobs = tokens[:, : self.spec.num_columns], logprobs[:, : self.spec.num_columns]
        self.parts.append(LogprobsTensors(tokens, logprobs, ranks))

    def finish(self) -> None:
        """Do what remains once all rows of the prompt were stored."""


class SinkMaker(Protocol):
    """Makes an extension's sinks in an engine worker. `plugin` makes one per extension when the worker has its device,
    in every worker, also in those without an LM head."""

    def begin(self, spec: RowSpec, *, writes: bool) -> RowSink:
        """Make the sink of a request, whose `spec.sink` names this maker; again if the request was preempted. One rank
        of a tensor-parallel group `writes` what leaves the workers."""

    def allocate(self, config: VllmConfig, device: torch.device) -> None:
        """Allocate the memory that sinks keep. Called before vLLM profiles, on ranks with an LM head; not on a CPU."""

    def reserve(self, scorer: "RowScorer", runner: Any, hidden_states: torch.Tensor, head: LMHead) -> None:
        """Use as much memory as sinks need at most in a step. Called while vLLM profiles, with its model runner."""

    def around_forward(
        self, model: torch.nn.Module, parts: Sequence[tuple[RowSink, StepPart]]
    ) -> AbstractContextManager[None]:
        """Enclose the model's forward pass of a step that computes these parts of sinks of this maker, or of a dummy
        run, which has none. Called only where the model runs eagerly, and first for a dummy run."""


@dataclass(slots=True, eq=False)
class RowPiece:
    """A request's rows from row `first` on, which are `num_rows` of the step's hidden states from `start` on.
    `num_wanted` of them have a target: all, or all but the last."""

    sink: RowSink
    first: int
    start: int
    num_rows: int
    num_wanted: int

    def candidates(self) -> torch.Tensor:
        """Select [rows, m] of the request's table."""
        own, table = self.sink.spec.has_own_candidates, self.sink.candidates
        return table[self.first : self.first + self.num_rows] if own else table.expand(self.num_rows, -1)


@dataclass(slots=True)
class WaitingRows:
    """Logits of several steps, of requests whose sinks have equal keys. They are scored at once: a request gets rows
    once instead of in every step, and the LM head of a reference, up to gigabytes, is read once."""

    pieces: list[RowPiece] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def by_request(self, sinks: Collection[RowSink]) -> tuple[list[RowPiece], list[int]]:
        """Join the pieces of each of these sinks to one. Returns them, and the places of their rows."""
        found: dict[RowSink, list[tuple[RowPiece, int]]] = {}
        start = 0
        for piece in self.pieces:
            if piece.sink in sinks:
                found.setdefault(piece.sink, []).append((piece, start))
            start += piece.num_rows
        joined, order = [], list[int]()
        for sink, pieces in found.items():
            rows = [row for piece, start in pieces for row in range(start, start + piece.num_rows)]
            num_wanted = sum(piece.num_wanted for piece, _ in pieces)
            joined.append(RowPiece(sink, pieces[0][0].first, len(order), len(rows), num_wanted))
            order += rows
        return joined, order


@dataclass(slots=True)
class RowScorer:
    """Scores the rows of all requests of a model runner, step by step, within `budget_bytes` of working memory."""

    budget_bytes: int
    shape: working_memory.LogitsShape
    group: Any
    """vLLM's, of the tensor-parallel ranks."""
    sinks: Mapping[str, SinkMaker] = field(default_factory=dict)
    """Of extensions, by name."""
    requests: dict[str, RowSink] = field(default_factory=dict)
    """Those that were begun, and are not complete."""
    max_waiting_bytes: int = 0
    """Of logits of lanes' last steps, in addition to the budget; 0 where none wait."""
    _waiting: dict[Hashable, WaitingRows] = field(default_factory=dict)
    """By key of their sinks."""
    _waiting_bytes: int = 0
    _logits_fn: fused_logprobs.LogitsFunction | None = None
    _lm_head: LMHead = field(init=False)

    def begin(self, request_id: str, spec: RowSpec) -> None:
        """Begin a request; again after it was preempted."""
        maker = self.sinks.get(spec.sink)
        sink = RowSink(spec) if maker is None else maker.begin(spec, writes=self.group.rank_in_group == 0)
        if spec.num_candidates:
            table = torch.frombuffer(bytearray(spec.candidates), dtype=torch.int32).view(-1, spec.num_candidates)
            sink.candidates = async_tensor_h2d(table, device=self.group.device)
        self.requests[request_id] = sink

    def around_forward(self, model: torch.nn.Module, parts: Sequence[StepPart]) -> AbstractContextManager[Any]:
        """Enclose the forward pass of a step that computes these parts: see `SinkMaker`."""
        stack = ExitStack()
        for name, maker in self.sinks.items():
            sinks = [(self.requests[part.request_id], part) for part in parts]
            own = [(sink, part) for sink, part in sinks if sink.spec.sink == name]
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
        """Score what a step computed of requests that were begun. Every rank must come here at the same time.

        Args:
            hidden_states: [at least the step's tokens, hidden], after the final norm.
            targets: [tokens] int64, the token after each; those that are not fed are filled in here.
            logits: [tokens, vocabulary], if the step has projected all of them already.

        Returns:
            The rows of each request whose prompt is complete, by id; none of positions that no step computed.
        """
        head = self._head(logits_fn, hidden_states)
        if self._waiting and not any(sink.can_wait for sink in self.requests.values()):
            # All of their requests were aborted.
            self._compute_waiting(head)
        pieces, ended, last_rows, last_tokens = [], [], [], []
        for part in parts:
            sink = self.requests[part.request_id]
            spec, offset = sink.spec, part.row - part.position
            sink.end = end = min(part.position + part.num_tokens, part.num_fed)
            num_wanted = end - (start := max(part.position, spec.first - 1))
            if end == part.num_fed:
                ended.append(part.request_id)
                if spec.last_token is None:
                    num_wanted -= 1
                else:
                    last_rows.append(offset + end - 1)
                    last_tokens.append(spec.last_token)
            if num_wanted > 0:
                pieces.append(RowPiece(sink, start - spec.first + 1, offset + start, end - start, num_wanted))
        if last_rows:
            last = async_tensor_h2d([last_rows, last_tokens], device=targets.device, dtype=torch.int64)
            targets.scatter_(0, last[0], last[1])
        for group in self._groups(pieces, head):
            if not (group[0].sink.can_wait and self._let_wait(group, hidden_states, targets, head, logits)):
                self._compute(group, hidden_states, targets, head)
        if any(self.requests[request_id].can_wait for request_id in ended):
            self._compute_waiting(head)
        results = {}
        for request_id in ended:
            sink = self.requests.pop(request_id)
            sink.finish()
            if sink.parts:
                results[request_id] = LogprobsTensors.cat(sink.parts)
        return results

    def reserve(self, runner: Any, hidden_states: torch.Tensor) -> None:
        """Compute the largest chunks while vLLM profiles."""
        head = self._head(runner.model.compute_logits, hidden_states)
        # Without top tokens a chunk has more rows, with them more bytes per row: either may need more memory.
        for num_top in (0, working_memory.RESERVED_TOP):
            rows = min(self.chunk_rows(head, num_top, 0), runner.max_num_tokens)
            targets, states = zeros(rows, hidden_states)
            fused_logprobs.compute(targets, states, head.project, num_top, rows, head.shard)
        for maker in self.sinks.values():
            maker.reserve(self, runner, hidden_states, head)

    def _head(self, logits_fn: fused_logprobs.LogitsFunction, hidden_states: torch.Tensor) -> LMHead:
        """The LM head, examined again if the model is another one."""
        if self._logits_fn != logits_fn:
            self._lm_head = examine(logits_fn, hidden_states.shape[-1], hidden_states.dtype, self.group)
            self._logits_fn = logits_fn
        return self._lm_head

    def _groups(self, pieces: Sequence[RowPiece], head: LMHead) -> Iterable[list[RowPiece]]:
        """Group pieces that one call of a kernel can compute. Those that a rank is not ready for get rows of NaN."""
        groups: dict[Hashable, list[RowPiece]] = {}
        ready = self._ready([piece.sink for piece in pieces], head)
        for piece in pieces:
            sink = piece.sink
            if sink in ready:
                groups.setdefault((sink.key, sink.can_wait), []).append(piece)
            else:
                # Those that wait come before.
                self._compute_waiting(head)
                sink.parts.append(LogprobsTensors(*sink.missing(piece.num_wanted, self.group.device)))
        return groups.values()

    def _ready(self, sinks: Collection[RowSink], head: LMHead) -> set[RowSink]:
        """The sinks that are ready on every rank. Ranks agree on them, so all must come here together."""
        # They exchange nothing where all are the default one.
        extended = [sink for sink in sinks if sink.spec.sink]
        answers = [sink.is_ready(local=head.shard is not None) for sink in extended]
        on_all_ranks = true_on_every_rank(self.group, answers) if extended else []
        return set(sinks) - {sink for sink, is_ready in zip(extended, on_all_ranks, strict=True) if not is_ready}

    def _compute(
        self, pieces: list[RowPiece], hidden_states: torch.Tensor, targets: torch.Tensor, head: LMHead
    ) -> None:
        """Compute a group's rows, and store each request's own with it."""
        slices, num_rows = slices_of(pieces)
        states = JoinedRows([hidden_states[rows] for rows in slices])
        wanted = JoinedRows([targets[rows] for rows in slices])[0:num_rows]
        columns = pieces[0].sink.compute(self, pieces, wanted, states, head)
        start = 0
        for piece in pieces:
            tokens, logprobs, ranks = (column[start : start + piece.num_wanted] for column in columns)
            piece.sink.store((tokens, logprobs, ranks), hidden_states[piece.start : piece.start + piece.num_rows])
            start += piece.num_rows

    def _let_wait(
        self,
        pieces: list[RowPiece],
        hidden_states: torch.Tensor,
        targets: torch.Tensor,
        head: LMHead,
        logits: torch.Tensor | None,
    ) -> bool:
        """Keep a group's logits, if they fit, for `_compute_waiting`. The served model's are those of their own step:
        kernels of projections are chosen by the number of rows."""
        slices, num_rows = slices_of(pieces)
        num_bytes = num_rows * self.shape.padded * self.shape.logit_bytes
        if self._waiting_bytes + num_bytes > self.max_waiting_bytes:
            self._compute_waiting(head)
        if num_bytes > self.max_waiting_bytes:
            return False
        waiting = self._waiting.setdefault(pieces[0].sink.key, WaitingRows())
        waiting.pieces += pieces
        waiting.targets += [targets[rows] for rows in slices]
        if logits is None or head.shard is not None:
            waiting.logits.append(head.project(JoinedRows([hidden_states[rows] for rows in slices])[0:num_rows]))
        else:
            # A part is copied: it would keep the whole.
            waiting.logits.append(logits if num_rows == len(logits) else torch.cat([logits[rows] for rows in slices]))
        self._waiting_bytes += num_bytes
        return True

    def _compute_waiting(self, head: LMHead) -> None:
        """Compute all rows that wait, except those of requests that were aborted or begun again, or whose sink is not
        ready any more."""
        projected = replace(head, project=lambda logits: logits)
        sinks = [sink for sink in self.requests.values() if sink.can_wait] if self._waiting else []
        ready = self._ready(sinks, head)
        while self._waiting:
            _, rows = self._waiting.popitem()
            pieces, order = rows.by_request(ready)
            if pieces:
                places = async_tensor_h2d(order, device=self.group.device, dtype=torch.int64)
                targets, logits = torch.cat(rows.targets)[places], torch.cat(rows.logits)
                rows.logits.clear()
                self._compute(pieces, logits[places], targets, projected)
        self._waiting_bytes = 0

    def chunk_rows(self, head: LMHead, num_top: int, num_candidates: int) -> int:
        """Rows that one call of a kernel may have."""
        row_bytes = working_memory.row_bytes_fused(self.shape, num_top, head.copies, head.shard is not None)
        return self.rows_within(
            row_bytes + working_memory.RESULT_BYTES * num_candidates, in_blocks=num_top > working_memory.MAX_TOP
        )

    def rows_within(self, row_bytes: int, num_budgets: int = 1, *, in_blocks: bool = False) -> int:
        """Rows of a chunk whose working memory, in bytes per row, fits so many budgets."""
        of_blocks = working_memory.block_bytes(self.shape) if in_blocks or self.group.device.type == "cpu" else 0
        return working_memory.rows_per_chunk(max(1, num_budgets * self.budget_bytes - of_blocks), row_bytes)


def slices_of(pieces: Sequence[RowPiece]) -> tuple[list[slice], int]:
    """As few slices of a step's rows as have those of all pieces, and the number of rows."""
    slices: list[slice] = []
    for piece in pieces:
        start, stop = piece.start, piece.start + piece.num_rows
        if slices and slices[-1].stop == start:
            start = slices.pop().start
        slices.append(slice(start, stop))
    return slices, sum(piece.num_rows for piece in pieces)


def zeros(rows: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets and hidden states: a dummy run may leave NaN in its own."""
    return like.new_zeros(rows, dtype=torch.int64), like.new_zeros((rows, like.shape[-1]))
