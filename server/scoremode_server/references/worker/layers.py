"""The decoder layers of vLLM's models, and the rows of a step's requests at their boundaries."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase

from scoremode.wire.references import BlockKind
from scoremode_server.references.streams import CutLayers, Stream
from scoremode_server.worker.request_rows import StepPart

_MOE = "vllm.model_executor.layers.fused_moe."

Cross = Callable[[int, Stream, slice, int], None]
"""Copies or replaces a request's rows at a boundary. It gets the boundary, the stream, the rows, and the position of
the first row's token."""


@dataclass(slots=True)
class DecoderLayers(CutLayers):
    """The decoder layers of a model that vLLM runs."""

    stream_parts: int = 2

    def mixer(self, module: nn.Module) -> BlockKind | None:
        if not isinstance(module, AttentionLayerBase):
            return None
        if not isinstance(module, MambaBase):
            return "attention"
        return "mamba" if "Mamba" in type(module).__name__ else "linear_attention"

    def has_experts(self, module: nn.Module) -> bool:
        return type(module).__module__.startswith(_MOE)

    def can_be_quantized(self, module: nn.Module) -> bool:
        # A module's weight does not tell, because CPU kernels replace it.
        return getattr(module, "quant_method", None) is not None

    @contextmanager
    def hooking(self, requests: Iterable[tuple[Cross, Sequence[int], StepPart]]) -> Iterator[None]:
        """Let requests copy or replace their rows at some boundaries in a forward pass that runs inside."""
        crossing: dict[int, list[tuple[Cross, StepPart]]] = defaultdict(list)
        for cross, boundaries, part in requests:
            for boundary in boundaries:
                crossing[boundary].append((cross, part))
        with ExitStack() as hooks:
            for boundary, crossed_by in crossing.items():
                hooks.enter_context(self.cuts[boundary](partial(_cross, boundary, crossed_by)))
            yield


def _cross(boundary: int, requests: Sequence[tuple[Cross, StepPart]], stream: Stream) -> None:
    for cross, part in requests:
        # Rows after the prompt are placeholders for drafts.
        num_tokens = min(part.num_tokens, part.num_fed - part.position)
        cross(boundary, stream, slice(part.row, part.row + num_tokens), part.position)
