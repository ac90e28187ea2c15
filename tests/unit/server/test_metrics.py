"""What scoring requests add to `/metrics`."""

import asyncio
import os
import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from scoremode_server.metrics import Metrics
from scoremode_server.prefix_cache.store import RowStore
from tests.unit.server.prefix_cache.cache_setup import ROOM, SIZE, Ask, Setup, outcome, setup
from tests.unit.server.prefix_cache.fake_engine import FakeEngine

TOKENS = "scoremode_scored_tokens_total"
WAITING = "scoremode_request_waiting_seconds"
RUNNING = "scoremode_request_running_seconds"
WORKING = "scoremode_logprob_working_bytes"
NUM_SCORED = 7


def shown(registry: CollectorRegistry) -> dict[str, float]:
    """Samples of `/metrics` by name, without the buckets."""
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value) for name, value in (line.split() for line in lines if line[0] != "#" and "{" not in line)
    }


def output(stats: RequestStateStats | None = None) -> RequestOutput:
    completion = CompletionOutput(0, "", [7], None, None, finish_reason="length")
    return RequestOutput("request", None, list(range(7)), None, [completion], True, metrics=stats)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(1 << 28, registry)


@pytest.mark.parametrize("max_bytes", [0, ROOM])
async def test_every_way_to_score_counts_its_tokens_but_the_first(max_bytes: int):
    made = setup(max_bytes=max_bytes)
    asks = [
        Ask(range(10)),
        Ask(range(10)),
        Ask(range(20), cached=False),
        Ask(range(20), first=12),
        Ask(range(3)),
        Ask(range(10), scores=False),
        Ask(range(1), scores=False),
    ]
    for ask in asks:
        await made.ask(ask)
    counted = shown(made.registry)
    assert counted[TOKENS] == 9 + 9 + 19 + 19 + 2 + 9 + 0
    assert counted[f"{RUNNING}_count"] == 7
    assert counted[f"{WAITING}_count"] == 0, "without vLLM's times, it is unknown when it waited"


@pytest.mark.parametrize("max_bytes", [0, ROOM])
@pytest.mark.parametrize("trouble", [{"losses": 1.0}, {"give_ups": 1.0}], ids=str)
async def test_requests_that_were_given_up_do_not_count(max_bytes: int, trouble: dict[str, float]):
    made = setup(max_bytes=max_bytes, **trouble)
    assert await outcome(made, Ask(range(10))) is None
    assert shown(made.registry)[TOKENS] == shown(made.registry)[f"{RUNNING}_count"] == 0


def test_times_are_from_arrival_to_schedule_to_the_last_token(metrics: Metrics, registry: CollectorRegistry):
    arrival = time.monotonic() - 10
    stats = RequestStateStats(queued_ts=arrival + 1, scheduled_ts=arrival + 3, last_token_ts=arrival + 8)
    metrics.count(output(stats), NUM_SCORED, arrival)
    assert shown(registry)[f"{WAITING}_sum"] == pytest.approx(3)
    assert shown(registry)[f"{RUNNING}_sum"] == pytest.approx(5)
    assert shown(registry)[TOKENS] == 7


@pytest.mark.parametrize("offset", [-1e6, 1e6])
def test_another_hosts_clock_is_not_compared_with_ours(metrics: Metrics, registry: CollectorRegistry, offset: float):
    arrival = time.monotonic() - 10
    far = arrival + offset
    stats = RequestStateStats(queued_ts=far + 1, scheduled_ts=far + 3, last_token_ts=far + 8)
    metrics.count(output(stats), NUM_SCORED, arrival)
    assert shown(registry)[f"{WAITING}_sum"] == pytest.approx(2)
    assert shown(registry)[f"{RUNNING}_sum"] == pytest.approx(5)


def test_without_stats_running_is_the_whole_time(metrics: Metrics, registry: CollectorRegistry):
    arrival = time.monotonic() - 10
    metrics.count(output(), NUM_SCORED, arrival)
    assert 10 <= shown(registry)[f"{RUNNING}_sum"] <= time.monotonic() - arrival


async def test_the_engine_hears_of_a_caller_that_leaves():
    made = setup(latency=1000, in_order=True)
    asking = asyncio.create_task(made.ask(Ask(range(10))))
    for _ in range(20):
        await asyncio.sleep(0)
    assert made.engine.num_running == 1
    asking.cancel()
    await asyncio.wait([asking])
    made.check_nothing_is_left()


@pytest.mark.processes
def test_several_processes_add_up(tmp_path):
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
    together = shown(registry)
    assert together[TOKENS] == 2 * 3 * 7
    assert together[f"{RUNNING}_count"] == 6
    assert 6 * 2 <= together[f"{RUNNING}_sum"] <= 6 * longest
    assert together[WORKING] == 1234


# The cache's counts


def cache_metrics(registry: CollectorRegistry) -> dict[str, float]:
    return {
        name.removeprefix("scoremode_score_cache_"): value
        for name, value in shown(registry).items()
        if name.startswith("scoremode_score_cache_") and not name.endswith("_created")
    }


def test_the_caches_counts_have_the_names_that_are_documented(metrics: Metrics, registry: CollectorRegistry):
    metrics.hits.inc(9)
    metrics.misses.inc(7)
    metrics.joined.inc(2)
    metrics.evictions.inc()
    metrics.cache_bytes.set(1234)
    assert cache_metrics(registry) == {
        "hits_total": 9,
        "misses_total": 7,
        "joined_total": 2,
        "evictions_total": 1,
        "bytes": 1234,
    }


async def test_bytes_are_none_after_the_rows_were_dropped():
    made = Setup(FakeEngine(SIZE, "v2"), RowStore(SIZE, ROOM))
    await made.ask(Ask(list(range(40))))
    assert cache_metrics(made.registry)["bytes"] == made.store.num_bytes > 0
    await made.engine.reset_prefix_cache()
    assert cache_metrics(made.registry)["bytes"] == 0
