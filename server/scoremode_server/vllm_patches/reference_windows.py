"""Windows of references in an engine worker: what becomes of their rows, and the files and the memory for that."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from scoremode_server.references.directory import ReferenceDirectory
from scoremode_server.references.file_threads import FileThreads
from scoremode_server.references.manifest import HeadFormat
from scoremode_server.references.tensor_files import BrokenFileError
from scoremode_server.vllm_patches.reference_heads import HeadLayer, HeadMemory, ReferenceHead, copy_through_pinned
from scoremode_server.vllm_patches.row_spec import WindowMark

# vLLM shows only the messages of loggers below its own.
logger = init_logger(f"vllm.{__name__}")

MAX_UNWRITTEN_BYTES = 2 * 1024**3
"""Of windows of a reference that are computed and not on disk yet. API servers send fewer; more come only where the
disk does not answer, and fail."""

MAX_WRITTEN = 4096
"""Files whose state is kept for API servers, which ask for far fewer at a time."""


@dataclass(slots=True)
class Orders:
    """What an API server asks of the workers of an engine in one call, and in this order."""

    forget: list[str] = field(default_factory=list)
    """Tickets of windows that were read."""
    release: list[str] = field(default_factory=list)
    """Keys of heads, as below."""
    forget_heads: list[str] = field(default_factory=list)
    read: list[dict[str, Any]] = field(default_factory=list)
    """Marks of windows."""
    read_heads: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """Marks of any of their windows, and `HeadFormat`s."""
    hold: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Tickets of which the state is asked."""
    heads: list[str] = field(default_factory=list)
    """Keys of which the state is asked."""


@dataclass(slots=True)
class ComparedWindow:
    """A window whose rows are compared with those of a reference, or take their place."""

    key: str
    """Of the reference's LM head."""
    is_export: bool
    hidden_states: torch.Tensor | None
    """The reference's, on the host; None if they could not be read."""
    heads: HeadMemory

    def head(self, *, local: bool) -> ReferenceHead | None:
        """The reference's head, with `local` this rank's part of it, but whole for an export; None if this rank cannot
        compare."""
        return None if self.hidden_states is None else self.heads.find(self.key, local=local and not self.is_export)


