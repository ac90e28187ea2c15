"""The cache's counts as Prometheus metrics, in the registry that vLLM's `/metrics` shows."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from scoremode_server.cache import LogprobCache

_PREFIX = "scoremode_score_cache_"
_COUNTERS = {
    "hits": "Tokens whose logprob was answered without computing it.",
    "misses": "Tokens whose logprob was computed for a request that used the cache.",
    "evictions": "Blocks of logprobs dropped for want of room.",
    "joined": "Requests that waited for the logprobs of another one in flight.",
}


class CacheMetrics:
    """Metrics of one cache; `update` is called when its counts may have moved.

    With several API servers a process each, vLLM adds up the files in which these metrics then live; a collector that
    reads the cache when it is scraped would show one process only.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._counters = {name: Counter(_PREFIX + name, text, registry=registry) for name, text in _COUNTERS.items()}
        self._bytes = Gauge(
            f"{_PREFIX}bytes",
            "Memory that the cached logprobs take.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._seen = dict.fromkeys(_COUNTERS, 0)

    def update(self, cache: LogprobCache) -> None:
        """Show a cache's counts."""
        for name, counter in self._counters.items():
            count = getattr(cache.counts, name)
            if count != self._seen[name]:
                counter.inc(count - self._seen[name])
                self._seen[name] = count
        self._bytes.set(cache.num_bytes)
