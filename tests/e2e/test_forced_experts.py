"""The experts of a mixture: recorded, compared and forced, next to transformers in float64."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from scoremode import APIStatusError, BadRequestError, ScoreClient
from scoremode.cli.main import main
from scoremode.results import KldResult
from scoremode_server.references.files.directory import ReferenceDirectory
from tests import oracle

CONTEXT, NUM_WINDOWS, LAYERS, TOP_K = 100, 20, 3, 2
TEXT = np.random.default_rng(5).integers(3, 1024, NUM_WINDOWS * CONTEXT + 1).tolist()
WINDOWS = [TEXT[index * CONTEXT :][:CONTEXT] for index in range(NUM_WINDOWS)]
TIE = 1e-4
"""Router logits that differ by less may change places by rounding."""


def original(path: Path) -> PreTrainedModel:
    # Grouped kernels compute in float32 alone.
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()


@dataclass
class Pass:
    """A forward pass of transformers over one window."""

    logits: torch.Tensor
    chosen: torch.Tensor
    """[fed, layers, k]"""


def run(model: PreTrainedModel, window: list[int], forced: torch.Tensor | None = None) -> Pass:
    with oracle.choosing_experts(model, forced) as chosen:
        logits = oracle.logits(model, window)
    return Pass(logits, torch.stack(chosen, 1))


@pytest.fixture(scope="module")
def recorded(mixtral_server, mixtral_model) -> list[Pass]:
    """Record the reference `experts`; transformers' pass over each of its windows."""
    with ScoreClient(mixtral_server, timeout=300) as client:
        reference = client.record_reference("experts", TEXT, method="disjoint", context_length=CONTEXT, routes=True)
    assert reference.routes is not None
    names = [f"model.layers.{layer}.block_sparse_moe.experts" for layer in range(LAYERS)]
    assert (reference.num_windows, reference.routes.layers, reference.routes.sizes) == (NUM_WINDOWS, names, (3, 8, 2))
    model = original(mixtral_model)
    return [run(model, window) for window in WINDOWS]


def test_recorded_experts_are_those_of_transformers(recorded, servers):
    reference = ReferenceDirectory(servers.references("experts")).open("experts")
    for index, exact in enumerate(recorded):
        assert torch.equal(reference.read_experts(index).long(), exact.chosen)


def test_a_model_has_its_own_routes_and_forcing_them_changes_no_bit(recorded, mixtral_server):
    with ScoreClient(mixtral_server, timeout=300) as client:
        plain, own, forced = (client.kld("experts", routes=routes) for routes in (None, "own", "forced"))
        in_decode_lane = client.kld("experts", routes="forced", lane="decode")
    for first, *others, in_lane in zip(plain.data, own.data, forced.data, in_decode_lane.data, strict=True):
        assert all(other.positions.kld.tobytes() == first.positions.kld.tobytes() for other in others)
        # A lane's last steps may have so few rows that other kernels multiply them.
        assert np.allclose(in_lane.positions.kld, first.positions.kld, rtol=0, atol=1e-11)
        for other in (*others, in_lane):
            assert other.routes.same_set == other.routes.same_first == [CONTEXT - 1] * LAYERS
            assert other.routes.shared == [TOP_K * (CONTEXT - 1)] * LAYERS
            assert not other.routes.differing_layers.any()


def assert_close_to(result: KldResult, recorded: list[Pass], passes: list[Pass]) -> None:
    """Divergences and counts of all windows."""
    for window, base, other in zip(result.data, recorded, passes, strict=True):
        exact = oracle.divergence(base.logits, other.logits, WINDOWS[window.index])
        np.testing.assert_allclose(window.positions.kld, exact.kld, rtol=1e-3, atol=2e-5)
        shared = (base.chosen[..., None] == other.chosen[..., None, :]).any(-1).sum(-1)
        assert window.routes.shared == shared.sum(0).tolist()
        assert window.routes.same_set == (shared == TOP_K).sum(0).tolist()
        assert window.routes.same_first == (base.chosen[..., 0] == other.chosen[..., 0]).sum(0).tolist()
        assert window.routes.differing_layers.tolist() == (shared < TOP_K).sum(1).tolist()


