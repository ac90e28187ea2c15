"""The sinks of references' windows in an engine worker, and the files and the memory that they need."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import msgspec
import torch
from cachetools import FIFOCache
from vllm.config import VllmConfig

from scoremode_server.kernels import fused_logprobs, working_memory
from scoremode_server.kernels.reduced_rows import JoinedRows
from scoremode_server.references.files.directory import ReferenceDirectory, StoredReference
from scoremode_server.references.files.manifest import HeadFormat
from scoremode_server.references.files.tensors import BrokenFileError
from scoremode_server.references.streams import Stream
from scoremode_server.references.worker import kl_divergence, llama_cpp
from scoremode_server.references.worker.expert_routes import ExpertLayers
from scoremode_server.references.worker.heads import HeadLayer, LeasedHead, ReferenceHead, copy_through_pinned
from scoremode_server.references.worker.layers import DecoderLayers
from scoremode_server.references.worker.lease import Lease
from scoremode_server.references.worker.orders import (
    MAX_UNWRITTEN_BYTES,
    SINK,
    Forget,
    LeaseCall,
    LeaseState,
    Order,
    ReadHead,
    ReadWindow,
    WindowMark,
)
from scoremode_server.references.worker.reads import FileReads, outcome_of
from scoremode_server.settings import reference_directory, reference_head_bytes
from scoremode_server.threads import CallThreads
from scoremode_server.worker.lm_head import LMHead
from scoremode_server.worker.request_rows import RowPiece, StepPart
from scoremode_server.worker.row_scorer import RowScorer, zeros
from scoremode_server.worker.row_spec import RowSpec
from scoremode_server.worker.sinks import Chunk, Sink, SinkMaker, Statistics

COMPARISON_BUDGETS = 4
"""On a GPU a comparison may use this many times the memory budget of prompt logprobs: 2,048 rows at once take 6 % less
time than 512 (a model of 1B parameters on an H200)."""

MAX_WRITTEN = 4096
"""Limit on outcomes of writes that wait for an API server to read them. After a request has ended, its API server no
longer reads them."""


class WindowSink(Sink, ABC):
    """Records, compares or exports the rows of a reference's window, as its mark says."""

    may_be_cached = False

    def __init__(self, mark: WindowMark, reference_experts: torch.Tensor | None = None) -> None:
        """Take the reference's experts [fed, layers, k] on the host; None if they are recorded, not compared, or could
        not be read."""
        super().__init__()
        self.mark, self.reference_experts, self.forces_routes = mark, reference_experts, mark.forces_routes
        self._routed: list[torch.Tensor] = []

    def store_routes(self, position: int, results: torch.Tensor) -> None:
        """See `RoutedSink`."""
        if position == self.num_routed:
            self._routed.append(results)

    @property
    def num_routed(self) -> int:
        """The number of tokens, from the first on, whose experts all layers have recorded or compared."""
        return sum(map(len, self._routed))

    def routed(self) -> torch.Tensor:
        """The results of these tokens: see `RoutedSink`."""
        if len(self._routed) > 1:
            self._routed = [torch.cat(self._routed)]
        return self._routed[0]

    def forget_routes(self) -> None:
        """Free their memory on the device."""
        self._routed = []

    @abstractmethod
    def cross(self, boundary: int, stream: Stream, rows: slice, position: int) -> None:
        """Copy or replace rows of the residual stream at one of the mark's boundaries. The first row's token is at
        `position`."""


