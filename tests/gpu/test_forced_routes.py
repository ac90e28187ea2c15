"""Families of mixtures of experts on both runners: recorded, forced with their own experts, and with others."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.gpu.conftest import AT_ONCE, ON_GPU, RUNNERS, run_module
from tests.gpu.routes import ROUTED

EACH = [(family, runner) for family in ROUTED for runner in (RUNNERS if ON_GPU else ("v1",))]
LEAST_SAME = 0.98
"""TF32 moves routers' logits by a thousandth, and the experts of random models are close to each other."""
MAY_BE_REFUSED = "gpt-oss (attention sinks)"
"""vLLM may have a kernel for it that chooses experts itself."""
LARGEST_ERROR = 0.02
"""As a share of the divergence that other experts make."""


@pytest.fixture(scope="module")
def results() -> Iterator[dict[tuple[str, str], Future[dict[str, Any]]]]:
    float32 = ("--dtype", "float32")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {each: pool.submit(run_module, "tests.gpu.routes", each[0], *float32, runner=each[1]) for each in EACH}


@pytest.mark.parametrize(("family", "runner"), EACH)
def test_a_mixture_is_forced_right_or_refused(results, family: str, runner: str):
    result = results[family, runner].result()
    assert "refused" not in result, result["log"]
    print(json.dumps({"family": family, "runner": runner, **result}))
    if "refusal" in result:
        assert family == MAY_BE_REFUSED, result
        assert "chooses experts within its kernel" in result["refusal"]
        return
    assert (result["own"], result["forced"]) == (0, 0)
    assert result["same as transformers"] >= LEAST_SAME
    assert result["error"] <= LARGEST_ERROR * result["others"]