def test_a_rounded_routers_own_and_forced_routes(recorded, rounded_router_server, rounded_router_model):
    """Layer 0 comes before the rounded router. In the forced pass only layer 1 chooses otherwise often."""
    model = original(rounded_router_model)
    free = [run(model, window) for window in WINDOWS]
    forced = [run(model, window, base.chosen) for window, base in zip(WINDOWS, recorded, strict=True)]
    with ScoreClient(rounded_router_server, timeout=300) as client:
        own_result, forced_result = (client.kld("experts", routes=routes) for routes in ("own", "forced"))
    assert_close_to(own_result, recorded, free)
    assert_close_to(forced_result, recorded, forced)
    own_same, forced_same = (
        np.sum([window.routes.same_set for window in result.data], 0) / (NUM_WINDOWS * (CONTEXT - 1))
        for result in (own_result, forced_result)
    )
    assert own_same[0] == forced_same[0] == 1
    assert own_same[1] == forced_same[1] < 0.9
    assert own_same[2] < forced_same[2]


def test_the_command_splits_the_divergence_and_names_the_router(recorded, rounded_router_server, tmp_path, capsys):
    """Its parts are those of the figures over HTTP."""
    command = ["kld", "--url", rounded_router_server, "--reference", "experts", "--routes", "--quiet"]
    assert main([*command, "--output", str(tmp_path / "run.json")]) == 0
    assert "The router of model.layers.1.block_sparse_moe.experts stands out" in capsys.readouterr().out
    routes = json.loads((tmp_path / "run.json").read_text())["routes"]
    with ScoreClient(rounded_router_server, timeout=300) as client:
        own, forced = (client.kld("experts", routes=routes).statistics["kld"]["mean"] for routes in ("own", "forced"))
    assert (routes["own"]["mean"], routes["forced"]["mean"]) == pytest.approx((own, forced), rel=1e-6)
    assert routes["rerouting"]["mean"] == pytest.approx(own - forced, rel=1e-6)


def test_any_experts_can_be_forced(recorded, mixtral_server, mixtral_model, servers):
    """A token takes two experts at random in each layer, or its own."""
    generator = torch.Generator().manual_seed(7)
    directory = ReferenceDirectory(servers.references("experts"))
    with ScoreClient(mixtral_server, timeout=300) as client:
        client.record_reference("planted", TEXT, method="disjoint", context_length=CONTEXT, routes=True)
        reference, planted = directory.open("planted"), []
        for index in range(NUM_WINDOWS):
            own = reference.read_experts(index)
            other = torch.rand((*own.shape[:2], 8), generator=generator).argsort(-1)[..., :TOP_K].to(own.dtype)
            planted.append(torch.where(torch.rand((*own.shape[:2], 1), generator=generator) < 0.5, own, other))
            reference.write_experts(index, planted[-1].contiguous())
        result = client.kld("planted", routes="forced")
        client.delete_reference("planted")
    model = original(mixtral_model)
    for window, base, experts in zip(result.data, recorded, planted, strict=True):
        forced = run(model, WINDOWS[window.index], experts)
        exact = oracle.divergence(base.logits, forced.logits, WINDOWS[window.index])
        np.testing.assert_allclose(window.positions.kld, exact.kld, rtol=1e-3, atol=2e-5)


def test_what_cannot_be_compared_is_refused(recorded, client, mixtral_server, disturbed_server):
    with pytest.raises(BadRequestError, match=r"routes: this model's .*LlamaForCausalLM: it has no mixture-of-experts"):
        client.record_reference("dense", TEXT, method="disjoint", context_length=CONTEXT, routes=True)
    client.record_reference("dense", TEXT, method="disjoint", context_length=CONTEXT)
    with ScoreClient(disturbed_server) as other, pytest.raises(BadRequestError, match=r"routes: .* without routes"):
        other.kld("dense", routes="own")
    client.delete_reference("dense")
    with ScoreClient(mixtral_server) as other:
        with pytest.raises(BadRequestError, match="routes: a noise floor needs the model's own routes"):
            other.kld("experts", routes="forced", as_noise_floor=True)
        with pytest.raises(APIStatusError, match="recorded with routes") as refused:
            other.record_reference("experts", TEXT, method="disjoint", context_length=CONTEXT)
        assert refused.value.param == "routes"
