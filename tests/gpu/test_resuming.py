"""Families of models resumed from their own boundaries on both runners: right, or refused."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.gpu.conftest import AT_ONCE, ON_GPU, RUNNERS, run_module
from tests.gpu.family import FAMILIES
from tests.gpu.layers import ODD_FAMILIES

EACH = [(family, runner) for family in FAMILIES | ODD_FAMILIES for runner in (RUNNERS if ON_GPU else ("v1",))]
LARGEST_SHARE = 0.05
"""Limit as a share of the divergence without a stream. Rounding in another place changes routes through the experts of
random models."""


@pytest.fixture(scope="module")
def results() -> Iterator[dict[tuple[str, str], Future[dict[str, Any]]]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {each: pool.submit(run_module, "tests.gpu.layers", each[0], runner=each[1]) for each in EACH}


@pytest.mark.parametrize(("family", "runner"), EACH)
def test_a_family_is_resumed_right_or_refused(results, family: str, runner: str):
    result = results[family, runner].result()
    assert "refused" not in result, result["log"]
    print(json.dumps({"family": family, "runner": runner, **result}))
    if family in ODD_FAMILIES:
        # Recording compares the floor with the same divergence.
        assert "refusal" in result or result["not resumed"] > 0
        return
    assert max(result["floor"]) <= LARGEST_SHARE * result["not resumed"]
