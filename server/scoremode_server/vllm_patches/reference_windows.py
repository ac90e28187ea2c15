"""Windows of references in an engine worker: their hidden states are kept, or compared with those that were kept.

The API server marks the sampling parameters of such a window, and no other request may carry the mark (`guard_marks`).
"""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from threading import Semaphore
from typing import Any, Literal

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.outputs import LogprobsTensors

from scoremode_server.kernels.working_memory import RESERVED_TOP
from scoremode_server.references.directory import NoReferenceError, ReferenceDirectory, StoredReference
from scoremode_server.references.tensor_files import BrokenFileError
from scoremode_server.vllm_patches.reference_head import HeadSlot, ReferenceHead
from scoremode_server.vllm_patches.scored_windows import ScoredWindows
from scoremode_server.vllm_patches.windows import Projections, Window, marked_with

# vLLM writes what comes below its own name.
logger = init_logger(f"vllm.{__name__}")

MARK = "scoremode_reference"
"""The key in `SamplingParams.extra_args`."""

THREADS = 4
"""That read, check and write files. Each does about a gigabyte a second."""

HEAD = -1
"""Stands for the LM head where windows are numbered."""

PINNED_BYTES = 16 * 1024**2
"""That the LM head is copied through."""

MAX_UNWRITTEN = 32
"""Windows that are computed and not on disk yet. Then the engine waits for the disk."""


@dataclass(frozen=True, slots=True)
class WindowMark:
    """What is to be done with a request's hidden states."""

    action: Literal["record", "compare"]
    reference: str
    identity: str
    index: int
    """Of the window."""
    first: int
    """Position of the first target."""
    num_scored: int
    """Targets."""
    last_token: int
    """The last target, which is not fed."""
    num_top: int = 0
    """Likeliest tokens that are wanted of both sides."""

    def as_extra_args(self) -> dict[str, Any]:
        """For `SamplingParams`."""
        return {MARK: asdict(self)}


def find_mark(sampling_params: Any) -> WindowMark | None:
    """The mark of a request, if it has one."""
    mark = marked_with(sampling_params, MARK)
    return None if mark is None else WindowMark(**mark)


class ComparedWindow(Window):
    """Tokens: of the served model the target and the likeliest, of the reference the same, the reference's rank of the
    target [2 (1 + k) + 1]. Logprobs: theirs in the same order, KL(reference||served), KL(served||reference), acceptance
    [2 (1 + k) + 3]. Ranks: the served model's. Where the reference cannot be read, all logprobs are NaN."""

    def __init__(
        self,
        mark: WindowMark,
        hidden_states: "Future[torch.Tensor | None]",
        head: Callable[[bool], ReferenceHead | None],
    ) -> None:
        super().__init__(mark.first, mark.last_token)
        self.mark = mark
        self._hidden_states = hidden_states
        self._head = head

    def _rows(
        self, row: int, targets: torch.Tensor, hidden_states: torch.Tensor, projections: Projections
    ) -> LogprobsTensors:
        kept, head = self._hidden_states.result(), self._head(projections.shard is not None)
        # Ranks compute together or not at all.
        if not projections.all_ranks_agree(kept is not None and head is not None):
            return self._unreadable(targets)
        assert kept is not None
        assert head is not None
        kept_rows = kept[row : row + len(targets)].to(targets.device, non_blocking=True)
        found = projections.compare(targets, hidden_states, head, kept_rows, self.mark.num_top)
        served, reference = found.served, found.reference
        return LogprobsTensors(
            torch.cat((served.tokens, reference.tokens, reference.ranks[:, None]), 1),
            torch.cat(
                (
                    served.logprobs,
                    reference.logprobs,
                    torch.stack((found.kld, found.reverse_kld, found.acceptance), 1),
                ),
                1,
            ),
            served.ranks,
        )

    def finish(self) -> None:
        """Nothing is left to do."""

    def _unreadable(self, targets: torch.Tensor) -> LogprobsTensors:
        num_columns = 2 * (1 + max(1, self.mark.num_top))
        return LogprobsTensors(
            targets.new_full((len(targets), num_columns + 1), -1, dtype=torch.int32),
            targets.new_full((len(targets), num_columns + 3), math.nan, dtype=torch.float32),
            targets.new_zeros(len(targets), dtype=torch.int32),
        )


