"""Perplexity of texts, window by window, on a `Scorer`. Knows methods and windows; knows no HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import numpy as np
from vllm.lora.request import LoRARequest

from scoremode.metrics import Perplexity, exp, perplexity
from scoremode.windows import Method, Window, cut_windows
from scoremode_server.rows import json_logprobs
from scoremode_server.scoring.scorer import Scorer


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """A window, and the tokens of the document that it is of."""

    document: Sequence[int]
    window: Window


def plan_windows(
    documents: Sequence[Sequence[int]],
    method: Method,
    context_length: int,
    stride: int,
    *,
    prefix_token_id: int | None,
    bos_token_id: int | None,
) -> list[PlannedWindow]:
    """The windows of documents that share no context.

    Raises:
        WindowError: see `cut_windows`.
    """
    return [
        PlannedWindow(document, window)
        for document in documents
        for window in cut_windows(
            len(document), method, context_length, stride, prefix_token_id=prefix_token_id, bos_token_id=bos_token_id
        )
    ]


class PerplexityRun:
    """Scores planned windows, several at once, and hands them over in order."""

    def __init__(
        self,
        scorer: Scorer,
        windows: Sequence[PlannedWindow],
        *,
        request_id: str,
        max_concurrent: int,
        lora: LoRARequest | None,
    ) -> None:
        self.num_cached_tokens = 0
        self._scorer = scorer
        self._windows = windows
        self._request_id = request_id
        self._lora = lora
        self._places = asyncio.Semaphore(max_concurrent)
        self._nlls: list[np.ndarray] = []

    async def scored_windows(self) -> AsyncGenerator[np.ndarray, None]:
        """The NLLs of each window's targets, [num_scored] float64 in nats.

        A failure, or a reader that stops, cancels the windows that are with the engine.
        """
        tasks = [asyncio.create_task(self._score(index)) for index in range(len(self._windows))]
        try:
            for task in tasks:
                nlls = await task
                self._nlls.append(nlls)
                yield nlls
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score(self, index: int) -> np.ndarray:
        planned = self._windows[index]
        async with self._places:
            score = await self._scorer.score(
                planned.window.token_ids(planned.document),
                request_id=f"{self._request_id}-{index}",
                first=planned.window.first_scored,
                lora=self._lora,
            )
        self.num_cached_tokens += score.num_cached_tokens
        return -json_logprobs(score.rows.logprobs[:, 0])

    def result(self) -> Perplexity:
        """Perplexity of every window handed over so far, over all their tokens."""
        return perplexity(np.concatenate(self._nlls).tolist())


class RunningPerplexity:
    """The perplexity so far, for progress; the result is summed anew over all tokens."""

    def __init__(self) -> None:
        self.num_scored = 0
        self._nll_sum = 0.0

    def add(self, nll_sum: float, num_scored: int) -> float:
        """Count a window in, and give the perplexity of all so far."""
        self.num_scored += num_scored
        self._nll_sum += nll_sum
        return exp(self._nll_sum / self.num_scored)
