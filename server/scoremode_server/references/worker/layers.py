"""The residual stream of a model's decoder layers: the boundaries at which it can be cut, and hooks that copy or
replace a request's rows of it there.

Most layers of vLLM take `hidden_states` and `residual`, whose sum is the stream, or `hidden_states` alone, and call a
norm with both before their MLP. Whether that holds for a model, its recording checks: see `references/layers.py`.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase

from scoremode.wire.references import BlockKind, LayerBlock, ReferenceLayers
from scoremode_server.references.worker.orders import WindowMark
from scoremode_server.worker.row_scorer import StepPart

INNER_NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "pre_mlp_layernorm", "ffn_norm")
"""Names of the norm before a layer's MLP. Some models have one of these names for another norm, of one tensor."""

_MOE = "vllm.model_executor.layers.fused_moe."


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of a step's tokens at a boundary: `hidden_states` [tokens, hidden], plus `residual`."""

    hidden_states: torch.Tensor
    residual: torch.Tensor | None

    def copy(self, rows: slice) -> torch.Tensor:
        """Copy rows: norms write in place."""
        part = self.hidden_states[rows]
        return part.clone() if self.residual is None else part + self.residual[rows]

    def replace(self, rows: slice, stream: torch.Tensor) -> None:
        """Replace rows. The sum of a 0 is exact."""
        if self.residual is None:
            self.hidden_states[rows] = stream
        else:
            self.residual[rows] = stream
            self.hidden_states[rows] = 0

    @property
    def flaw(self) -> str:
        """Why this cannot be a residual stream; empty if it can."""
        if not isinstance(self.hidden_states, torch.Tensor) or self.hidden_states.dim() != 2:
            return "it does not take hidden_states [tokens, hidden]"
        if self.residual is None:
            return ""
        if not isinstance(self.residual, torch.Tensor) or self.residual.shape != self.hidden_states.shape:
            return "its residual is not of the shape of its hidden_states"
        if self.residual.data_ptr() == self.hidden_states.data_ptr():
            return "its residual and its hidden_states are one tensor"
        return ""


class LayerSink(Protocol):
    """A request that copies its rows of the stream, or replaces them, at some boundaries."""

    mark: WindowMark

    def cross(self, boundary: int, stream: Stream, rows: slice, position: int) -> None:
        """Take or replace the rows of the request's tokens from `position` on."""


