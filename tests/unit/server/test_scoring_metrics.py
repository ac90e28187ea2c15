"""What scoring requests add to `/metrics`."""

import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from cache_setup import Ask, setup
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from scoremode_server.engine.packed_logprobs import PACKED
from scoremode_server.scoring import score_params
from scoremode_server.scoring_metrics import MeteredEngine, ScoringMetrics

TOKENS = "scoremode_scored_tokens_total"
WAITING = "scoremode_request_waiting_seconds"
RUNNING = "scoremode_request_running_seconds"
WORKING = "scoremode_logprob_working_bytes"
PARAMS = score_params(range(8))


def shown(registry: CollectorRegistry) -> dict[str, float]:
    """Samples of `/metrics` by name, without the buckets."""
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value) for name, value in (line.split() for line in lines if line[0] != "#" and "{" not in line)
    }


def output(finish_reason: str = "length", stats: RequestStateStats | None = None) -> RequestOutput:
    """Of a request with a prompt of seven tokens."""
    completion = CompletionOutput(0, "", [7], None, None, finish_reason=finish_reason)
    return RequestOutput("request", None, list(range(7)), None, [completion], True, metrics=stats)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> ScoringMetrics:
    return ScoringMetrics(1 << 28, registry)


async def send(engine: MeteredEngine, ask: Ask) -> None:
    async for _ in engine.generate(tokens_input(ask.fed), ask.params(), "request", lora_request=None):
        pass


@pytest.mark.parametrize("max_bytes", [0, 1 << 24])
async def test_every_way_to_score_counts_its_tokens_but_the_first(
    metrics: ScoringMetrics, registry: CollectorRegistry, max_bytes: int
):
    engine = MeteredEngine(setup(max_bytes=max_bytes).caching, metrics)
    asks = [
        Ask(range(10)),
        Ask(range(10)),
        Ask(range(20), cached=False),
        Ask(range(3)),
        Ask(range(10), scores=False),
        Ask(range(1), scores=False),
    ]
    for ask in asks:
        await send(engine, ask)
    assert shown(registry)[TOKENS] == 9 + 9 + 19 + 2 + 9 + 0
    assert shown(registry)[f"{RUNNING}_count"] == 6
    assert shown(registry)[f"{WAITING}_count"] == 0, "without vLLM's times, nobody knows when it waited"


async def test_a_request_that_generates_is_not_counted(metrics: ScoringMetrics, registry: CollectorRegistry):
    class Engine:
        async def generate(self, *arguments: Any) -> AsyncGenerator[RequestOutput, None]:
            yield output()

    outputs = MeteredEngine(Engine(), metrics).generate(tokens_input([1]), SamplingParams(), "request")
    assert [answer.finished async for answer in outputs] == [True]
    assert shown(registry)[TOKENS] == shown(registry)[f"{RUNNING}_count"] == 0


def test_times_are_from_arrival_to_schedule_to_the_last_token(metrics: ScoringMetrics, registry: CollectorRegistry):
    arrival = time.monotonic() - 10
    stats = RequestStateStats(queued_ts=arrival + 1, scheduled_ts=arrival + 3, last_token_ts=arrival + 8)
    metrics.count(output(stats=stats), PARAMS, arrival)
    assert shown(registry)[f"{WAITING}_sum"] == pytest.approx(3)
    assert shown(registry)[f"{RUNNING}_sum"] == pytest.approx(5)
    assert shown(registry)[TOKENS] == 7


@pytest.mark.parametrize("offset", [-1e6, 1e6])
def test_another_hosts_clock_is_not_compared_with_ours(
    metrics: ScoringMetrics, registry: CollectorRegistry, offset: float
):
    arrival = time.monotonic() - 10
    far = arrival + offset
    stats = RequestStateStats(queued_ts=far + 1, scheduled_ts=far + 3, last_token_ts=far + 8)
    metrics.count(output(stats=stats), PARAMS, arrival)
    assert shown(registry)[f"{WAITING}_sum"] == pytest.approx(2)
    assert shown(registry)[f"{RUNNING}_sum"] == pytest.approx(5)


def test_without_stats_running_is_the_whole_time(metrics: ScoringMetrics, registry: CollectorRegistry):
    metrics.count(output(), PARAMS, time.monotonic() - 10)
    assert shown(registry)[f"{RUNNING}_sum"] == pytest.approx(10, abs=0.5)


@pytest.mark.parametrize("finish_reason", ["abort", "error"])
def test_requests_that_were_given_up_do_not_count(
    metrics: ScoringMetrics, registry: CollectorRegistry, finish_reason: str
):
    metrics.count(output(finish_reason), PARAMS, time.monotonic())
    assert shown(registry)[TOKENS] == shown(registry)[f"{RUNNING}_count"] == 0


async def test_the_engine_hears_of_a_caller_that_leaves(metrics: ScoringMetrics):
    left = []

    class Engine:
        async def generate(self, *arguments: Any) -> AsyncGenerator[RequestOutput, None]:
            try:
                while True:
                    yield output()
            finally:
                left.append(True)

    params = SamplingParams(extra_args={PACKED: 1})
    outputs = MeteredEngine(Engine(), metrics).generate(tokens_input([1]), params, "request")
    await anext(outputs)
    await outputs.aclose()
    assert left == [True]


def test_several_processes_add_up(tmp_path):
    program = """if True:
        import time
        from test_scoring_metrics import PARAMS, ScoringMetrics, output
        metrics = ScoringMetrics(1234)
        for _ in range(3):
            metrics.count(output(), PARAMS, time.monotonic() - 2)
    """
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    together = shown(registry)
    assert together[TOKENS] == 2 * 3 * 7
    assert together[f"{RUNNING}_count"] == 6
    assert together[f"{RUNNING}_sum"] == pytest.approx(12, abs=1)
    assert together[WORKING] == 1234
