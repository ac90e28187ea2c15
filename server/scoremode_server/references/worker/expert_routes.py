"""The routers of vLLM's mixture-of-experts layers: a step's windows record the experts that each router chooses for
every token, compare them with a reference's, or have the token computed with the reference's experts.

Only routers are supported whose weights are a score of the router's logits, normalized over the chosen experts or not,
times a constant or a constant of each expert. `_fit` finds out by random logits, so it holds for every class of router
whose weights obey.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Protocol

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from scoremode.wire.references import ReferenceRoutes
from scoremode_server.worker.request_rows import StepPart

_SCORES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    partial(torch.softmax, dim=-1),
    torch.sigmoid,
    lambda logits: nn.functional.softplus(logits).sqrt(),
)
_FIT_ROWS = 64
_BOOST = 8.0
"""Added to a logit so that its expert is chosen."""
_TOLERANCE = 1e-4
"""Largest relative difference of a router's weights from those by its rule, for float32 logits."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """How a router weights the experts that it has chosen: their scores, normalized to the sum 1 or not, times scales
    [experts]."""

    score: Callable[[torch.Tensor], torch.Tensor]
    is_normalized: bool
    scales: torch.Tensor

    def weights(self, logits: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Weights [tokens, k] float32 of experts [tokens, k], from the router's logits [tokens, experts]. Some routers
        round scores to the dtype of 16-bit logits; these are not rounded."""
        expert_ids = expert_ids.long()
        weights = self.score(logits.float()).gather(1, expert_ids)
        if self.is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scales[expert_ids]


class RoutedSink(Protocol):
    """The sink of a window whose experts are recorded or compared."""

    reference_experts: torch.Tensor | None
    """The reference's experts [fed, layers, k] on the host, by descending weight; None to record."""
    forces_routes: bool

    def store_routes(self, position: int, results: torch.Tensor) -> None:
        """Store the results of a step's tokens, the first of which is at `position`: the chosen experts [tokens,
        layers, k] by descending weight; or, compared with a reference, [tokens, layers, 2] int16: the number of experts
        that both chose, and 1 if the same one comes first."""


@dataclass(slots=True)
class _Step:
    """The tokens of one step. Kernels that every layer launches cost time, so routers only copy what they choose, and
    all layers are sorted and compared at once. Only steps with a forced window also compare in each layer."""

    weights: torch.Tensor
    """[layers, tokens, k] float32, filled in layer by layer."""
    expert_ids: torch.Tensor
    """[layers, tokens, k] uint8 or int16; likewise."""
    recorded: torch.Tensor | None = None
    """[tokens, layers, k], the reference's experts. Tokens without a reference have zeros. None if all have none."""
    is_kept: torch.Tensor | None = None
    """[tokens, 1], whether a token keeps its own experts; None if all tokens do."""
    called: set[int] = field(default_factory=set)
    """The layers whose routers were called."""

    def route(
        self, layer: int, rule: WeightRule, weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note what a router chose for the step's tokens, and return the experts to use: weights and ids [tokens or
        more, k]. A token whose set of experts is the reference's keeps its weights and their order."""
        num_tokens = self.weights.shape[1]
        own_weights, own = weights[:num_tokens], ids[:num_tokens]
        self.weights[layer] = own_weights
        self.expert_ids[layer] = own
        self.called.add(layer)
        if self.recorded is None or self.is_kept is None:
            return weights, ids
        recorded = self.recorded[:, layer]
        is_kept = self.is_kept | _is_shared(self.expert_ids[layer], recorded).all(1, keepdim=True)
        forced = rule.weights(logits[:num_tokens], recorded).to(weights.dtype)
        used = torch.where(is_kept, own_weights, forced), torch.where(is_kept, own, recorded.to(ids.dtype))
        if num_tokens == len(ids):
            return used
        return torch.cat((used[0], weights[num_tokens:])), torch.cat((used[1], ids[num_tokens:]))

    def chosen(self) -> torch.Tensor:
        """The experts [tokens, layers, k] that all routers chose, by descending weight."""
        order = self.weights.argsort(dim=2, descending=True, stable=True)
        return self.expert_ids.gather(2, order).transpose(0, 1).contiguous()

    def agreement(self, chosen: torch.Tensor) -> torch.Tensor:
        """How the chosen experts agree with the recorded ones: see `RoutedSink.store_routes`."""
        assert self.recorded is not None
        shared = _is_shared(chosen, self.recorded).sum(2)
        return torch.stack((shared, chosen[..., 0] == self.recorded[..., 0]), 2).short()


