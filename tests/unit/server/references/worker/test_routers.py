"""Routers of vLLM's mixtures of experts: the rule of their weights, and what a step's windows do with their choices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulatorRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from scoremode_server.references.worker.expert_routes import ExpertLayers
from scoremode_server.worker.request_rows import StepPart

NUM_EXPERTS, TOP_K, NUM_TOKENS = 8, 2, 6
BIAS = torch.linspace(-0.5, 0.5, NUM_EXPERTS)
SCALES = torch.linspace(0.5, 1.5, NUM_EXPERTS)
GROUPED = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}


def sigmoid_of_the_largest(hidden_states, gating_output, topk, renormalize):
    """As Llama 4 routes."""
    values, ids = gating_output.topk(topk, dim=-1)
    return values.sigmoid(), ids


def scaled_by_expert(hidden_states, gating_output, topk, renormalize):
    """As Gemma 4 routes."""
    weights, ids = gating_output.softmax(-1).topk(topk, dim=-1)
    return weights / weights.sum(-1, keepdim=True) * SCALES[ids], ids


def smallest_first(hidden_states, gating_output, topk, renormalize):
    """vLLM's routers need not order experts by weight."""
    values, ids = gating_output.topk(topk, dim=-1)
    return values.sigmoid().flip(1), ids.flip(1)


def linear_in_the_logits(hidden_states, gating_output, topk, renormalize):
    return gating_output.topk(topk, dim=-1)