@dataclass(slots=True)
class RecordedWindow:
    """A window whose hidden states and logprobs go to a file."""

    mark: WindowMark
    write: Callable[["RecordedWindow"], None]
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    copied: Any = None
    """An event of the device, after which both are on the host; None on a CPU."""

    def add(self, hidden_states: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Copy some rows to the host."""
        self.hidden_states.append(_to_host(hidden_states))
        self.logprobs.append(_to_host(logprobs))

    def finish(self) -> None:
        """All rows were given."""
        if self.hidden_states[0].is_pinned():
            self.copied = torch.cuda.Event()
            self.copied.record()
        self.write(self)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(slots=True)
class ReferenceWindows:
    """The files that windows in this worker need, and the memory for references' LM heads.

    No step and no call waits for a file: threads read what API servers order before they send a window, and write what
    windows leave. API servers ask about the progress.
    """

    root: ReferenceDirectory
    """Where references are."""
    head_bytes: int = 0
    """Memory for LM heads, all ranks together."""
    heads: HeadMemory | None = None
    """Made while vLLM profiles, or, where it does not (on a CPU), when it is first needed."""
    _threads: FileThreads = field(default_factory=FileThreads)
    _read: dict[str, Future[torch.Tensor]] = field(default_factory=dict)
    """Hidden states by ticket."""
    _written: OrderedDict[str, Future[str]] = field(default_factory=OrderedDict)
    """By ticket: why something was not written, or nothing if it was."""
    _unwritten: list[tuple[Future[str], str, int]] = field(default_factory=list)
    """Windows that are being written, with the name of the reference and bytes."""

    def begin(self, mark: WindowMark, *, writes: bool) -> RecordedWindow | ComparedWindow | None:
        """What becomes of a window's rows on this rank, of which one writes; None if they are only returned."""
        if mark.action == "record":
            return RecordedWindow(mark, self._write_later) if writes else None
        assert self.heads is not None
        is_read = self._file_state(mark.ticket) == ""
        is_export = mark.action == "export"
        return ComparedWindow(mark.head, is_export, self._read[mark.ticket].result() if is_read else None, self.heads)

    def allocate_heads(self, config: VllmConfig, device: torch.device) -> None:
        """Make the memory for references' heads, once."""
        if self.heads is None:
            num_bytes = self.head_bytes // config.parallel_config.tensor_parallel_size
            self.heads = HeadMemory(num_bytes, device, partial(HeadLayer, config=config), self._threads)

    def exchange(self, holder: str, orders: Orders, *, pinned: bool) -> dict[str, Any]:
        """Begin what an API server, the `holder`, orders. Hidden states are `pinned` if they are for a GPU.

        Returns, at once:
            files: by ticket, why something could not be read or written, or nothing if it was; None until then.
            heads: by key, see `HeadMemory.state`.
            is_contended: whether a head waits for memory.
        """
        assert self.heads is not None
        for ticket in orders.forget:
            if ticket in self._read:
                self._read.pop(ticket).cancel()
        for key in orders.release:
            self.heads.release(key, holder)
        for key in orders.forget_heads:
            self.heads.forget(key)
        for mark in (WindowMark(**fields) for fields in orders.read):
            self._read[mark.ticket] = self._threads.submit(mark.reference, partial(self._read_shard, mark, pinned))
        for fields, head in orders.read_heads:
            mark = WindowMark(**fields)
            open_reference = partial(self.root.open_same, mark.reference, mark.identity)
            self.heads.read(mark.head, mark.reference, HeadFormat.model_validate(head), open_reference)
        for key in orders.hold:
            self.heads.hold(key, holder)
        return {
            "files": {ticket: self._file_state(ticket) for ticket in orders.files},
            "heads": {key: self.heads.state(key, holder) for key in orders.heads},
            "is_contended": self.heads.is_contended,
        }

    def _file_state(self, ticket: str) -> str | None:
        """Why something could not be read or written, nothing if it was, None until then."""
        if (read := self._read.get(ticket)) is not None and read.done():
            return _reason(error) if (error := read.exception()) else ""
        written = self._written.get(ticket)
        return written.result() if written is not None and written.done() else None

    def _read_shard(self, mark: WindowMark, pinned: bool) -> torch.Tensor:
        # Opened anew for each: it may have been deleted or moved, and another may have its name.
        reference = self.root.open_same(mark.reference, mark.identity)
        hidden_states, _ = reference.read_shard(mark.index)
        head = reference.manifest.head
        if head is None or hidden_states.shape != (mark.num_scored, head.hidden_size):
            raise BrokenFileError(f"{reference.shard(mark.index)} has hidden states {tuple(hidden_states.shape)}")
        return hidden_states.pin_memory() if pinned else hidden_states

    def write_head_later(
        self, name: str, identity: str, ticket: str, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Write an LM head into a reference while windows are computed: it takes as long as dozens of them."""

        def write() -> None:
            weights = [each for each in (weight, bias) if each is not None]
            # Copied next to what the device computes.
            on_host = [
                copy_through_pinned(each, torch.empty_like(each, device="cpu")) if each.is_cuda else each
                for each in weights
            ]
            self.root.open_same(name, identity).write_head(*on_host)

        self._written_later(name, ticket, "the LM head", write)

    def _write_later(self, window: RecordedWindow) -> None:
        mark = window.mark
        num_bytes = sum(states.numel() * states.itemsize for states in window.hidden_states)

        def write() -> None:
            if window.copied is not None:
                window.copied.synchronize()
            logprobs = torch.cat(window.logprobs)
            if logprobs.isnan().any():
                raise ValueError("the model computed NaN")
            reference = self.root.open_same(mark.reference, mark.identity)
            reference.write_shard(mark.index, torch.cat(window.hidden_states), logprobs)

        self._written_later(mark.reference, mark.ticket, f"window {mark.index}", write, num_bytes)

    def _written_later(self, name: str, ticket: str, what: str, write: Callable[[], None], num_bytes: int = 0) -> None:
        def attempt() -> str:
            try:
                write()
            # As text: an exception would keep the tensors of the calls that it came through.
            except Exception as error:
                logger.warning("Reference %s: %s was not written: %s", name, what, error)
                return _reason(error)
            return ""

        self._unwritten = [each for each in self._unwritten if not each[0].done()]
        if num_bytes + sum(size for _, other, size in self._unwritten if other == name) > MAX_UNWRITTEN_BYTES:
            written = Future[str]()
            written.set_result(f"{MAX_UNWRITTEN_BYTES} bytes wait for the disk already")
        else:
            written = self._threads.submit(name, attempt)
            self._unwritten.append((written, name, num_bytes))
        self._written[ticket] = written
        if len(self._written) > MAX_WRITTEN:
            self._written.popitem(last=False)


def _reason(error: BaseException) -> str:
    return str(error) or repr(error)
