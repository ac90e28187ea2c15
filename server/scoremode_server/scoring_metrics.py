"""What becomes of scoring requests, as Prometheus metrics in the registry that vLLM's `/metrics` shows.

vLLM's own metrics do not tell scoring from generating. `MeteredEngine` stands before everything else, so that a request
counts once and whole: through `/v1/score`, `/v1/perplexity` or `/v1/completions`, with the cache or without.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm import SamplingParams
from vllm.engine.protocol import EngineClient
from vllm.outputs import RequestOutput

from scoremode_server.engine.packed_logprobs import is_packed
from scoremode_server.scoring import is_unfinished

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class ScoringMetrics:
    """Metrics of all scoring requests of one API server process; with several, vLLM adds their files up."""

    def __init__(self, logprob_bytes: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._tokens = Counter(
            "scoremode_scored_tokens",
            "Tokens that were given a logprob, computed or cached: all but the first of every sequence.",
            registry=registry,
        )
        self._waiting = Histogram(
            "scoremode_request_waiting_seconds",
            "From a scoring request's arrival until the engine first schedules it. Nothing with --disable-log-stats. "
            "Where the engine runs on another host, its own queue alone.",
            registry=registry,
            buckets=SECONDS,
        )
        self._running = Histogram(
            "scoremode_request_running_seconds",
            "From when the engine first schedules a scoring request until it is done. With --disable-log-stats, from "
            "arrival to answer as the API server sees it.",
            registry=registry,
            buckets=SECONDS,
        )
        # Every process says the same of the same engines.
        Gauge(
            "scoremode_logprob_working_bytes",
            "Working memory for prompt logprobs that every engine worker reserves.",
            registry=registry,
            multiprocess_mode="max",
        ).set(logprob_bytes)

    def count(self, output: RequestOutput, params: SamplingParams, arrival: float) -> None:
        """Count the final output of a request; `arrival` is its `time.monotonic()`. One that was given up is not."""
        if is_unfinished(output):
            return
        self._tokens.inc(_num_scored(output, params))
        now, stats = time.monotonic(), output.metrics
        if stats is None or not stats.scheduled_ts:
            self._running.observe(now - arrival)
            return
        # Monotonic clocks agree between the processes of a host, and between hosts not at all.
        one_clock = arrival <= stats.scheduled_ts <= now
        self._waiting.observe(stats.scheduled_ts - (arrival if one_clock else stats.queued_ts))
        self._running.observe(stats.last_token_ts - stats.scheduled_ts)


def _num_scored(output: RequestOutput, params: SamplingParams) -> int:
    """The prompt's tokens but the first, and the last one of a sequence where the sampled step is forced to it."""
    return max(0, len(output.prompt_token_ids or ()) - 1) + (len(params.allowed_token_ids or ()) == 1)


class MeteredEngine:
    """Stands in for an engine client, and counts the scoring requests that it finishes."""

    def __init__(self, engine: EngineClient, metrics: ScoringMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """`EngineClient.generate`."""
        arrival = time.monotonic()
        outputs: AsyncGenerator[RequestOutput, None] = self._engine.generate(
            prompt, sampling_params, request_id, **options
        )
        return self._counted(outputs, sampling_params, arrival) if is_packed(sampling_params) else outputs

    async def _counted(
        self, outputs: AsyncGenerator[RequestOutput, None], params: SamplingParams, arrival: float
    ) -> AsyncGenerator[RequestOutput, None]:
        # A caller that leaves early leaves this generator, and the engine has to hear of it through the inner one.
        async with aclosing(outputs):
            async for output in outputs:
                if output.finished:
                    self._metrics.count(output, params, arrival)
                yield output
