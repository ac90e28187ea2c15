"""Resuming from boundaries of decoder layers in an engine, next to transformers in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt

from tests import oracle
from tests.engine.conftest import LENGTH
from tests.engine.test_engine_lanes import note_steps
from tests.gpu.lanes import lane_logprobs
from tests.gpu.layers import Job, LayeredEngine

NUM_LAYERS = 2
NUM_BOUNDARIES = 2 * NUM_LAYERS + 1
TEXTS = [np.random.default_rng(31).integers(3, 1000, length).tolist() for length in (LENGTH, 33)]
"""The first takes several steps."""


@pytest.fixture(scope="module")
def layered(llm: LLM, references: Path) -> LayeredEngine:
    return LayeredEngine(llm, references)


@pytest.fixture(scope="module")
def reference(layered: LayeredEngine):
    return layered.record("base", TEXTS)


@pytest.mark.parametrize(
    ("name", "expected_cost"),
    [
        ("model.layers.0.mlp.down_proj.weight", "block 1"),
        ("model.layers.1.self_attn.o_proj.weight", "block 2"),
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "head"),
    ],
)
def test_one_disturbed_part_has_the_whole_cost(
    layered: LayeredEngine, random_model: Path, reference, name, expected_cost, tmp_path
):
    """And each D(k) is that of transformers. Windows that resume from all boundaries, and such as do not, share
    steps."""
    base = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float64).eval()
    other = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float64).eval()
    weight = other.get_parameter(name)
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(37)) * 0.2 * weight.data.std()
    changed = weight.data.float() + noise
    weight.data.copy_(changed)
    torch.save(changed, tmp_path / "weight")
    layered.call(plant, name, str(tmp_path / "weight"))
    jobs: list[Job] = [(index, boundary) for boundary in (None, *range(NUM_BOUNDARIES)) for index in range(2)]
    try:
        found = np.array([kld.mean(dtype="f8") for kld in layered.kld(reference, jobs)]).reshape(-1, 2)
    finally:
        layered.call(lambda worker: worker.restore())
    resumed = [oracle.resumed_divergences(base, other, text).mean(1) for text in TEXTS]
    whole = [
        oracle.divergence(oracle.logits(base, text), oracle.logits(other, text), text).kld.mean() for text in TEXTS
    ]
    exact = np.array([whole, *np.transpose(resumed)])
    assert np.allclose(found, exact, rtol=1e-4, atol=0)
    parts = ["embeddings", *(f"block {index}" for index in range(2 * NUM_LAYERS)), "head"]
    costs = [*-np.diff(found, axis=0), found[-1]]
    assert [part for part, cost in zip(parts, costs, strict=True) if cost.any()] == [expected_cost]


def plant(worker, name: str, file: str) -> None:
    """Give a weight in a file to a layer of the model in a worker."""
    layer, planted = worker.model_runner.model.get_submodule(name.removesuffix(".weight")), torch.load(file)
    if "embed" in name:
        before = layer.weight.data
        worker.restore = lambda: setattr(layer.weight, "data", before)
        layer.weight.data = planted
    else:
        # On a CPU its weight is in a kernel.
        before = layer.cpu_linear
        worker.restore = lambda: setattr(layer, "cpu_linear", before)
        layer.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, planted, bias)


def test_scores_and_answers_of_a_resumed_text_are_those_from_before(layered: LayeredEngine, reference):
    """The prefix cache is on, but keys and values of a replaced stream are neither stored nor read."""

    def scored() -> tuple[np.ndarray, list[int]]:
        (answer,) = layered.engine.generate(TokensPrompt(prompt_token_ids=TEXTS[1]), greedy, use_tqdm=False)
        return lane_logprobs(layered.engine, TEXTS[:1], 0)[0], list(answer.outputs[0].token_ids)

    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    logprobs, answer = scored()
    layered.kld(reference, [(index, boundary) for index in range(2) for boundary in range(NUM_BOUNDARIES)], shift=1)
    again, same_answer = scored()
    assert np.array_equal(again, logprobs)
    assert same_answer == answer


def test_a_resumed_window_shares_steps_with_plain_scores(layered: LayeredEngine, random_model: Path, reference):
    """The rows of the plain one are its own; the resumed one, fed other tokens, is the recorded text all the same."""
    layered.call(note_steps)
    *resumed, logprobs = layered.kld(reference, [(0, 3), (0, None), (0, 3)], shift=1, plain=TEXTS[:1])
    steps = layered.call(lambda worker: worker.steps)
    # The last two, of which none ends with a step.
    assert any(len(step) > 1 for step in steps[-6:])
    assert (resumed[0].max(), resumed[2].max()) == (0, 0)
    assert resumed[1].mean() > 0.1
    oracle.assert_close(logprobs, oracle.logprobs(random_model, TEXTS[:1])[0])
