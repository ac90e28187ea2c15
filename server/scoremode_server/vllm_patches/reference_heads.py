"""LM heads in an engine worker: the served model's, which a reference keeps, and references', to compare with, in
memory for several.

A reference's head is a layer of vLLM's own, so that its logits are rounded, padded, divided among ranks, scaled and
capped as the server that recorded it did.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.utils import set_weight_attrs

from scoremode_server.references.directory import StoredReference
from scoremode_server.references.file_threads import FileThreads
from scoremode_server.references.manifest import HeadDtype, HeadFormat
from scoremode_server.references.tensor_files import BrokenFileError
from scoremode_server.vllm_patches.lm_head import LogitsFunction, LogitsSource

GATHERED_ROWS = 8192
"""Rows of the vocabulary that ranks send each other at a time."""

PINNED_BYTES = 16 * 1024**2
"""That weights are copied through."""

PADDING_BYTES = 64 * 32_768 * 4
"""Added to the memory: vLLM pads the vocabulary to a multiple of 64 rows. No hidden state has more entries."""

ALIGNMENT = 256
"""Of heads in memory, in bytes."""

FAILED = "failed: "
"""Begins the state of a head that could not be read or placed; the reason follows."""


class UnsuitableHeadError(Exception):
    """The served model's logits are not what a reference can keep; the message says why."""


def describe_head(source: LogitsSource | None, hidden_size: int, hidden_dtype: torch.dtype) -> HeadFormat:
    """The format of the served model's head.

    Raises:
        UnsuitableHeadError: its logits are not those of one unquantized projection, scaled and capped.
    """
    if source is None:
        raise UnsuitableHeadError(
            "its logits are not one projection of its hidden states that vLLM's LogitsProcessor scales and caps"
        )
    method = getattr(source.lm_head, "quant_method", None)
    if not isinstance(method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod):
        raise UnsuitableHeadError(f"this model's LM head is quantized ({type(method).__name__})")
    weight, processor = source.lm_head.weight, source.processor
    if weight.shape[1:] != (hidden_size,) or weight.dtype != hidden_dtype:
        raise UnsuitableHeadError(f"this model's LM head has the form {tuple(weight.shape)} and {weight.dtype}")
    dtypes = _name(weight.dtype), _name(processor.head_dtype or weight.dtype)
    if unknown := set(dtypes) - set(get_args(HeadDtype)):
        raise UnsuitableHeadError(f"this model's LM head is of {', '.join(unknown)}")
    return HeadFormat(
        vocab_size=processor.org_vocab_size,
        hidden_size=hidden_size,
        weight_dtype=dtypes[0],
        head_dtype=dtypes[1],
        has_bias=source.bias is not None,
        scale=float(processor.scale),
        soft_cap=None if processor.soft_cap is None else float(processor.soft_cap),
    )