@dataclass(eq=False)
class _Watch:
    """Notes what one forward pass shows of a decoder layer."""

    calls: list[tuple[str, bool]] = field(default_factory=list)
    """Children in the order in which they were called, and whether with two tensors of the stream's shape."""
    flaws: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DecoderLayers:
    """A model's decoder layers, and where its residual stream is cut: before each layer, before the MLP of those that
    call a norm with it, and after the last layer. Nothing is known before `watching` has seen a forward pass."""

    model: nn.Module
    refusal: str = "no forward pass was seen"
    """Why the layers cannot be cut; empty if they can."""
    described: ReferenceLayers | None = None
    _layers: list[nn.Module] = field(default_factory=list)
    _norms: list[nn.Module | None] = field(default_factory=list)
    """Of each layer: that which begins its MLP."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Learn where the stream is cut from a forward pass that runs inside."""
        prefix, self._layers, self.refusal = _find_layers(self.model)
        watches = [_Watch() for _ in self._layers]
        hidden_sizes: set[int] = set()

        def see(watch: _Watch, stream: Stream) -> None:
            if flaw := stream.flaw:
                watch.flaws.append(flaw)
            else:
                hidden_sizes.add(stream.hidden_states.shape[1])

        hooks = []
        for layer, watch in zip(self._layers, watches, strict=True):
            hooks.append(_before_layer(layer, lambda stream, watch=watch: see(watch, stream)))
            for name, child in layer.named_children():
                hooks.append(child.register_forward_pre_hook(_note_call(watch, name), with_kwargs=True))
        if self._layers:
            hooks.append(_after_layer(self._layers[-1], lambda stream: see(watches[-1], stream)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if not self.refusal:
            self._conclude(prefix, watches, hidden_sizes)

    def _conclude(self, prefix: str, watches: Sequence[_Watch], hidden_sizes: set[int]) -> None:
        blocks: list[LayerBlock] = []
        for index, (layer, watch) in enumerate(zip(self._layers, watches, strict=True)):
            if watch.flaws:
                self.refusal = f"{type(layer).__name__}: {watch.flaws[0]}"
                return
            names = list(dict.fromkeys(name for name, _ in watch.calls))
            inner = next((name for name, is_inner in watch.calls if is_inner), None)
            self._norms.append(None if inner is None else layer.get_submodule(inner))
            parts = [names] if inner is None else [names[: names.index(inner)], names[names.index(inner) :]]
            blocks += [_block(layer, f"{prefix}.{index}", part) for part in parts]
        if len(hidden_sizes) != 1:
            self.refusal = f"{type(self._layers[0]).__name__}: its layers were not called, or with several hidden sizes"
            return
        self.described = ReferenceLayers(
            layer_class=", ".join(dict.fromkeys(type(layer).__name__ for layer in self._layers)),
            hidden_size=hidden_sizes.pop(),
            blocks=blocks,
        )

    @contextmanager
    def hooking(self, parts: Sequence[tuple[LayerSink, StepPart]]) -> Iterator[None]:
        """Let requests copy or replace their rows in a forward pass that runs inside."""
        crossing: dict[int, list[tuple[LayerSink, StepPart]]] = defaultdict(list)
        for sink, part in parts:
            for boundary in sink.mark.boundaries:
                crossing[boundary].append((sink, part))
        hooks = list(self._hooks(crossing))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(self, crossing: Mapping[int, list[tuple[LayerSink, StepPart]]]) -> Iterator[Any]:
        boundary = 0
        for layer, norm in zip(self._layers, self._norms, strict=False):
            if boundary in crossing:
                yield _before_layer(layer, _crossed_by(crossing[boundary], boundary))
            boundary += 1
            if norm is not None:
                if boundary in crossing:
                    yield _before_norm(norm, _crossed_by(crossing[boundary], boundary))
                boundary += 1
        if boundary in crossing:
            yield _after_layer(self._layers[-1], _crossed_by(crossing[boundary], boundary))


def _crossed_by(parts: Sequence[tuple[LayerSink, StepPart]], boundary: int) -> Any:
    def cross(stream: Stream) -> None:
        for sink, part in parts:
            # Not beyond the prompt, where there are placeholders for drafts.
            num_tokens = min(part.num_tokens, part.num_fed - part.position)
            sink.cross(boundary, stream, slice(part.row, part.row + num_tokens), part.position)

    return cross


def _before_layer(layer: nn.Module, use: Any) -> Any:
    """Call `use` with the stream that a layer is called with, by the names of its arguments."""
    signature = inspect.signature(layer.forward)

    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        named = signature.bind(*args, **options).arguments
        use(Stream(_rows(named.get("hidden_states")), _rows(named.get("residual"))))

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


def _before_norm(norm: nn.Module, use: Any) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        use(Stream(*_tensors(args, options)[:2]))

    return norm.register_forward_pre_hook(hook, with_kwargs=True)


def _after_layer(layer: nn.Module, use: Any) -> Any:
    """Call `use` with the stream that a layer returns: one tensor, or two, the second of which may be None."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        parts = output if isinstance(output, tuple | list) else (output, None)
        use(Stream(*map(_rows, parts)) if len(parts) == 2 else Stream(None, None))

    return layer.register_forward_hook(hook)


def _rows(tensor: Any) -> Any:
    """View what layers of transformers have as [1, tokens, hidden] as vLLM has it; anything else is returned."""
    is_batch = isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and len(tensor) == 1
    return tensor[0] if is_batch else tensor


def _note_call(watch: _Watch, name: str) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        tensors = _tensors(args, options)
        is_inner = name in INNER_NORMS and len(tensors) == 2 and not Stream(*tensors).flaw
        watch.calls.append((name, is_inner))

    return note


def _tensors(args: tuple[Any, ...], options: Mapping[str, Any]) -> list[torch.Tensor]:
    return [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]


def _find_layers(model: nn.Module) -> tuple[str, list[nn.Module], str]:
    """The name of a model's list of decoder layers, the layers, and why there is none."""
    lists: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and not is_inner and _has(module, AttentionLayerBase):
            lists[name] = list(module)
    if len(lists) != 1:
        return "", [], f"{type(model).__name__}: it has {len(lists)} lists of layers with attention, not one"
    ((name, layers),) = lists.items()
    return name, layers, ""


def _has(module: nn.Module, kind: type) -> bool:
    return any(isinstance(each, kind) for each in module.modules())


def _block(layer: nn.Module, prefix: str, children: Sequence[str]) -> LayerBlock:
    """Describe a part of a layer, by those of its children that have layers which can be quantized."""
    modules = {name: layer.get_submodule(name) for name in children}
    own = {name: module for name, module in modules.items() if any(map(_can_be_quantized, module.modules()))}
    return LayerBlock(modules=[f"{prefix}.{name}" for name in own], kind=_kind(list(own.values())))


def _can_be_quantized(module: nn.Module) -> bool:
    # Not by its weight, which kernels of a CPU replace.
    return getattr(module, "quant_method", None) is not None


def _kind(modules: Sequence[nn.Module]) -> BlockKind:
    parts = [part for module in modules for part in module.modules()]
    mixers: dict[str, BlockKind] = {
        type(part).__name__: _mixer_kind(part) for part in parts if isinstance(part, AttentionLayerBase)
    }
    has_rest = any(not _has(module, AttentionLayerBase) for module in modules)
    if mixers and has_rest:
        return "layer"
    if mixers:
        return next(iter(mixers.values()))
    return "moe" if any(type(part).__module__.startswith(_MOE) for part in parts) else "mlp"


def _mixer_kind(part: nn.Module) -> BlockKind:
    if not isinstance(part, MambaBase):
        return "attention"
    return "mamba" if "Mamba" in type(part).__name__ else "linear_attention"
