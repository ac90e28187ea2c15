"""LM heads in an engine worker: the served model's, which is written into a reference, and the head of the reference to
compare with.

A reference's head is a layer of vLLM's own, so vLLM pads it and divides it among ranks, and rounds, scales and caps its
logits as on the server that recorded it.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.utils import set_weight_attrs

from scoremode_server.kernels.fused_logprobs import LogitsFunction
from scoremode_server.references.files.directory import StoredReference
from scoremode_server.references.files.manifest import HeadDtype, HeadFormat
from scoremode_server.threads import CallThreads
from scoremode_server.worker.lm_head import LogitsSource

GATHERED_ROWS = 8192
"""Rows of the vocabulary that ranks send each other at a time."""

PINNED_BYTES = 16 * 1024**2
"""Size of the pinned buffer that weights are copied through."""

PADDING_BYTES = 64 * 32_768 * 4
"""Memory for the padding of a head: vLLM pads the vocabulary to a multiple of 64 rows, each of at most 32,768 values of
4 bytes."""


def describe_head(source: LogitsSource, hidden_size: int, hidden_dtype: torch.dtype) -> HeadFormat:
    """Describe the served model's head. ValueError if it is quantized, or has another size or dtype than hidden
    states."""
    method = getattr(source.lm_head, "quant_method", None)
    if not isinstance(method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod):
        raise ValueError(f"its LM head is quantized ({type(method).__name__})")
    weight, processor = source.lm_head.weight, source.processor
    if weight.shape[1:] != (hidden_size,) or weight.dtype != hidden_dtype:
        raise ValueError(f"its LM head is {tuple(weight.shape)} {weight.dtype}, not (…, {hidden_size}) {hidden_dtype}")
    head_dtype = processor.head_dtype or weight.dtype
    dtypes: list[Any] = [str(dtype).removeprefix("torch.") for dtype in (weight.dtype, head_dtype)]
    if unknown := set(dtypes) - set(get_args(HeadDtype)):
        raise ValueError(f"its LM head has dtype {', '.join(unknown)}, not one of {', '.join(get_args(HeadDtype))}")
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
    """Gather a weight [vocabulary, hidden] or bias [vocabulary] from all ranks, which must all call this at the same
    time. The result of a single rank stays on its device; that of several is on the CPU."""
    if group.world_size == 1:
        return part[:vocab_size].contiguous()
    whole = torch.empty((group.world_size, *part.shape), dtype=part.dtype)
    for chunk, places in zip(part.split(GATHERED_ROWS), whole.split(GATHERED_ROWS, 1), strict=True):
        gathered = group.all_gather(chunk.contiguous(), 0)
        places.copy_(gathered.view(places.shape))
    return whole.flatten(0, 1)[:vocab_size].contiguous()


@dataclass(frozen=True, slots=True)
class ReferenceHead:
    """A reference's head, ready for use."""

    logits_fn: LogitsFunction
    """Maps [rows, hidden] to logits [rows, vocabulary], or to those of this rank's part of the vocabulary and its
    padding."""
    logit_bytes: int
    """Peak memory of `logits_fn`, in bytes per logit."""


class HeadLayer:
    """A vLLM layer for a reference's head. It is made without weights: `read` reads them to the host, and `place`
    copies them to the device. Other methods touch neither files nor the device, and may be called between steps."""

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
        # The bytes of this rank's part of weight and bias.
        self.num_bytes = sum(map(math.prod, self._shapes)) * self._dtype.itemsize

    def read(self, reference: StoredReference) -> list[torch.Tensor]:
        """Read this rank's part of weight and bias to the host. BrokenFileError if the file is not what was written."""
        tensors = [tensor for tensor in reference.read_head() if tensor is not None]
        with torch.inference_mode():
            parts = [_parameter(torch.empty(shape, dtype=self._dtype)) for shape in self._shapes]
            for part, tensor in zip(parts, tensors, strict=True):
                self._layer.weight_loader(part, tensor)
        return [part.data for part in parts]

    def place(self, weights: list[torch.Tensor], memory: torch.Tensor) -> None:
        """Copy weights that `read` returned to `memory` [num_bytes] on the device."""
        with torch.inference_mode():
            parts = memory.split([weight.nbytes for weight in weights])
            placed = [
                _parameter(copy_through_pinned(weight, part.view(weight.dtype).view(weight.shape)))
                for weight, part in zip(weights, parts, strict=True)
            ]
            self._layer.weight, self._bias = placed[0], placed[1] if self._head.has_bias else None
            self._layer.quant_method.process_weights_after_loading(self._layer)

    def ready(self, *, local: bool) -> ReferenceHead:
        """Return the head after it was placed. If `local`, it gives the logits of this rank's part of the
        vocabulary."""
        copies = 1 if self._head.soft_cap is None else 2
        logits_fn = partial(self._processor, self._layer, embedding_bias=self._bias, skip_gather=local)
        return ReferenceHead(logits_fn, copies * self._processor.head_dtype.itemsize)


def copy_through_pinned(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy a weight between the host and a GPU while the GPU computes, and wait for the copy. The copy uses pinned
    memory, because a process can launch nothing while it copies other memory: half a gigabyte delayed an engine by 0.3
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
    # vLLM's loader reads from these which dimension is the vocabulary.
    set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0})
    return parameter


class LeasedHead:
    """The LM head of the reference with the engine's lease, on the device. `num_bytes` and `PADDING_BYTES` are
    allocated at the start for this rank's part of a head. On a CPU a larger head gets more memory. On a GPU it is
    refused, because that memory could be missing in a step."""

    def __init__(self, num_bytes: int, device: torch.device, make_layer: Callable[[HeadFormat], HeadLayer]) -> None:
        self.make_layer = make_layer
        self._memory = torch.empty(num_bytes + PADDING_BYTES, dtype=torch.uint8, device=device)
        self._threads = CallThreads(most=1)
        self._key = ""
        self._layer: HeadLayer | None = None
        self._placed: Future[None] = Future()

    def place(self, key: str, layer: HeadLayer, weights: list[torch.Tensor]) -> None:
        """Begin to copy a head from the host to the device, where it replaces the current one."""
        self._key, self._layer = key, layer
        self._placed = self._threads.submit("", partial(self._place, layer, weights))

    def progress(self, key: str) -> Future[None] | None:
        """The copy of a head to the device, under way or done; None if another head was placed last."""
        return self._placed if key == self._key else None

    def find(self, key: str, *, local: bool) -> ReferenceHead | None:
        """Return a head if it is on the device, else None. See `HeadLayer.ready` for `local`."""
        if self._layer is None or key != self._key or not self._placed.done() or self._placed.exception():
            return None
        return self._layer.ready(local=local)

    def _place(self, layer: HeadLayer, weights: list[torch.Tensor]) -> None:
        if layer.num_bytes > (reserved := len(self._memory)):
            if self._memory.device.type != "cpu":
                raise ValueError(
                    f"its LM head takes {layer.num_bytes} bytes, more than the {reserved} that this server reserves: "
                    f"start it with --reference-head-bytes {layer.num_bytes}"
                )
            self._memory = torch.empty(layer.num_bytes, dtype=torch.uint8, device=self._memory.device)
        layer.place(weights, self._memory[: layer.num_bytes])
