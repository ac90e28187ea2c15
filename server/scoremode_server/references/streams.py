"""The residual stream of a model's decoder layers: the boundaries at which it can be cut, and hooks that copy or
replace rows of it there. `worker/layers.py` cuts vLLM's models, `from_transformers.py` all others.

Most of vLLM's decoder layers take `hidden_states` and `residual`, whose sum is the stream, and call a norm with both
before their MLP. Others take the stream as `hidden_states` alone. Recording checks whether a model does so.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from scoremode.wire.references import BlockKind, LayerBlock, ReferenceLayers

INNER_NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "pre_mlp_layernorm", "ffn_norm")
"""Names of the norm before a layer's MLP. Some models use one of these names for another norm, which takes one
tensor."""

_MIXERS: dict[str, BlockKind] = {
    "Mamba": "mamba",
    **dict.fromkeys(("LinearAttention", "DeltaNet", "RecurrentBlock", "ShortConv"), "linear_attention"),
    "Attention": "attention",
}
"""The kind of a mixer by a part of its class's name."""

Calls = list[tuple[str, bool]]
"""Names of a layer's children in call order, each with whether it is a norm before the MLP that gets both parts of the
stream."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of a step's tokens at a boundary: `hidden_states` [tokens, hidden], plus `residual`."""

    hidden_states: torch.Tensor
    residual: torch.Tensor | None

    def copy(self, rows: slice) -> torch.Tensor:
        """Copy rows, because norms write in place."""
        part = self.hidden_states[rows]
        return part.clone() if self.residual is None else part + self.residual[rows]

    def replace(self, rows: slice, stream: torch.Tensor) -> None:
        """Replace rows. If the stream has two parts, `hidden_states` becomes 0, so that their sum is exact."""
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
            return "its residual has another shape than its hidden_states"
        if self.residual.data_ptr() == self.hidden_states.data_ptr():
            return "its residual and its hidden_states are one tensor"
        return ""


UseStream = Callable[[Stream], None]

Cut = Callable[[UseStream], RemovableHandle]
"""Hooks a callback that gets the stream at a boundary."""


