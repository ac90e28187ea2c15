"""Prometheus metrics of scoring requests, in the registry of vLLM's `/metrics`.

They are written when something happens, since with several API servers vLLM adds up files of all processes.
"""

import time
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Metrics:
    """Metrics of all scoring requests of one API server process."""

    def __init__(self, logprob_bytes: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._tokens = Counter(
            "scoremode_scored_tokens",
            "Tokens with a logprob, computed or cached: all but the first of every sequence.",
            registry=registry,
        )
        self._waiting = Histogram(
            "scoremode_request_waiting_seconds",
            "From when a sequence may enter the engine until the engine schedules it. Empty with --disable-log-stats. "
            "If the engine runs on another host, only the time in the engine's queue.",
            registry=registry,
            buckets=SECONDS,
        )
        self._running = Histogram(
            "scoremode_request_running_seconds",
            "From when the engine schedules a scoring request until it is done. With --disable-log-stats, from arrival "
            "to answer in the API server.",
            registry=registry,
            buckets=SECONDS,
        )
        self._waiting_now, self._running_now = (
            Gauge(f"scoremode_{name}", text, registry=registry, multiprocess_mode="livesum")
            for name, text in (
                ("waiting_sequences", "Sequences of scoring requests that wait for the engine."),
                ("running_sequences", "Sequences of scoring requests in the engine."),
            )
        )
        # All processes report the same value.
        Gauge(
            "scoremode_logprob_working_bytes",
            "Working memory for prompt logprobs that every engine worker reserves.",
            registry=registry,
            multiprocess_mode="max",
        ).set(logprob_bytes)
        self.hits, self.misses, self.joined, self.evictions = (
            Counter(f"scoremode_score_cache_{name}", text, registry=registry)
            for name, text in (
                ("hits", "Tokens whose logprob was cached."),
                ("misses", "Tokens whose logprob was computed for a request that used the cache."),
                ("joined", "Requests that waited for the logprobs of another request in flight."),
                ("evictions", "Blocks of logprobs that were evicted."),
            )
        )
        self.cache_bytes = Gauge(
            "scoremode_score_cache_bytes",
            "Memory of the cached logprobs.",
            registry=registry,
            multiprocess_mode="livesum",
        )

    def show_load(self, num_sequences: int, num_running: int) -> None:
        """Show the number of sequences, and of those in the engine."""
        self._waiting_now.set(num_sequences - num_running)
        self._running_now.set(num_running)

    def count(self, output: "RequestOutput", num_scored: int, arrival: float) -> None:
        """Count a request with its final output; `arrival` is its `time.monotonic()`."""
        self._tokens.inc(num_scored)
        now, stats = time.monotonic(), output.metrics
        if stats is None or not stats.scheduled_ts:
            self._running.observe(now - arrival)
            return
        # Monotonic clocks agree between the processes of one host only.
        one_clock = arrival <= stats.scheduled_ts <= now
        self._waiting.observe(stats.scheduled_ts - (arrival if one_clock else stats.queued_ts))
        self._running.observe(stats.last_token_ts - stats.scheduled_ts)
