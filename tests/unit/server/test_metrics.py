"""Scoring requests add their metrics to `/metrics`."""

import re
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from scoremode_server.metrics import Metrics
from tests.unit.server.engine.cache_setup import Ask, outcome, setup

TOKENS = "scoremode_scored_tokens_total"
RUNNING = "scoremode_request_running_seconds"


def shown(registry: CollectorRegistry) -> dict[str, float]:
    """Samples of `/metrics` by name, without the buckets."""
    samples = re.findall(r"^(\w+) (\S+)$", generate_latest(registry).decode(), re.MULTILINE)
    return {name: float(value) for name, value in samples}


@pytest.mark.parametrize("trouble", [{"losses": 1.0}, {"aborts": 1.0}], ids=str)
async def test_requests_that_the_engine_aborted_do_not_count(trouble):
    made = setup(**trouble)
    assert await outcome(made, Ask(range(10))) is None
    assert shown(made.registry)[TOKENS] == shown(made.registry)[f"{RUNNING}_count"] == 0


@pytest.mark.parametrize(("offset", "waited"), [(0, 3), (-1e6, 2), (1e6, 2)])
def test_waiting_starts_at_arrival_unless_another_host_has_the_clock(offset, waited):
    registry, arrival = CollectorRegistry(), time.monotonic() - 10
    there = arrival + offset
    stats = RequestStateStats(queued_ts=there + 1, scheduled_ts=there + 3, last_token_ts=there + 8)
    completion = CompletionOutput(0, "", [7], None, None, finish_reason="length")
    output = RequestOutput("request", None, list(range(7)), None, [completion], True, metrics=stats)
    Metrics(0, registry).count(output, 7, arrival)
    found = shown(registry)
    assert found["scoremode_request_waiting_seconds_sum"] == pytest.approx(waited)
    assert (found[f"{RUNNING}_sum"], found[TOKENS]) == (pytest.approx(5), 7)
