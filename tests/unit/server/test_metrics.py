"""What scoring requests add to `/metrics`."""

import os
import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from scoremode_server.metrics import Metrics
from tests.unit.server.prefix_cache.cache_setup import ROOM, Ask, outcome, setup

TOKENS = "scoremode_scored_tokens_total"
WAITING = "scoremode_request_waiting_seconds"
RUNNING = "scoremode_request_running_seconds"


def shown(registry: CollectorRegistry) -> dict[str, float]:
    """Samples of `/metrics` by name, without the buckets."""
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value) for name, value in (line.split() for line in lines if line[0] != "#" and "{" not in line)
    }


@pytest.mark.parametrize("max_bytes", [0, ROOM])
async def test_all_tokens_but_the_first_count_with_the_cache_and_without(max_bytes):
    made = setup(max_bytes=max_bytes)
    for ask in (
        *(Ask(range(10)), Ask(range(10)), Ask(range(20), cached=False), Ask(range(20), first=12), Ask(range(3))),
        *(Ask(range(10), scores=False), Ask(range(1), scores=False)),
    ):
        await made.ask(ask)
    counted = shown(made.registry)
    assert counted[TOKENS] == 9 + 9 + 19 + 19 + 2 + 9 + 0
    assert counted[f"{RUNNING}_count"] == 7
    assert counted[f"{WAITING}_count"] == 0, "without vLLM's times, it is unknown when it waited"
    assert counted["scoremode_score_cache_bytes"] == made.store.num_bytes
    assert (made.store.num_bytes > 0) == (max_bytes > 0)
    await made.engine.reset_prefix_cache()
    assert shown(made.registry)["scoremode_score_cache_bytes"] == 0


@pytest.mark.parametrize("max_bytes", [0, ROOM])
@pytest.mark.parametrize("trouble", [{"losses": 1.0}, {"give_ups": 1.0}], ids=str)
async def test_requests_that_the_engine_aborted_do_not_count(max_bytes, trouble):
    made = setup(max_bytes=max_bytes, **trouble)
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
    assert shown(registry)[f"{WAITING}_sum"] == pytest.approx(waited)
    assert shown(registry)[f"{RUNNING}_sum"] == pytest.approx(5)
    assert shown(registry)[TOKENS] == 7


@pytest.mark.processes
def test_the_counts_of_several_processes_add_up(tmp_path):
    """Without vLLM's times, a request runs from its arrival on."""
    program = """if True:
        import os, time
        from types import SimpleNamespace
        from scoremode_server.metrics import Metrics
        # Values are written to a file of each process, which is opened when a metric is made.
        if os.fork():
            os.wait()
        metrics = Metrics(1234)
        for _ in range(3):
            metrics.count(SimpleNamespace(metrics=None), 7, time.monotonic() - 2)
    """
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    longest = 2 + time.monotonic() - begun
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    counted = shown(registry)
    assert counted[TOKENS] == 2 * 3 * 7
    assert counted[f"{RUNNING}_count"] == 6
    assert 6 * 2 <= counted[f"{RUNNING}_sum"] <= 6 * longest
    assert counted["scoremode_logprob_working_bytes"] == 1234
