"""The cache's counts on `/metrics`."""

from prometheus_client import CollectorRegistry, generate_latest

from scoremode_server.cache import LogprobCache
from scoremode_server.cache_metrics import CacheMetrics


def test_metrics_show_the_counts_under_the_names_that_are_documented():
    registry = CollectorRegistry()
    metrics = CacheMetrics(registry)
    cache = LogprobCache(4, 1 << 20)
    cache.counts.hits, cache.counts.misses, cache.counts.joined, cache.counts.evictions = 5, 7, 2, 1
    metrics.update(cache)
    cache.counts.hits = 9
    cache.num_bytes = 1234
    metrics.update(cache)
    shown = dict(
        line.split() for line in generate_latest(registry).decode().splitlines() if line.startswith("scoremode_")
    )
    assert {name: float(value) for name, value in shown.items() if not name.endswith("_created")} == {
        "scoremode_score_cache_hits_total": 9,
        "scoremode_score_cache_misses_total": 7,
        "scoremode_score_cache_joined_total": 2,
        "scoremode_score_cache_evictions_total": 1,
        "scoremode_score_cache_bytes": 1234,
    }