def gather_head(source: LogitsSource, vocab_size: int, group: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [vocabulary, hidden] and bias of all ranks. Every rank must come here at the same time. Of one rank alone
    they are where they were, of several on the CPU."""
    weight = _gather(source.lm_head.weight.data, vocab_size, group)
    return weight, None if source.bias is None else _gather(source.bias.data, vocab_size, group)


def _gather(part: torch.Tensor, vocab_size: int, group: Any) -> torch.Tensor:
    if group.world_size == 1:
        return part[:vocab_size].contiguous()
    rows = len(part)
    whole = torch.empty((group.world_size, *part.shape), dtype=part.dtype)
    for start in range(0, rows, GATHERED_ROWS):
        chunk = part[start : start + GATHERED_ROWS].contiguous()
        gathered = group.all_gather(chunk, 0).view(group.world_size, *chunk.shape)
        whole[:, start : start + len(chunk)] = gathered.cpu()
    return whole.flatten(0, 1)[:vocab_size].contiguous()


@dataclass(frozen=True, slots=True)
class ReferenceHead:
    """A reference's head, ready for use."""

    logits_fn: LogitsFunction
    """[rows, hidden] -> logits [rows, vocabulary], or those of this rank's part and its padding."""
    logit_bytes: int
    """That a logit takes at the peak of `logits_fn`."""


class HeadLayer:
    """A layer of vLLM's for a reference's head: made without weights, which are then read to the host, and copied to
    where steps find them. What touches no file and no device may be called between steps."""

    def __init__(self, head: HeadFormat, config: VllmConfig) -> None:
        self._head = head
        self._dtype = getattr(torch, head.weight_dtype)
        with set_current_vllm_config(config), torch.device("meta"):
            self._layer = ParallelLMHead(
                head.vocab_size, head.hidden_size, params_dtype=self._dtype, org_num_embeddings=head.vocab_size
            )
            self._processor = LogitsProcessor(head.vocab_size, scale=head.scale, soft_cap=head.soft_cap)
        self._processor.head_dtype = getattr(torch, head.head_dtype)
        rows = self._layer.num_embeddings_per_partition
        self._shapes = [(rows, head.hidden_size), (rows,)][: 1 + head.has_bias]
        self._weights: list[torch.Tensor] = []
        # Of this rank's part.
        self.num_bytes = sum(map(math.prod, self._shapes)) * self._dtype.itemsize

    def read(self, reference: StoredReference) -> None:
        """Read this rank's part to the host. BrokenFileError if the file is not what was written."""
        tensors = [tensor for tensor in reference.read_head() if tensor is not None]
        expected = [(self._head.vocab_size, self._head.hidden_size), (self._head.vocab_size,)][: len(self._shapes)]
        if [(*tensor.shape,) for tensor in tensors] != expected or {each.dtype for each in tensors} != {self._dtype}:
            raise BrokenFileError(f"{reference.head_path} is not the LM head that the manifest tells of")
        with torch.inference_mode():
            parts = [_parameter(torch.empty(shape, dtype=self._dtype)) for shape in self._shapes]
            for part, tensor in zip(parts, tensors, strict=True):
                self._layer.weight_loader(part, tensor)
        self._weights = [part.data for part in parts]

    def place(self, memory: torch.Tensor) -> None:
        """Copy the weights that were read to memory [num_bytes] of the device, and free those on the host."""
        with torch.inference_mode():
            placed, start = [], 0
            for weight in self._weights:
                end = start + weight.numel() * weight.itemsize
                target = memory[start:end].view(weight.dtype).view(weight.shape)
                placed.append(
                    _parameter(copy_through_pinned(weight, target) if target.is_cuda else target.copy_(weight))
                )
                start = end
            self._weights = []
            self._layer.weight, self._bias = placed[0], placed[1] if self._head.has_bias else None
            self._layer.quant_method.process_weights_after_loading(self._layer)

    def ready(self, *, local: bool) -> ReferenceHead:
        """The head, once it was placed; with `local` this rank's part of it."""
        copies = 1 if self._head.soft_cap is None else 2
        logits_fn = partial(self._processor, self._layer, embedding_bias=self._bias, skip_gather=local)
        return ReferenceHead(logits_fn, copies * self._processor.head_dtype.itemsize)


def copy_through_pinned(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy a weight between the host and a GPU next to what the GPU computes; it is there when this returns. While
    memory that is not pinned is copied, the process can launch nothing: half a gigabyte kept an engine waiting for 0.3
    seconds."""
    rows = max(1, PINNED_BYTES // (source[:1].numel() * source.itemsize))
    pinned = torch.empty((rows, *source.shape[1:]), dtype=source.dtype, pin_memory=True)
    stream = torch.cuda.Stream(target.device if target.is_cuda else source.device)
    with torch.cuda.stream(stream):
        for part, place in zip(source.split(rows), target.split(rows), strict=True):
            pinned[: len(part)].copy_(part, non_blocking=True)
            stream.synchronize()
            place.copy_(pinned[: len(part)], non_blocking=True)
            stream.synchronize()
    return target


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    # By these vLLM's loader knows which dimension is the vocabulary.
    set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0})
    return parameter


def _name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class _PlacedHead:
    start: int
    end: int
    layer: HeadLayer
    ready: Future[None]
    holders: set[str] = field(default_factory=set)


class HeadMemory:
    """Heads by key. A head is first read to the host by `threads`, then held, and placed on the device as soon as there
    is memory for it, of which this rank has `num_bytes`. After its holder releases it, it stays until another head
    needs the memory.

    Ranks of a tensor-parallel group decide the same, because they decide by the order of calls, which come to all of
    them, and never by what a file or a thread has done meanwhile.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        make_layer: Callable[[HeadFormat], HeadLayer],
        threads: FileThreads,
    ) -> None:
        self._memory = torch.empty(num_bytes + PADDING_BYTES, dtype=torch.uint8, device=device)
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
