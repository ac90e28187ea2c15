"""Families of mixtures of experts on both runners: recorded, forced with their own experts, and with others."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.gpu.conftest import AT_ONCE, ON_GPU, RUNNERS, run_module
from tests.gpu.routes import ROUTED

EACH = [(family, runner) for family in ROUTED for runner in (RUNNERS if ON_GPU else ("v1",))]
IN_16_BITS = ("Qwen3-Next (linear attention)", "DeepSeek-V2 (MLA, groups)")
"""vLLM has no float32 kernels for them on a GPU."""
LEAST_SAME = {"float32": 0.98, "bfloat16": 0.9}
"""TF32 moves routers' logits by a thousandth, bfloat16 by a hundredth, and experts of random models are close to each
other."""
MAY_BE_REFUSED = "gpt-oss (attention sinks)"
"""vLLM may have a kernel for it that chooses experts itself."""
LARGEST_ERROR = {"float32": 0.02, "bfloat16": 0.1}
"""As a share of the divergence that other experts make."""


@pytest.fixture(scope="module")
def results() -> Iterator[dict[tuple[str, str], Future[dict[str, Any]]]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            (family, runner): pool.submit(
                run_module, "tests.gpu.routes", family, "--dtype", dtype_of(family), runner=runner
            )
            for family, runner in EACH
        }


def dtype_of(family: str) -> str:
    return "bfloat16" if ON_GPU and family in IN_16_BITS else "float32"


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
    assert result["same as transformers"] >= LEAST_SAME[dtype_of(family)]
    assert result["error"] <= LARGEST_ERROR[dtype_of(family)] * result["others"]
