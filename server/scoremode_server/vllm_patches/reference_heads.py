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

from scoremode_server.kernels.fused_logprobs import LogitsFunction
from scoremode_server.references.directory import ReferenceDirectory, StoredReference
from scoremode_server.references.file_threads import FileThreads
from scoremode_server.references.manifest import HeadDtype, HeadFormat
from scoremode_server.vllm_patches.lm_head import LogitsSource
from scoremode_server.vllm_patches.row_spec import WindowMark

GATHERED_ROWS = 8192
"""Rows of the vocabulary that ranks send each other at a time."""

PINNED_BYTES = 16 * 1024**2
"""That weights are copied through."""

PADDING_BYTES = 64 * 32_768 * 4
"""Added to the memory: vLLM pads the vocabulary to a multiple of 64 rows. No hidden state has more entries."""

ALIGNMENT = 256
"""Of heads in memory, in bytes."""


def describe_head(source: LogitsSource | None, hidden_size: int, hidden_dtype: torch.dtype) -> HeadFormat:
    """The format of the served model's head. ValueError if its logits are not those of one unquantized projection,
    scaled and capped."""
    if source is None:
        raise ValueError(
            "its logits are not one projection of its hidden states that vLLM's LogitsProcessor scales and caps"
        )
    method = getattr(source.lm_head, "quant_method", None)
    if not isinstance(method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod):
        raise ValueError(f"its LM head is quantized ({type(method).__name__})")
    weight, processor = source.lm_head.weight, source.processor
    if weight.shape[1:] != (hidden_size,) or weight.dtype != hidden_dtype:
        raise ValueError(f"its LM head is {tuple(weight.shape)} {weight.dtype}, not (…, {hidden_size}) {hidden_dtype}")
    head_dtype = processor.head_dtype or weight.dtype
    dtypes: list[Any] = [str(each).removeprefix("torch.") for each in (weight.dtype, head_dtype)]
    if unknown := set(dtypes) - set(get_args(HeadDtype)):
        raise ValueError(f"its LM head is of {', '.join(unknown)}")
    return HeadFormat(
        vocab_size=processor.org_vocab_size,
        hidden_size=hidden_size,
        weight_dtype=dtypes[0],
        head_dtype=dtypes[1],
        has_bias=source.bias is not None,
        scale=float(processor.scale),
        soft_cap=None if processor.soft_cap is None else float(processor.soft_cap),
    )


def gather_weight(part: torch.Tensor, vocab_size: int, group: Any) -> torch.Tensor:
    """Weight [vocabulary, hidden] or bias [vocabulary] of all ranks. Every rank must call this at the same time. With
    one rank the result stays on its device, with several it is on the CPU."""
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
    """Bytes per logit at the peak of `logits_fn`."""


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
        with torch.inference_mode():
            parts = [_parameter(torch.empty(shape, dtype=self._dtype)) for shape in self._shapes]
            for part, tensor in zip(parts, tensors, strict=True):
                self._layer.weight_loader(part, tensor)
        self._weights = [part.data for part in parts]

    def place(self, memory: torch.Tensor) -> None:
        """Copy the weights that were read to memory [num_bytes] of the device, and free those on the host."""
        with torch.inference_mode():
            parts = memory.split([weight.nbytes for weight in self._weights])
            placed = [
                _parameter(copy_through_pinned(weight, part.view(weight.dtype).view(weight.shape)))
                for weight, part in zip(self._weights, parts, strict=True)
            ]
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
    if not source.is_cuda and not target.is_cuda:
        return target.copy_(source)
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


@dataclass(slots=True)
class _Head:
    layer: HeadLayer
    read: Future[None]
    """To the host."""
    holders: set[str] = field(default_factory=set)
    start: int = 0
    """In the memory; and the end, both 0 until it is placed."""
    end: int = 0
    placed: Future[None] | None = None


class HeadMemory:
    """Heads by key. A head is first read to the host by `threads`, and then placed on the device as soon as there is
    memory for it, of which this rank has `num_bytes`. It stays while anyone holds it, and if it was placed, until
    another head needs the memory. All ranks decide the same, by the order of calls, and never by what a file or a
    thread has done meanwhile."""

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        make_layer: Callable[[HeadFormat], HeadLayer],
        root: ReferenceDirectory,
        threads: FileThreads,
    ) -> None:
        self._memory = torch.empty(num_bytes + PADDING_BYTES, dtype=torch.uint8, device=device)
        self._make_layer = make_layer
        self._root = root
        self._threads = threads
        # One thread, which copies heads to the same memory in the order in which they got it.
        self._placing = FileThreads(1)
        self._heads: OrderedDict[str, _Head] = OrderedDict()
        """The one that was held last is the last."""
        self._waiting: list[str] = []
        """Keys of heads that wait for memory, in order."""

    def hold(self, mark: WindowMark, holder: str, head: HeadFormat) -> None:
        """Keep the head of a window's reference, and begin to read it to the host, unless it is here."""
        if mark.head not in self._heads:
            layer = self._make_layer(head)

            def read() -> None:
                layer.read(self._root.open_same(mark.reference, mark.identity))

            self._heads[mark.head] = _Head(layer, self._threads.submit(mark.reference, read))
        self._heads[mark.head].holders.add(holder)
        self._heads.move_to_end(mark.head)

    def place(self, key: str) -> None:
        """Place a head that is held, and was read on every rank, once there is memory for it."""
        if self._heads[key].placed is None and key not in self._waiting:
            self._waiting.append(key)
            self._place_waiting()

    def release(self, key: str, holder: str, *, is_usable: bool) -> None:
        """Hold a head no longer. It is dropped if it was not placed, or is not usable."""
        if (head := self._heads.get(key)) is None:
            return
        head.holders.discard(holder)
        if not head.holders and (head.placed is None or not is_usable):
            del self._heads[key]
            head.read.cancel()
            self._waiting = [other for other in self._waiting if other != key]
        self._place_waiting()

    @property
    def is_contended(self) -> bool:
        """Whether a head waits for memory."""
        return bool(self._waiting)

    def progress(self, key: str) -> Future[None] | None:
        """Of reading a head, or of placing it once that was ordered; None while it waits for memory."""
        head = self._heads.get(key)
        return None if head is None or key in self._waiting else head.placed or head.read

    def find(self, key: str, *, local: bool) -> ReferenceHead | None:
        """A head that is placed; with `local` this rank's part of it."""
        head = self._heads.get(key)
        if head is None or head.placed is None or not head.placed.done() or head.placed.exception():
            return None
        return head.layer.ready(local=local)

    def _place_waiting(self) -> None:
        while self._waiting and (start := self._make_space(self._heads[self._waiting[0]].layer.num_bytes)) is not None:
            head = self._heads[self._waiting.pop(0)]
            end = start + head.layer.num_bytes
            head.start, head.end = start, -(-end // ALIGNMENT) * ALIGNMENT
            head.placed = self._placing.submit("", partial(head.layer.place, self._memory[start:end]))

    def _make_space(self, size: int) -> int | None:
        """Where so many bytes are free, after heads without a holder were evicted; None if nowhere."""
        while True:
            taken = sorted((head.start, head.end) for head in self._heads.values() if head.placed)
            for (_, end), (start, _) in pairwise([(0, 0), *taken, (len(self._memory), 0)]):
                if start - end >= size:
                    return end
            unused = next((key for key, head in self._heads.items() if head.placed and not head.holders), None)
            if unused is None:
                return None
            del self._heads[unused]