class ComparedWindow(WindowSink):
    """Compares a window's rows with those of a reference."""

    def __init__(
        self,
        mark: WindowMark,
        read: "WindowTensors | None",
        leased: LeasedHead,
        num_top: int,
    ) -> None:
        """Take what was read for the window, on the host; None if it could not be read."""
        super().__init__(mark, read and read.experts)
        self.recorded = read and read.hidden_states
        self.streams = read.streams if read else {}
        self.leased, self.num_top = leased, num_top
        self.statistics = Statistics(list(mark.statistics)) if mark.statistics else None
        self.num_replaced = 0
        """Tokens whose stream was replaced."""

    def cross(self, boundary: int, stream: Stream, rows: slice, position: int) -> None:
        num_tokens = rows.stop - rows.start
        if boundary in self.streams and self.num_replaced == position:
            recorded = self.streams[boundary][position : position + num_tokens]
            stream.replace(rows, recorded.to(stream.hidden_states.device, non_blocking=True))
            self.num_replaced += num_tokens

    @cached_property
    def key(self) -> Hashable:
        return self.mark.action, self.mark.head, self.num_top, self.mark.statistics, self.mark.num_routed_layers

    def head(self, *, local: bool) -> ReferenceHead | None:
        """Find the reference's head, with `local` this rank's part of it; None if this rank cannot compare."""
        return None if self.recorded is None else self.leased.find(self.mark.head, local=local)

    def ready_head(self, *, local: bool) -> ReferenceHead:
        """The reference's head, once `is_ready` has found it."""
        reference = self.head(local=local)
        assert reference is not None
        return reference

    def is_ready(self, end: int, *, local: bool) -> bool:
        has_resumed = not self.mark.boundaries or self.num_replaced == end
        has_routes = not self.mark.num_routed_layers or self.num_routed == end
        return has_resumed and has_routes and self.head(local=local) is not None

    def chunk_rows(self, scorer: RowScorer, head: LMHead) -> int:
        return _compared_rows(scorer, head, self.ready_head(local=head.shard is not None), self.num_top)

    def compute(self, chunk: Chunk, pieces: Sequence[RowPiece]) -> Mapping[str, torch.Tensor]:
        columns = kl_divergence.compare(chunk, self.reference_logits(chunk, pieces), self.statistics)
        if self.mark.num_routed_layers:
            agreement = JoinedRows(list(map(_routes_of, pieces)))[chunk.place]
            columns["expert_agreement"] = agreement.view(torch.int32).squeeze(2)
        return columns

    def reference_logits(self, chunk: Chunk, pieces: Sequence[RowPiece]) -> torch.Tensor:
        """Project the reference's hidden states for the rows of a chunk."""
        states = [_window_of(piece).recorded[piece.first : piece.first + piece.num_rows] for piece in pieces]
        recorded = JoinedRows(states, chunk.logits.device)[chunk.place]
        return self.ready_head(local=chunk.shard is not None).logits_fn(recorded)


class ExportedWindow(ComparedWindow):
    """Adds the reference's distributions to a window's rows, in llama.cpp's format. Every rank computes whole rows and
    copies them to the host."""

    def head(self, *, local: bool) -> ReferenceHead | None:
        return super().head(local=False)

    def chunk_rows(self, scorer: RowScorer, head: LMHead) -> int:
        row_bytes = scorer.shape.vocab_size * (self.ready_head(local=False).logit_bytes + llama_cpp.LOGIT_BYTES)
        return min(scorer.rows_within(row_bytes), scorer.chunk_rows(head, 0, 0))

    def compute(self, chunk: Chunk, pieces: Sequence[RowPiece]) -> Mapping[str, torch.Tensor]:
        # Copy each chunk to the host at once, because many rows do not fit on the GPU.
        columns = llama_cpp.quantized(self.reference_logits(chunk, pieces))
        return {name: column.cpu() for name, column in columns.items()}


def _window_of(piece: RowPiece) -> Any:
    return piece.request.sinks[SINK]


def _routes_of(piece: RowPiece) -> torch.Tensor:
    """How the experts of a piece's tokens agree with the reference's: [rows, layers, 2] int16."""
    window = _window_of(piece)
    # The first row is of the last token before the first target.
    first = window.mark.num_fed - window.mark.num_scored + piece.first
    routed: torch.Tensor = window.routed()[first : first + piece.num_rows]
    return routed


def _compared_rows(scorer: RowScorer, head: LMHead, reference: ReferenceHead, num_top: int) -> int:
    """How many rows may have both models' logits in memory at once."""
    row_bytes = working_memory.row_bytes_compared(
        scorer.shape, reference.logit_bytes, num_top, head.copies, head.shard is not None
    )
    return scorer.rows_within(row_bytes, 1 if scorer.group.device.type == "cpu" else COMPARISON_BUDGETS)