def _is_shared(own: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """Whether each of a token's own experts [..., k] is among the recorded ones [..., k]."""
    return (own[..., None] == recorded[..., None, :]).any(-1)


@dataclass(slots=True)
class ExpertLayers:
    """The mixture-of-experts layers of a model that vLLM runs."""

    model: nn.Module
    described: ReferenceRoutes | str = field(init=False)
    """The layers, or why their experts cannot be recorded."""
    # A model's first weights may be on the host.
    device: torch.device = field(default_factory=lambda: torch.device(current_platform.device_type))
    _routers: list[BaseRouter] = field(default_factory=list)
    _rules: list[WeightRule] = field(default_factory=list)

    def __post_init__(self) -> None:
        named = {name: module for name, module in self.model.named_modules() if isinstance(module, MoERunner)}
        configs = [runner.moe_config for runner in named.values()]
        sizes = {(config.num_logical_experts, config.experts_per_token) for config in configs}
        if len(sizes) != 1:
            reason = "its layers have different numbers of experts, or choose different numbers of them"
            none = "it has no mixture-of-experts layers that vLLM's common routing computes"
            self.described = f"{type(self.model).__name__}: {reason if sizes else none}"
            return
        ((num_experts, top_k),) = sizes
        self.described = ReferenceRoutes(layers=list(named), num_experts=num_experts, top_k=top_k)
        for name, runner in named.items():
            rule = _fit(runner, num_experts, top_k, self.device)
            if isinstance(rule, str):
                self.described = f"{name}: {rule}"
                return
            self._routers.append(runner.router)
            self._rules.append(rule)

    @contextmanager
    def hooking(self, requests: Sequence[tuple[RoutedSink, StepPart]]) -> Iterator[None]:
        """Record, compare or force the experts of a step's windows in a forward pass that runs inside."""
        assert not isinstance(self.described, str)
        rows = [slice(part.row, part.row + min(part.num_tokens, part.num_fed - part.position)) for _, part in requests]
        step = self._begin(requests, rows, self.described)
        for layer, (router, rule) in enumerate(zip(self._routers, self._rules, strict=True)):
            router._compute_routing = partial(_routed, step, layer, rule, router._compute_routing)
        try:
            yield
        finally:
            for router in self._routers:
                # The method of the class shows again.
                del router._compute_routing
        # Models that read images and text may have routers that some steps do not call.
        if len(step.called) < len(self._routers):
            return
        chosen = step.chosen()
        agreement = None if step.recorded is None else step.agreement(chosen)
        for (sink, part), own in zip(requests, rows, strict=True):
            results = chosen if sink.reference_experts is None else agreement
            assert results is not None
            sink.store_routes(part.position, results[own])

    def _begin(
        self, requests: Sequence[tuple[RoutedSink, StepPart]], rows: Sequence[slice], described: ReferenceRoutes
    ) -> _Step:
        num_tokens, (num_layers, num_experts, top_k) = max(own.stop for own in rows), described.sizes
        weights = torch.empty((num_layers, num_tokens, top_k), device=self.device)
        ids = torch.empty_like(weights, dtype=torch.uint8 if num_experts <= 256 else torch.int16)
        step = _Step(weights, ids)
        if all(sink.reference_experts is None for sink, _ in requests):
            return step
        step.recorded = ids.new_zeros((num_tokens, num_layers, top_k))
        if any(sink.forces_routes for sink, _ in requests):
            step.is_kept = weights.new_ones((num_tokens, 1), dtype=torch.bool)
        for (sink, part), own in zip(requests, rows, strict=True):
            if (experts := sink.reference_experts) is None:
                continue
            of_rows = experts[part.position : part.position + own.stop - own.start]
            step.recorded[own] = of_rows.to(self.device, non_blocking=True)
            if step.is_kept is not None:
                step.is_kept[own] = not sink.forces_routes
        return step


def _routed(
    step: _Step,
    layer: int,
    rule: WeightRule,
    compute: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace a router's `_compute_routing`, which is `compute`, in a step."""
    weights, ids = compute(hidden_states, router_logits, indices_type, **options)
    return step.route(layer, rule, weights, ids, router_logits)


@torch.inference_mode()
def _fit(runner: MoERunner, num_experts: int, top_k: int, device: torch.device) -> WeightRule | str:
    """Find the rule by which a layer's router weights its experts, or why the layer is not supported."""
    router, name = runner.router, type(runner.router).__name__
    if runner.is_monolithic:
        method = type(runner.routed_experts.quant_method).__name__
        return f"{method} chooses experts within its kernel: another --moe-backend may not"
    if not isinstance(router, BaseRouter):
        return f"{name} does not go through vLLM's common routing"
    generator = torch.Generator().manual_seed(0)
    # Every expert is chosen at least once.
    boosted = torch.randn((num_experts, num_experts), generator=generator) + _BOOST * torch.eye(num_experts)
    logits = torch.cat((torch.randn((_FIT_ROWS, num_experts), generator=generator), boosted)).to(device)
    try:
        weights, ids = router._compute_routing(logits, logits, None, input_ids=torch.arange(len(logits), device=device))
    # Routers are of many classes, and may need what only a forward pass has.
    except Exception as error:
        return f"{name} cannot be called alone: {error}"
    if ids.shape[1] != top_k or int(ids.max()) >= num_experts:
        return f"{name} chooses more than {top_k} of {num_experts} experts"
    ids, ones = ids.long(), torch.ones(num_experts, device=device)
    for score, is_normalized in product(_SCORES, (True, False)):
        ratios = weights.float() / WeightRule(score, is_normalized, ones).weights(logits, ids)
        scales = ones * ratios.mean()
        scales[ids.flatten()] = ratios.flatten()
        if torch.allclose(scales[ids], ratios, rtol=_TOLERANCE, atol=0):
            return WeightRule(score, is_normalized, scales)
    return f"{name} weights experts in another way than by a score of their logits"
