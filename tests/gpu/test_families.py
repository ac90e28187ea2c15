"""Families of models on the GPU's own kernels, compared with transformers. Prints the rows of docs/benchmarks.md."""

from concurrent.futures import Future
from typing import Any

import pytest

from tests.gpu.conftest import Combination, every_combination

# All start before the first test waits for one of them.
pytestmark = pytest.mark.usefixtures("families", "servers")

ROUNDING = 1.5
"""How much farther from float32 than transformers in bfloat16 vLLM may be: it rounds in other places."""
FLOAT32 = 1e-4
"""Nats, for the mean, where both compute in float32."""


@pytest.mark.parametrize("combination", every_combination(), ids=str)
def test_a_family_is_as_near_float32_as_transformers(
    families: dict[Combination, Future[dict[str, Any]]], combination: Combination
):
    result = families[combination].result()
    if "refused" in result:
        print(f"| {combination.family} | {combination.mode} | refused: {result['refused']} |")
        # Combinations that users run must not be refused.
        assert (combination.runner, combination.graphs) != ("v2", True), result["log"]
        return
    own, together, alone = result["own"], result["together"], result["alone"]
    figures = (together["mean"], own["mean"], together["median"], own["median"], together["max"], together["bias"])
    cells = [f"{figure:.4f}" for figure in (*figures, alone["mean"])]
    print(f"| {combination.family} | {combination.mode} | {' | '.join(cells)} |")
    for ours in (together, alone):
        # A changed route through experts moves single tokens by nats, so neither the largest difference is compared.
        assert ours["mean"] <= ROUNDING * own["mean"] + FLOAT32
        assert ours["median"] <= ROUNDING * own["median"] + FLOAT32
        assert abs(ours["bias"]) <= own["mean"]