class Mixture(nn.Module):
    """A model whose layers are routers; the first of `layers` routes first."""

    def __init__(self, *layers: Any, is_monolithic: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.layers = nn.ModuleList()
        for router in layers:
            # Its constructor needs a whole engine's configuration, and experts with weights.
            runner = MoERunner.__new__(MoERunner)
            nn.Module.__init__(runner)
            runner.router = router
            top_k = getattr(router, "top_k", TOP_K)
            runner.moe_config = SimpleNamespace(num_logical_experts=NUM_EXPERTS, experts_per_token=top_k)
            runner.routed_experts = SimpleNamespace(quant_method=SimpleNamespace(is_monolithic=is_monolithic))
            self.layers.append(runner)

    def forward(self, logits: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [layer.router.select_experts(logits[index], logits[index]) for index, layer in enumerate(self.layers)]


def cpu_router(**settings: Any) -> CPURouter:
    return CPURouter(top_k=TOP_K, global_num_experts=NUM_EXPERTS, **settings)


class Window:
    """A sink of one window, of which `routes` are the reference's experts."""

    def __init__(self, routes: torch.Tensor | None = None, *, forced: bool = False):
        self.reference_experts, self.forces_routes = routes, forced
        self.stored = list[tuple[int, torch.Tensor]]()

    def store_routes(self, position: int, results: torch.Tensor) -> None:
        self.stored.append((position, results))


def part(position: int, row: int, num_tokens: int, num_fed: int = 100) -> StepPart:
    return StepPart("request", position, row, num_tokens, num_fed)


def logits_of(num_layers: int, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    return torch.randn((num_layers, num_tokens, NUM_EXPERTS), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("router", "score", "is_normalized", "scale"),
    [
        (cpu_router(renormalize=True), "softmax", True, 1),
        (cpu_router(renormalize=False), "softmax", False, 1),
        (cpu_router(**GROUPED, renormalize=False, routed_scaling_factor=2.5), "softmax", False, 2.5),
        (
            cpu_router(
                **GROUPED,
                renormalize=True,
                scoring_func="sigmoid",
                routed_scaling_factor=0.5,
                e_score_correction_bias=BIAS,
            ),
            "sigmoid",
            True,
            0.5,
        ),
        (cpu_router(custom_routing_function=sigmoid_of_the_largest), "sigmoid", False, 1),
        (cpu_router(custom_routing_function=scaled_by_expert), "softmax", True, SCALES),
    ],
)
def test_forced_experts_have_the_routers_own_weights(router, score, is_normalized, scale):
    """Half of the tokens take others; a token with the same set keeps its weights and their order."""
    logits = logits_of(1)
    [(own_weights, own)] = Mixture(router)(logits)
    routes = own[:, None].clone()
    routes[::2, 0] = torch.tensor([1, 6])
    routes[1, 0] = own[1].flip(0)
    window = Window(routes.to(torch.uint8), forced=True)
    model = Mixture(router)
    with ExpertLayers(model).hooking([(window, part(0, 0, NUM_TOKENS))]):
        [(weights, ids)] = model(logits)
    kept = (own[:, :, None] == routes).any(2).all(1)
    assert 0 < kept.sum() < NUM_TOKENS
    assert torch.equal(ids[kept], own[kept])
    assert torch.equal(weights[kept], own_weights[kept])
    assert torch.equal(ids[~kept].long(), routes[~kept, 0].long())
    scores = {"softmax": logits[0].softmax(-1), "sigmoid": logits[0].sigmoid()}[score][~kept].gather(
        1, ids[~kept].long()
    )
    expected = scores / scores.sum(1, keepdim=True) if is_normalized else scores
    expected = expected * (scale[ids[~kept].long()] if isinstance(scale, torch.Tensor) else scale)
    torch.testing.assert_close(weights[~kept], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Mixture(), "Mixture: it has no mixture-of-experts layers"),
        (
            Mixture(cpu_router(), CPURouter(1, NUM_EXPERTS)),
            "Mixture: its layers have different numbers of experts, or",
        ),
        (Mixture(cpu_router(), is_monolithic=True), "layers.0: SimpleNamespace chooses experts within its kernel"),
        (Mixture(SimpleNamespace()), "layers.0: SimpleNamespace does not go through vLLM's common routing"),
        (
            Mixture(cpu_router(), cpu_router(custom_routing_function=linear_in_the_logits)),
            "layers.1: CPURouter weights experts in another way than by a score of their logits",
        ),
        (
            Mixture(RoutingSimulatorRouter(TOP_K, NUM_EXPERTS)),
            "layers.0: RoutingSimulatorRouter cannot be called alone",
        ),
    ],
)
def test_other_layers_are_refused_by_name(model, reason):
    described = ExpertLayers(model).described
    assert str(described).startswith(reason)


def test_windows_of_a_step_are_recorded_compared_and_forced_apart():
    """Three windows, one of which begins at position 40, with a token of another request before each, and padding."""
    logits, routers = logits_of(2, 14), [cpu_router(custom_routing_function=smallest_first) for _ in range(2)]
    plain = Mixture(*routers)(logits)
    routes = torch.zeros((44, 2, TOP_K), dtype=torch.uint8)
    routes[40:] = torch.stack([ids[5:9].flip(1) for _, ids in plain], 1)
    routes[41, 0] = routes[41, 0].flip(0)
    routes[42, 1, 1] = next(iter({*range(NUM_EXPERTS)} - {*routes[42, 1].tolist()}))
    other = torch.tensor([0, 7], dtype=torch.uint8).expand(3, 2, TOP_K)
    recorded, compared, forced = Window(), Window(routes), Window(other, forced=True)
    model = Mixture(*routers)
    windows = [(recorded, part(0, 1, 3)), (compared, part(40, 5, 4)), (forced, part(0, 10, 5, num_fed=3))]
    with ExpertLayers(model).hooking(windows):
        found = model(logits)
    assert all(torch.equal(ids[:10], own[:10]) for (_, ids), (_, own) in zip(found, plain, strict=True))
    assert all(torch.equal(ids[13], own[13]) for (_, ids), (_, own) in zip(found, plain, strict=True))
    assert all({*row} == {0, 7} for _, ids in found for row in map(tuple, ids[10:13].tolist()))
    [(start, chosen)], [(position, agreement)], [(_, by_router)] = recorded.stored, compared.stored, forced.stored
    assert (start, chosen.shape, position) == (0, (3, 2, TOP_K), 40)
    for layer, (weights, ids) in enumerate(plain):
        by_weight = ids.gather(1, weights.argsort(1, descending=True))
        assert torch.equal(chosen[:, layer].int(), by_weight[1:4].int())
        shared = [len({*one} & {0, 7}) for one in ids[10:13].tolist()]
        assert by_router[:, layer, 0].tolist() == shared
    assert agreement[:, :, 0].tolist() == [[2, 2], [2, 2], [2, 1], [2, 2]]
    first_of = torch.stack([ids.gather(1, weights.argmax(1, keepdim=True))[5:9, 0] for weights, ids in plain], 1)
    assert torch.equal(agreement[:, :, 1].bool(), first_of == routes[40:, :, 0])


def test_a_step_that_does_not_call_all_routers_has_no_experts():
    """As a text's step of a model that has other experts for images."""
    model, windows = Mixture(cpu_router(), cpu_router()), [Window(), Window(torch.zeros((9, 2, TOP_K)).byte())]
    with ExpertLayers(model).hooking([(window, part(0, 3 * place, 3)) for place, window in enumerate(windows)]):
        model.layers[0].router.select_experts(logits_of(1)[0], logits_of(1)[0])
    assert [window.stored for window in windows] == [[], []]


def test_a_failed_step_leaves_the_routers_as_they_were():
    model = Mixture(cpu_router())
    with pytest.raises(RuntimeError), ExpertLayers(model).hooking([(Window(), part(0, 0, NUM_TOKENS))]):
        raise RuntimeError
    assert "_compute_routing" not in vars(model.layers[0].router)
