"""Prometheus metrics of scoring requests, in the registry of vLLM's `/metrics`.

Each event updates them at once, because with several API servers vLLM adds up files of all processes.
"""

import time
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.outputs import RequestOutput

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Metrics:
    """Metrics of all scoring requests of one API server process."""

    def __init__(self, logprob_bytes: int, registry: CollectorRegistry = REGISTRY) -> None:
        counter = partial(Counter, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=SECONDS)
        total_gauge = partial(Gauge, registry=registry, multiprocess_mode="livesum")
        self._tokens = counter(
            "scoremode_scored_tokens", "Tokens with a logprob, computed or cached: all but the first of every sequence."
        )
        self._waiting = seconds(
            "scoremode_request_waiting_seconds",
            "Time from when a sequence may enter the engine until the engine schedules it. Empty with "
            "--disable-log-stats. If the engine runs on another host, only the time in the engine's queue.",
        )
        self._running = seconds(
            "scoremode_request_running_seconds",
            "Time from when the engine schedules a scoring request until it is done. With --disable-log-stats, time "
            "from arrival to answer in the API server.",
        )
        self._waiting_now = total_gauge(
            "scoremode_waiting_sequences", "Sequences of scoring requests that wait for the engine."
        )
        self._running_now = total_gauge("scoremode_running_sequences", "Sequences of scoring requests in the engine.")
        # All processes report the same value.
        Gauge(
            "scoremode_logprob_working_bytes",
            "Working memory for prompt logprobs that every engine worker reserves.",
            registry=registry,
            multiprocess_mode="max",
        ).set(logprob_bytes)
        self.hits = counter("scoremode_score_cache_hits", "Tokens whose logprob was cached.")
        self.misses = counter(
            "scoremode_score_cache_misses", "Tokens whose logprob was computed for a request that used the cache."
        )
        self.joined = counter(
            "scoremode_score_cache_joined", "Requests that waited for the logprobs of another request in flight."
        )
        self.evictions = counter("scoremode_score_cache_evictions", "Blocks of logprobs that were evicted.")
        self.renderings = counter(
            "scoremode_renderings", "Renderings of conversations, several per turn of a template without marks."
        )
        self.encoded_characters = counter("scoremode_encoded_characters", "Characters of conversations encoded.")
        self.cache_bytes = total_gauge("scoremode_score_cache_bytes", "Memory of the cached logprobs.")

    def show_load(self, num_sequences: int, num_running: int) -> None:
        self._waiting_now.set(num_sequences - num_running)
        self._running_now.set(num_running)

    def count(self, output: RequestOutput, num_scored: int, arrival: float) -> None:
        """Count a finished sequence. `arrival` is the `time.monotonic()` when it was ready to enter the engine."""
        self._tokens.inc(num_scored)
        now, stats = time.monotonic(), output.metrics
        if stats is None or not stats.scheduled_ts:
            self._running.observe(now - arrival)
            return
        # Monotonic clocks agree only between processes of one host.
        one_clock = arrival <= stats.scheduled_ts <= now
        self._waiting.observe(stats.scheduled_ts - (arrival if one_clock else stats.queued_ts))
        self._running.observe(stats.last_token_ts - stats.scheduled_ts)