@dataclass(slots=True)
class CutLayers:
    """A model's decoder layers, and where its residual stream is cut: before each layer, before the MLP of each layer
    that calls a norm with the parts of the stream, and after the last layer. `watching` finds them in a forward
    pass. It tells modules apart by the names of their classes in the transformers library."""

    model: nn.Module
    described: ReferenceLayers | str = "no forward pass was seen"
    """The layers, or why they cannot be cut."""
    cuts: list[Cut] = field(default_factory=list)
    """One per boundary."""

    stream_parts: int = 1
    """How many tensors a norm before the MLP gets, whose sum is the stream. 0: layers are not cut there."""

    def mixer(self, module: nn.Module) -> BlockKind | None:
        """The kind of a module that mixes tokens; None for other modules."""
        return next((kind for part, kind in _MIXERS.items() if part in type(module).__name__), None)

    def has_experts(self, module: nn.Module) -> bool:
        """Whether a module is a mixture of experts."""
        return any(part in type(module).__name__ for part in ("MoE", "Moe", "Experts"))

    def can_be_quantized(self, module: nn.Module) -> bool:
        return any(weight.dim() > 1 for weight in module.parameters(recurse=False))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Find where the stream is cut in a forward pass that runs inside."""
        lists = self._lists()
        if len(lists) != 1:
            self.described = f"{type(self.model).__name__}: it has {len(lists)} lists of layers with attention, not one"
            yield
            return
        ((prefix, layers),) = lists.items()
        flaws: list[str] = []
        hidden_sizes: set[int] = set()
        calls: list[Calls] = [[] for _ in layers]

        def see(layer: nn.Module, stream: Stream) -> None:
            if flaw := stream.flaw:
                flaws.append(f"{type(layer).__name__}: {flaw}")
            else:
                hidden_sizes.add(stream.hidden_states.shape[1])

        with ExitStack() as hooks:
            for layer, own_calls in zip(layers, calls, strict=True):
                hooks.enter_context(_before_layer(layer, partial(see, layer)))
                for name, child in layer.named_children():
                    hooks.enter_context(
                        child.register_forward_pre_hook(partial(self._note_call, own_calls, name), with_kwargs=True)
                    )
            hooks.enter_context(_after_layer(layers[-1], partial(see, layers[-1])))
            yield
        if not flaws and len(hidden_sizes) != 1:
            flaws.append(f"{type(layers[0]).__name__}: its layers were not called, or with several hidden sizes")
        self.described = flaws[0] if flaws else self._cut(prefix, layers, calls, hidden_sizes.pop())

    def _cut(
        self, prefix: str, layers: Sequence[nn.Module], calls: Sequence[Calls], hidden_size: int
    ) -> ReferenceLayers:
        blocks: list[LayerBlock] = []
        for index, (layer, own_calls) in enumerate(zip(layers, calls, strict=True)):
            names = list(dict.fromkeys(name for name, _ in own_calls))
            # Without a second tensor, a norm of the mixer's output may have the name too, and is called first.
            inner = next((name for name, is_inner in reversed(own_calls) if is_inner), None)
            parts = [names] if inner is None else [names[: names.index(inner)], names[names.index(inner) :]]
            blocks += [self._block(layer, f"{prefix}.{index}", part) for part in parts]
            self.cuts.append(partial(_before_layer, layer))
            if inner is not None:
                self.cuts.append(partial(_before_norm, layer.get_submodule(inner)))
        self.cuts.append(partial(_after_layer, layers[-1]))
        layer_class = ", ".join(dict.fromkeys(type(layer).__name__ for layer in layers))
        return ReferenceLayers(layer_class=layer_class, hidden_size=hidden_size, blocks=blocks)

    def _note_call(
        self, calls: Calls, name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        tensors = _tensors(args, options)
        is_inner = name in INNER_NORMS and len(tensors) == self.stream_parts
        calls.append((name, is_inner and not _stream(tensors).flaw))

    def _lists(self) -> dict[str, list[nn.Module]]:
        """The model's lists of layers that mix tokens, by name."""
        lists: dict[str, list[nn.Module]] = {}
        for name, module in self.model.named_modules():
            is_inner = any(name.startswith(f"{outer}.") for outer in lists)
            if isinstance(module, nn.ModuleList) and not is_inner and self._mixers(module):
                lists[name] = list(module)
        return lists

    def _mixers(self, module: nn.Module) -> list[BlockKind]:
        return [kind for part in module.modules() if (kind := self.mixer(part))]

    def _block(self, layer: nn.Module, prefix: str, children: Sequence[str]) -> LayerBlock:
        """Describe a part of a layer by those of its children that have quantizable layers."""
        modules = {name: layer.get_submodule(name) for name in children}
        own = {name: module for name, module in modules.items() if any(map(self.can_be_quantized, module.modules()))}
        return LayerBlock(modules=[f"{prefix}.{name}" for name in own], kind=self._kind(list(own.values())))

    def _kind(self, modules: Sequence[nn.Module]) -> BlockKind:
        mixers = [*map(self._mixers, modules)]
        if not any(mixers):
            has_experts = any(self.has_experts(part) for module in modules for part in module.modules())
            return "moe" if has_experts else "mlp"
        return mixers[0][0] if all(mixers) else "layer"


def _before_layer(layer: nn.Module, use: UseStream) -> RemovableHandle:
    """Call `use` with the stream that a layer gets, which is found by the names of its arguments."""
    signature = inspect.signature(layer.forward)

    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        named = signature.bind(*args, **options).arguments
        use(Stream(_rows(named.get("hidden_states")), _rows(named.get("residual"))))

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


def _before_norm(norm: nn.Module, use: UseStream) -> RemovableHandle:
    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        use(_stream(_tensors(args, options)))

    return norm.register_forward_pre_hook(hook, with_kwargs=True)


def _after_layer(layer: nn.Module, use: UseStream) -> RemovableHandle:
    """Call `use` with the stream that a layer returns: one tensor, or two, the second of which may be None."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        parts = [*map(_rows, output if isinstance(output, tuple | list) else [output])]
        use(_stream(parts) if 0 < len(parts) < 3 else Stream(None, None))

    return layer.register_forward_hook(hook)


def _rows(tensor: Any) -> Any:
    """View a tensor [1, tokens, hidden], as layers of transformers use it, as vLLM's [tokens, hidden]. Anything else is
    returned unchanged."""
    is_batch = isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and len(tensor) == 1
    return tensor[0] if is_batch else tensor


def _tensors(args: tuple[Any, ...], options: Mapping[str, Any]) -> list[torch.Tensor]:
    return [_rows(value) for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]


def _stream(parts: Sequence[Any]) -> Stream:
    return Stream(parts[0], parts[1] if len(parts) > 1 else None)