class RecordedWindow(WindowSink):
    """Collects a window's hidden states, logprobs and residual streams on the host. `write` writes them to files after
    the last rows."""

    def __init__(self, mark: WindowMark, write: Callable[["RecordedWindow"], None]) -> None:
        super().__init__(mark)
        self.write = write
        self.hidden_states: list[torch.Tensor] = []
        self.logprobs: list[torch.Tensor] = []
        self.streams: dict[int, list[torch.Tensor]] = defaultdict(list)
        """The residual stream at each boundary, if it is recorded."""

    def cross(self, boundary: int, stream: Stream, rows: slice, position: int) -> None:
        copied = stream.copy(rows)
        self.streams[boundary].append(_to_host(copied) if copied.is_cuda else copied)

    def store(self, columns: Mapping[str, torch.Tensor], hidden_states: torch.Tensor) -> None:
        self.hidden_states.append(_to_host(hidden_states))
        self.logprobs.append(_to_host(columns["logprobs"][:, 0]))

    def finish(self) -> None:
        self.write(self)


@dataclass(frozen=True, slots=True)
class WindowTensors:
    """A window of a reference as it was read, on the host."""

    hidden_states: torch.Tensor
    """[scored, hidden]"""
    streams: Mapping[int, torch.Tensor]
    """The residual stream [fed, hidden] at the boundaries of the window's mark."""
    experts: torch.Tensor | None
    """Experts [fed, layers, k], if they are compared."""


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Pin a host tensor if this worker has a GPU, which can then copy it while it computes."""
    return tensor.pin_memory() if torch.cuda.is_initialized() else tensor


@dataclass
class WorkerWindows(SinkMaker):
    """The files that windows in this worker need, and the LM head of the reference to compare with. Neither steps nor
    calls wait for a file: threads read the files that API servers order before they send a window, and write recorded
    windows."""

    root: ReferenceDirectory
    """The folder of references."""
    leased: LeasedHead = field(init=False)
    """Made before vLLM profiles memory, or when first needed if vLLM does not profile (on a CPU)."""
    lease: Lease = field(default_factory=Lease)
    reads: FileReads = field(default_factory=lambda: FileReads(CallThreads()))
    layers: DecoderLayers | None = None
    """The model's decoder layers, found in a dummy run. Always None for a compiled model, which calls no hooks."""
    has_hooks: bool = True
    _experts: ExpertLayers | None = None
    _writes: FIFOCache[str, Future[str]] = field(default_factory=lambda: FIFOCache(MAX_WRITTEN))
    """Outcomes of writes by ticket: why the file could not be written, or "" if it was."""
    _pending_writes: list[tuple[Future[str], str, int]] = field(default_factory=list)
    """Writes under way, each with its reference's name and its bytes."""

    def begin(self, spec: RowSpec, data: Any, *, writes: bool) -> Sink:
        """Make the sink for a window's rows: see `SinkMaker`. Only one rank writes what is recorded."""
        mark = msgspec.convert(data, WindowMark)
        if mark.action == "record":
            return RecordedWindow(mark, self._write_window_later) if writes else Sink()
        make_sink = ExportedWindow if mark.action == "export" else ComparedWindow
        return make_sink(mark, self.reads.find(mark.ticket), self.leased, spec.num_top)

    def around_forward(
        self, model: torch.nn.Module, parts: Sequence[tuple[Sink, StepPart]]
    ) -> AbstractContextManager[Any]:
        """Let windows copy or replace their residual stream, and the choices of experts, in a forward pass. Find the
        model's layers in the first one. See `SinkMaker`."""
        if self.layers is None or self.layers.model is not model:
            self.layers = DecoderLayers(model)
            return self.layers.watching()
        windows = [(sink, part) for sink, part in parts if isinstance(sink, WindowSink)]
        hooks = ExitStack()
        hooks.enter_context(self.layers.hooking((sink.cross, sink.mark.boundaries, part) for sink, part in windows))
        if routed := [(sink, part) for sink, part in windows if sink.mark.num_routed_layers]:
            hooks.enter_context(self.expert_layers(model).hooking(routed))
        return hooks

    def expert_layers(self, model: torch.nn.Module) -> ExpertLayers:
        """The mixture-of-experts layers of the served model."""
        if self._experts is None or self._experts.model is not model:
            self._experts = ExpertLayers(model)
        return self._experts

    def reserve(self, scorer: RowScorer, runner: Any, hidden_states: torch.Tensor, head: LMHead) -> None:
        """Use as much memory as comparing a step's rows may need: see `SinkMaker`."""
        targets, states = zeros(runner.max_num_tokens, hidden_states)
        if self.layers is not None:
            # A hook holds both parts of the stream, and a copy of a step's rows.
            Stream(zeros(len(states), states)[1], zeros(len(states), states)[1]).copy(slice(None))
        reference = ReferenceHead(head.project, scorer.shape.logit_bytes)
        num_top = working_memory.RESERVED_TOP

        def compare(chunk: Chunk) -> Mapping[str, torch.Tensor]:
            return kl_divergence.compare(chunk, reference.logits_fn(states[chunk.place]))

        limit = _compared_rows(scorer, head, reference, num_top)
        fused_logprobs.compute(targets, states, head.project, num_top, limit, head.shard, sinks=[compare])

    def allocate(self, config: VllmConfig, device: torch.device) -> None:
        """Allocate the memory for a reference's head, once. It has the size of the served model's head, because most
        references have a head of that size."""
        if not hasattr(self, "leased"):
            model = config.model_config
            num_ranks = config.parallel_config.tensor_parallel_size
            num_bytes = model.get_vocab_size() * (model.get_hidden_size() + 1) * model.dtype.itemsize // num_ranks
            self.leased = LeasedHead(max(num_bytes, reference_head_bytes()), device, partial(HeadLayer, config=config))

    def exchange(
        self, orders: list[dict[str, Any]], tickets: list[str], lease_call: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Begin what an API server orders, update the engine's lease, and return at once.

        Returns:
            outcomes: by ticket, or by an LM head's key: why the file could not be read or written, or the head could
                not be placed; "" once that is done, None until then. The outcome of a write is returned once.
            lease: the `LeaseState`; None without `lease_call`.
        """
        # Update the lease before obeying the orders, which may drop a head that only the last call wanted.
        lease = None if lease_call is None else self._update_lease(msgspec.convert(lease_call, LeaseCall))
        for order in msgspec.convert(orders, list[Order]):
            match order:
                case ReadWindow(mark):
                    self.reads.begin(mark.ticket, mark.reference, partial(self._read_shard, mark))
                case ReadHead(mark, ticket, head):
                    layer = self.leased.make_layer(HeadFormat(**head))
                    self.reads.begin(ticket, mark.reference, partial(self._read_head, mark, layer))
                case Forget(ticket):
                    self.reads.forget(ticket)
        return {"outcomes": {ticket: self._outcome(ticket) for ticket in tickets}, "lease": lease}

    def _update_lease(self, call: LeaseCall) -> LeaseState:
        before = self.lease.key, self.lease.ticket
        is_granted = self.lease.update(call)
        if self.lease.key and (self.lease.key, self.lease.ticket) != before:
            self.leased.place(self.lease.key, *self.reads.find(self.lease.ticket))
        return LeaseState(
            key=self.lease.key, is_granted=is_granted, is_used=self.lease.is_used, waiting=self.lease.waiting
        )

    def _outcome(self, ticket: str) -> str | None:
        if (written := self._writes.get(ticket)) is not None:
            # Return it only once, so that old outcomes do not push out one that is read later, such as the LM head's.
            return self._writes.pop(ticket).result() if written.done() else None
        if (placed := self.leased.progress(ticket)) is not None:
            return outcome_of(placed) if placed.done() else None
        return self.reads.outcome(ticket)

    def _read_head(self, mark: WindowMark, layer: HeadLayer) -> tuple[HeadLayer, list[torch.Tensor]]:
        return layer, layer.read(self.root.open_same(mark.reference, mark.identity))

    def _read_shard(self, mark: WindowMark) -> WindowTensors:
        # Open the reference again for each window: it may have been deleted, and another one may have its name.
        reference = self.root.open_same(mark.reference, mark.identity)
        hidden_states, _ = reference.read_shard(mark.index)
        if hidden_states.shape != (mark.num_scored, reference.manifest.head.hidden_size):
            raise BrokenFileError(f"{reference.shard(mark.index)} has hidden states {tuple(hidden_states.shape)}")
        streams = {}
        for boundary, recorded in zip(mark.boundaries, mark.recorded or mark.boundaries, strict=True):
            stream = streams[boundary] = _readable(reference.read_stream(mark.index, recorded))
            if len(stream) != mark.num_fed:
                raise BrokenFileError(f"{reference.stream(mark.index, recorded)} has {len(stream)} tokens")
        experts = self._read_experts(reference, mark) if mark.num_routed_layers else None
        return WindowTensors(_readable(hidden_states), streams, experts)

    def _read_experts(self, reference: StoredReference, mark: WindowMark) -> torch.Tensor:
        experts, recorded = reference.read_experts(mark.index), reference.manifest.routes
        assert recorded is not None
        if experts.shape != (mark.num_fed, len(recorded.layers), recorded.top_k):
            raise BrokenFileError(f"{reference.experts_path(mark.index)} has experts {tuple(experts.shape)}")
        # An id of no expert would end the engine.
        if wrong := {int(experts.min()), int(experts.max())} - {*range(recorded.num_experts)}:
            raise BrokenFileError(f"{reference.experts_path(mark.index)} has expert {min(wrong)}")
        return _readable(experts)

    def write_head_later(self, name: str, identity: str, ticket: str, weights: list[torch.Tensor]) -> None:
        """Write an LM head into a reference in a thread, because that takes as long as computing dozens of windows."""

        def write() -> None:
            on_host = [copy_through_pinned(weight, torch.empty_like(weight, device="cpu")) for weight in weights]
            self.root.open_same(name, identity).write_head(*on_host)

        self._submit_write(name, ticket, write)

    def _write_window_later(self, window: RecordedWindow) -> None:
        mark = window.mark
        num_routed, experts = window.num_routed, [_to_host(window.routed())] if window.num_routed else []
        window.forget_routes()
        num_bytes = sum(tensor.nbytes for tensor in chain(window.hidden_states, experts, *window.streams.values()))

        is_copying = window.hidden_states[0].is_pinned()
        copied = torch.cuda.current_stream().record_event() if is_copying else None

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            logprobs = torch.cat(window.logprobs)
            if logprobs.isnan().any():
                raise ValueError("the model computed NaN")
            reference = self.root.open_same(mark.reference, mark.identity)
            for boundary in mark.boundaries:
                parts = window.streams[boundary]
                if (num_tokens := sum(map(len, parts))) != mark.num_fed:
                    raise ValueError(f"{num_tokens} of {mark.num_fed} tokens passed boundary {boundary} of the layers")
                reference.write_stream(mark.index, boundary, torch.cat(parts))
            if mark.num_routed_layers:
                if num_routed != mark.num_fed:
                    raise ValueError(f"{num_routed} of {mark.num_fed} tokens passed all routers of experts")
                reference.write_experts(mark.index, *experts)
            # Write this file last: a window that has it has the others.
            reference.write_shard(mark.index, torch.cat(window.hidden_states), logprobs)

        self._submit_write(mark.reference, mark.ticket, write, num_bytes)

    def _submit_write(self, name: str, ticket: str, write: Callable[[], None], num_bytes: int = 0) -> None:
        def attempt() -> str:
            try:
                write()
            # Return text, because an exception would keep the tensors of its calls in memory.
            except Exception as error:
                return str(error) or repr(error)
            return ""

        self._pending_writes = [pending for pending in self._pending_writes if not pending[0].done()]
        waiting = sum(size for _, other, size in self._pending_writes if other == name)
        # A single window with its layers may be larger than the limit.
        if waiting and num_bytes + waiting > MAX_UNWRITTEN_BYTES:
            written = Future[str]()
            written.set_result(f"{MAX_UNWRITTEN_BYTES} bytes already wait to be written to disk")
        else:
            written = self.reads.threads.submit(name, attempt)
            self._pending_writes.append((written, name, num_bytes))
        self._writes[ticket] = written


def reference_sinks() -> dict[str, SinkMaker]:
    """Make the `SinkMaker` of references' windows, by the name of its sinks; none if the server has no folder for
    references."""
    root = reference_directory()
    return {} if root is None else {SINK: WorkerWindows(ReferenceDirectory(root))}
