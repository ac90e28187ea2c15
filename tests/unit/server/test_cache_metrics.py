"""The cache's counts on `/metrics`."""

from cache_setup import ROOM, SIZE, Ask, Setup
from fake_engine import FakeEngine
from prometheus_client import CollectorRegistry, generate_latest

from scoremode_server.cache import LogprobCache
from scoremode_server.cache_metrics import CacheMetrics


def shown(registry: CollectorRegistry) -> dict[str, float]:
    """The cache's metrics on `/metrics`."""
    lines = generate_latest(registry).decode().splitlines()
    values = dict(line.split() for line in lines if line.startswith("scoremode_"))
    return {name: float(value) for name, value in values.items() if not name.endswith("_created")}


def test_metrics_show_the_counts_under_the_names_that_are_documented():
    registry = CollectorRegistry()
    metrics = CacheMetrics(registry)
    cache = LogprobCache(4, 1 << 20)
    cache.counts.hits, cache.counts.misses, cache.counts.joined, cache.counts.evictions = 5, 7, 2, 1
    metrics.update(cache)
    cache.counts.hits = 9
    cache.num_bytes = 1234
    metrics.update(cache)
    assert shown(registry) == {
        "scoremode_score_cache_hits_total": 9,
        "scoremode_score_cache_misses_total": 7,
        "scoremode_score_cache_joined_total": 2,
        "scoremode_score_cache_evictions_total": 1,
        "scoremode_score_cache_bytes": 1234,
    }


async def test_bytes_are_none_after_the_rows_were_dropped():
    registry = CollectorRegistry()
    made = Setup(FakeEngine(SIZE, "v2"), LogprobCache(SIZE, ROOM), CacheMetrics(registry).update)
    await made.ask(Ask(list(range(40))))
    assert shown(registry)["scoremode_score_cache_bytes"] == made.cache.num_bytes > 0
    await made.engine.reset_prefix_cache()
    assert shown(registry)["scoremode_score_cache_bytes"] == 0
