"""Memory in an engine worker for the LM heads of references: which are there, which are needed, which are being read.

Ranks of a tensor-parallel group decide the same, because they decide by the order of calls, which come to all of them,
and never by what a file or a thread has done meanwhile.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from scoremode_server.references.directory import StoredReference
from scoremode_server.references.file_threads import FileThreads
from scoremode_server.references.manifest import HeadFormat
from scoremode_server.references.tensor_files import BrokenFileError
from scoremode_server.vllm_patches.reference_head import HeadLayer, ReferenceHead

PADDING_BYTES = 64 * 32_768 * 4
"""Added to the memory: vLLM pads the vocabulary to a multiple of 64 rows. No hidden state has more entries."""

ALIGNMENT = 256
"""Of heads in memory, in bytes."""

FAILED = "failed: "
"""Begins the state of a head that could not be read or placed; the reason follows."""


@dataclass(slots=True)
class _PlacedHead:
    start: int
    end: int
    layer: HeadLayer
    ready: Future[None]
    holders: set[str] = field(default_factory=set)


class HeadMemory:
    """Heads by key. A head is first read to the host by `threads`, then held, and placed on the device as soon as there
    is memory for it: `num_bytes` on all ranks together, `part` on this one. After its holder releases it, it stays
    until another head needs the memory."""

    def __init__(
        self,
        num_bytes: int,
        part: int,
        device: torch.device,
        make_layer: Callable[[HeadFormat], HeadLayer],
        threads: FileThreads,
    ) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.empty(part + PADDING_BYTES, dtype=torch.uint8, device=device)
        self._make_layer = make_layer
        self._threads = threads
        self._placing = FileThreads(1)
        self._read: dict[str, tuple[HeadLayer, Future[None]]] = {}
        self._placed: OrderedDict[str, _PlacedHead] = OrderedDict()
        """The one that was held last is the last."""
        self._waiting: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Keys and holders, in order."""

    def read(self, key: str, name: str, head: HeadFormat, open_reference: Callable[[], StoredReference]) -> None:
        """Begin to read a head of a reference to the host, unless it is here."""
        if key in self._read or key in self._placed:
            return
        layer = self._make_layer(head)

        def read() -> None:
            if layer.num_bytes > len(self._memory):
                raise BrokenFileError(f"the LM head of reference {name!r} does not fit")
            layer.read(open_reference())

        self._read[key] = layer, self._threads.submit(name, read)

    def forget(self, key: str) -> None:
        """Drop a head, unless it is held."""
        if key in self._read:
            self._read.pop(key)[1].cancel()
        if key in self._placed and not self._placed[key].holders:
            self._evict(key)

    def hold(self, key: str, holder: str) -> None:
        """Place a head that was read on every rank, once there is memory for it, and keep it there."""
        self._waiting[key, holder] = None
        self._place_waiting()

    def release(self, key: str, holder: str) -> None:
        """Hold a head no longer."""
        self._waiting.pop((key, holder), None)
        if key in self._placed:
            self._placed[key].holders.discard(holder)
        self._place_waiting()

    @property
    def is_contended(self) -> bool:
        """Whether a head waits for memory."""
        return bool(self._waiting)

    def state(self, key: str, holder: str) -> str:
        """`absent`, `reading`, `read`, `waiting` for memory, `placed`, or `FAILED` and the reason."""
        placed = self._placed.get(key)
        if placed is None:
            if key not in self._read:
                return "absent"
            _, read = self._read[key]
            return _state(read, "reading", "waiting" if (key, holder) in self._waiting else "read")
        return _state(placed.ready, "waiting", "placed") if holder in placed.holders else "read"

    def find(self, key: str, *, local: bool) -> ReferenceHead | None:
        """A head that is placed; with `local` this rank's part of it."""
        placed = self._placed.get(key)
        if placed is None or _state(placed.ready, "waiting", "placed") != "placed":
            return None
        return placed.layer.ready(local=local)

    def _place_waiting(self) -> None:
        while self._waiting:
            key, holder = next(iter(self._waiting))
            if key not in self._placed and key in self._read and not self._place(key):
                return
            del self._waiting[key, holder]
            if key in self._placed:
                self._placed[key].holders.add(holder)
                self._placed.move_to_end(key)

    def _place(self, key: str) -> bool:
        layer, _ = self._read[key]
        size = -(-layer.num_bytes // ALIGNMENT) * ALIGNMENT
        while (start := self._gap(size)) is None:
            unused = next((each for each, placed in self._placed.items() if not placed.holders), None)
            if unused is None:
                return False
            self._evict(unused)
        del self._read[key]
        memory = self._memory[start : start + layer.num_bytes]
        ready = self._placing.submit("", partial(layer.place, memory))
        self._placed[key] = _PlacedHead(start, start + size, layer, ready)
        return True

    def _gap(self, size: int) -> int | None:
        """Where so many bytes are free."""
        taken = sorted((placed.start, placed.end) for placed in self._placed.values())
        edges = [(0, 0), *taken, (len(self._memory), 0)]
        return next((end for (_, end), (start, _) in pairwise(edges) if start - end >= size), None)

    def _evict(self, key: str) -> None:
        # A copy that has begun must not write into the next head there.
        self._placed.pop(key).ready.exception()


def _state(future: Future[None], pending: str, done: str) -> str:
    if not future.done():
        return pending
    error = None if future.cancelled() else future.exception()
    return done if error is None else f"{FAILED}{error}"