class RecordedWindow(Window):
    """Rows are those of prompt logprobs; hidden states and logprobs go to a file."""

    def __init__(self, mark: WindowMark, write: Callable[["RecordedWindow"], None] | None) -> None:
        super().__init__(mark.first, mark.last_token)
        self.mark = mark
        self._write = write
        self.hidden_states: list[torch.Tensor] = []
        self.logprobs: list[torch.Tensor] = []
        self.copied: Any = None
        """An event of the device, after which both are on the host; None on a CPU."""

    def _rows(
        self, row: int, targets: torch.Tensor, hidden_states: torch.Tensor, projections: Projections
    ) -> LogprobsTensors:
        tokens, logprobs, ranks = projections.score(targets, hidden_states)
        if self._write is not None:
            self.hidden_states.append(_to_host(hidden_states))
            self.logprobs.append(_to_host(logprobs[:, 0]))
        return LogprobsTensors(tokens, logprobs, ranks)

    def finish(self) -> None:
        """All rows were given."""
        if self._write is not None:
            if self.hidden_states[0].is_pinned():
                self.copied = torch.cuda.Event()
                self.copied.record()
            self._write(self)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _copy_beside(weight: torch.Tensor) -> torch.Tensor:
    """A weight on the host, copied beside what the device computes. While memory that is not pinned is copied into, the
    process can launch nothing: half a gigabyte kept an engine waiting for 0.3 seconds."""
    if not weight.is_cuda:
        return weight
    whole = torch.empty(weight.shape, dtype=weight.dtype)
    rows = max(1, PINNED_BYTES // (weight[:1].numel() * weight.itemsize))
    pinned = torch.empty_like(whole[:rows], pin_memory=True)
    stream = torch.cuda.Stream(weight.device)
    with torch.cuda.stream(stream):
        for part, target in zip(weight.split(rows), whole.split(rows), strict=True):
            pinned[: len(part)].copy_(part, non_blocking=True)
            stream.synchronize()
            target.copy_(pinned[: len(part)])
    return whole


class ReferenceWindows(ScoredWindows):
    """The windows that are with this worker, the files that they need, and the slot for a reference's LM head.

    Attributes:
        slot: made while vLLM profiles; where it does not, as on a CPU, when it is first asked for.
    """

    def __init__(self, root: ReferenceDirectory) -> None:
        super().__init__()
        self.root = root
        self.slot: HeadSlot | None = None
        self._references: dict[str, StoredReference] = {}
        self._threads = ThreadPoolExecutor(THREADS, "scoremode-references")
        self._unwritten = Semaphore(MAX_UNWRITTEN)
        self._failures: dict[tuple[str, int], str] = {}

    def begin(self, sampling_params: Any, *, writes: bool, device: torch.device) -> Window | None:
        """The window that parameters mark, of a reference or not; None if they mark none."""
        mark = find_mark(sampling_params)
        if mark is None:
            return super().begin(sampling_params, writes=writes, device=device)
        if mark.action == "record":
            return RecordedWindow(mark, self._write_later if writes else None)
        hidden_states = self._threads.submit(self._read, mark, device.type == "cuda")
        return ComparedWindow(mark, hidden_states, lambda local: self._head(mark, local))

    def reserve(self, runner: Any, hidden_states: torch.Tensor, projections: Projections) -> None:
        """Make the slot for a reference's head, and compare as many rows as a chunk has, while vLLM profiles."""
        self.make_slot(runner.vllm_config, hidden_states.device)
        states = hidden_states.new_zeros((runner.max_num_tokens, hidden_states.shape[-1]))
        targets = torch.zeros(len(states), dtype=torch.int64, device=states.device)
        head = ReferenceHead(projections.project, runner.model_config.head_dtype.itemsize)
        projections.compare(targets, states, head, states, RESERVED_TOP)

    def make_slot(self, config: VllmConfig, device: torch.device) -> HeadSlot:
        """The slot, with room for the largest head that is in the folder now and at least for the served model's."""
        if self.slot is None:
            model, largest = config.model_config, self.root.largest_head()
            served_bytes = model.get_vocab_size() * (model.get_hidden_size() + 1) * model.dtype.itemsize
            self.slot = HeadSlot(max(served_bytes, largest.num_bytes if largest else 0), config, device)
        return self.slot

    def write_head_later(self, reference: StoredReference, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write an LM head into a reference while windows are computed: it takes as long as dozens of them."""
        self._failures.pop((reference.manifest.identity, HEAD), None)
        self._threads.submit(self._write_head, reference, weight, bias)

    def _write_head(self, reference: StoredReference, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        try:
            reference.write_head(_copy_beside(weight), None if bias is None else _copy_beside(bias))
        except Exception as error:
            logger.warning("Reference %s: the LM head was not written: %s", reference.name, error)
            self._failures[reference.manifest.identity, HEAD] = str(error)

    def failure(self, identity: str, index: int) -> str | None:
        """Why a window, or with `HEAD` the LM head, was not written, if it was not; told once."""
        return self._failures.pop((identity, index), None)

    def open(self, mark: WindowMark) -> StoredReference:
        """The reference that a mark names.

        Raises:
            NoReferenceError: it is gone, or another has its name now.
            BrokenFileError: it cannot be read.
        """
        if mark.identity not in self._references:
            self._references[mark.identity] = self._open(mark)
        return self._references[mark.identity]

    def _open(self, mark: WindowMark) -> StoredReference:
        reference = self.root.open(mark.reference)
        if reference.manifest.identity != mark.identity:
            raise NoReferenceError(f"another reference has the name {mark.reference!r} now")
        return reference

    def _read(self, mark: WindowMark, pinned: bool) -> torch.Tensor | None:
        try:
            reference = self.open(mark)
            hidden_states, _ = reference.read_shard(mark.index)
            head = reference.manifest.head
            if head is None or hidden_states.shape != (mark.num_scored, head.hidden_size):
                raise BrokenFileError(f"window {mark.index} has hidden states {tuple(hidden_states.shape)}")
            return hidden_states.pin_memory() if pinned else hidden_states
        except Exception as error:
            # Who asked finds the reason out for itself; no failure may end the engine.
            logger.warning("Reference %s: %s", mark.reference, error)
            return None

    def _head(self, mark: WindowMark, local: bool) -> ReferenceHead | None:
        assert self.slot is not None
        try:
            return self.slot.load(self.open(mark), local=local)
        except Exception as error:
            logger.warning("Reference %s: %s", mark.reference, error)
            return None

    def _write_later(self, window: RecordedWindow) -> None:
        self._failures.pop((window.mark.identity, window.mark.index), None)
        self._unwritten.acquire()
        self._threads.submit(self._write, window)

    def _write(self, window: RecordedWindow) -> None:
        mark = window.mark
        try:
            if window.copied is not None:
                window.copied.synchronize()
            logprobs = torch.cat(window.logprobs)
            # Who asked sees NaN too, and fails.
            if not logprobs.isnan().any():
                # Opened anew: another reference may have its name by now.
                self._open(mark).write_shard(mark.index, torch.cat(window.hidden_states), logprobs)
        except Exception as error:
            logger.warning("Reference %s: window %d was not written: %s", mark.reference, mark.index, error)
            self._failures[mark.identity, mark.index] = str(error)
        finally:
            self._unwritten.release()
