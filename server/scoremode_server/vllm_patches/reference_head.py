"""LM heads in an engine worker: the served model's, which a reference keeps, and a reference's, to compare with.

A reference's head is a layer of vLLM's own, so that its logits are rounded, padded, divided among ranks, scaled and
capped as the server that recorded it did.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.utils import set_weight_attrs

from scoremode_server.references.directory import StoredReference
from scoremode_server.references.manifest import HeadDtype, HeadFormat
from scoremode_server.references.tensor_files import BrokenFileError
from scoremode_server.vllm_patches.lm_head import LogitsFunction, LogitsSource

GATHERED_ROWS = 8192
"""Rows of the vocabulary that ranks send each other at a time."""

PINNED_BYTES = 16 * 1024**2
"""That weights are copied through."""


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
