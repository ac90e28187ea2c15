"""The decode lane on the GPU's kernels: what vLLM itself says of the text that it generates, and two planted faults."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import ON_GPU, RUNNERS, run_module

GRAPHS = {"graphs": (), "eager": ("--eager",)} if ON_GPU else {"eager": ("--eager",)}
SIZES = () if ON_GPU else ("--batch", "4", "--length", "60")


@pytest.fixture(scope="module", params=[(runner, mode) for runner in RUNNERS for mode in GRAPHS], ids="-".join)
def measured(request: pytest.FixtureRequest, smollm2: Path) -> dict[str, Any]:
    runner, mode = request.param
    result = run_module("tests.gpu.lanes", str(smollm2), *GRAPHS[mode], *SIZES, runner=runner)
    assert "refused" not in result, result["log"]
    print(json.dumps(result))
    return result


def test_decode_has_the_logprobs_of_generation_which_prefill_has_not(measured: dict[str, Any]):
    ours, prefill = measured["decode to generation"], measured["prefill to generation"]
    # The same kernels on the same batches; its own rounding of a logarithm is left.
    assert ours["max"] <= 1e-4
    assert not ON_GPU or prefill["mean"] > 100 * ours["mean"]


def test_both_lanes_are_as_near_transformers(measured: dict[str, Any]):
    decode, prefill = measured["decode to transformers"], measured["prefill to transformers"]
    assert decode["mean"] <= 1.5 * prefill["mean"] + 1e-4


def test_faults_of_decode_steps_are_found_in_that_lane_alone(measured: dict[str, Any]):
    if not measured["eager"]:
        pytest.skip("faults are planted in Python, which CUDA graphs do not run")
    floor = measured["decode to prefill"]["mean"]
    for fault in ("linear", "attention"):
        assert measured[fault]["decode to prefill"]["mean"] > max(10 * floor, 0.01)
        assert measured[fault]["prefill"]["mean"] <= 0.1 * measured[fault]["decode"]["mean"]
