"""LM heads in an engine worker: the served model's, which a reference keeps, and a reference's, to compare with.

A reference's head is a layer of vLLM's own, so that its logits are rounded, padded, divided among ranks, scaled and
capped as the server that recorded it did.
"""

from collections.abc import Callable
from dataclasses import dataclass
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

PADDING_BYTES = 64 * 32_768 * 4
"""Added to the size of a head: vLLM pads the vocabulary to a multiple of 64 rows. No hidden state has more entries."""


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
    """A reference's head, ready for use.

    Attributes:
        logits_fn: [rows, hidden] -> logits [rows, vocabulary], or those of this rank's part and its padding.
        logit_bytes: that a logit takes at the peak of `logits_fn`.
    """

    logits_fn: LogitsFunction
    logit_bytes: int


class HeadSlot:
    """Room for the LM head of one reference at a time, reserved while vLLM profiles.

    Attributes:
        num_bytes: of the largest head that fits, all ranks together.
    """

    def __init__(self, num_bytes: int, config: VllmConfig, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._config = config
        size = num_bytes // config.parallel_config.tensor_parallel_size + PADDING_BYTES
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._loaded: tuple[StoredReference, Callable[..., torch.Tensor]] | None = None

    def load(self, reference: StoredReference, *, local: bool) -> ReferenceHead:
        """The head of a reference, with `local` this rank's part of it. The one that was in the slot can no longer be
        used, unless it is the same.

        Raises:
            BrokenFileError: the head's file is not what was written, or the head does not fit.
        """
        if self._loaded is None or self._loaded[0].manifest.identity != reference.manifest.identity:
            self._loaded = None
            self._loaded = reference, self._load(reference)
        loaded, logits = self._loaded
        head = loaded.manifest.head
        assert head is not None
        copies = 1 if head.soft_cap is None else 2
        return ReferenceHead(
            lambda hidden_states: logits(hidden_states, skip_gather=local),
            copies * getattr(torch, head.head_dtype).itemsize,
        )

    def _load(self, reference: StoredReference) -> Callable[..., torch.Tensor]:
        head = reference.manifest.head
        if head is None:
            raise BrokenFileError(f"reference {reference.name!r} has no LM head yet")
        if head.num_bytes > self.num_bytes:
            raise BrokenFileError(f"the LM head of reference {reference.name!r} does not fit")
        weight, bias = reference.read_head()
        dtype = getattr(torch, head.weight_dtype)
        with set_current_vllm_config(self._config), torch.device("meta"):
            layer = ParallelLMHead(
                head.vocab_size, head.hidden_size, params_dtype=dtype, org_num_embeddings=head.vocab_size
            )
            processor = LogitsProcessor(head.vocab_size, scale=head.scale, soft_cap=head.soft_cap)
        processor.head_dtype = getattr(torch, head.head_dtype)
        rows = layer.num_embeddings_per_partition
        memory = self._memory[: rows * head.hidden_size * dtype.itemsize].view(dtype)
        layer.weight = _parameter(memory.view(rows, head.hidden_size))
        layer.weight_loader(layer.weight, weight)
        own_bias = None
        if bias is not None:
            own_bias = _parameter(torch.empty(rows, dtype=dtype, device=memory.device))
            layer.weight_loader(own_bias, bias)
        layer.quant_method.process_weights_after_loading(layer)

        def logits(hidden_states: torch.Tensor, *, skip_gather: bool) -> torch.Tensor:
            result: torch.Tensor = processor(layer, hidden_states, own_bias, skip_gather=skip_gather)
            return result

        return logits


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    # By these vLLM's loader knows which dimension is the vocabulary.
    set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0})
    return parameter


def _name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")
