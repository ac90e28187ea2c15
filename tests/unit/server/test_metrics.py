"""What scoring requests add to `/metrics`."""

import os
import re
import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from scoremode_server.metrics import Metrics
from tests.unit.server.prefix_cache.cache_setup import Ask, outcome, setup

TOKENS = "scoremode_scored_tokens_total"
WAITING = "scoremode_request_waiting_seconds"
RUNNING = "scoremode_request_running_seconds"


def shown(registry: CollectorRegistry) -> dict[str, float]:
    """Samples of `/metrics` by name, without the buckets."""
    samples = re.findall(r"^(\w+) (\S+)$", generate_latest(registry).decode(), re.MULTILINE)
    return {name: float(value) for name, value in samples}


@pytest.mark.parametrize("trouble", [{"losses": 1.0}, {"give_ups": 1.0}], ids=str)
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
        Metrics(1234).count(SimpleNamespace(metrics=None), 7, time.monotonic() - 2)
    """
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    begun, registry = time.monotonic(), CollectorRegistry()
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    counted = shown(registry)
    names = (TOKENS, f"{RUNNING}_count", "scoremode_logprob_working_bytes")
    assert [counted[name] for name in names] == [2 * 7, 2, 1234]
    assert 2 * 2 <= counted[f"{RUNNING}_sum"] <= 2 * (2 + time.monotonic() - begun)
