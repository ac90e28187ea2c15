"""Perplexity of texts, window by window, on a `Scorer`. Knows methods and windows; knows no HTTP."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.lora.request import LoRARequest

from scoremode.metrics import Perplexity, perplexity
from scoremode.windows import Window
from scoremode_server.rows import json_logprobs
from scoremode_server.scoring.scorer import Scorer


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """A window, and the tokens of the document that it is of."""

    document: Sequence[int]
    window: Window


@dataclass(slots=True, kw_only=True)
class PerplexityRun:
    """Scores planned windows, at most `max_concurrent` at once, and hands them over in order."""

    scorer: Scorer
    windows: Sequence[PlannedWindow]
    request_id: str
    max_concurrent: int
    lora: LoRARequest | None
    num_cached_tokens: int = 0
    """Of the windows so far, those that were not computed for this request."""
    nlls: list[np.ndarray] = field(default_factory=list)
    """Of each window that was handed over, [num_scored] in nats."""

    async def scored_windows(self) -> AsyncGenerator[np.ndarray, None]:
        """The NLLs of each window's targets, [num_scored] float64 in nats.

        A failure, or a reader that stops, cancels the windows that are with the engine.
        """
        running: deque[asyncio.Task[np.ndarray]] = deque()
        try:
            for index in range(len(self.windows)):
                running.append(asyncio.create_task(self._score(index)))
                if len(running) == self.max_concurrent:
                    yield await self._first_of(running)
            while running:
                yield await self._first_of(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _first_of(self, running: deque[asyncio.Task[np.ndarray]]) -> np.ndarray:
        nlls = await running[0]
        running.popleft()
        self.nlls.append(nlls)
        return nlls

    async def _score(self, index: int) -> np.ndarray:
        planned = self.windows[index]
        answer = await self.scorer.score(
            planned.window.token_ids(planned.document),
            request_id=f"{self.request_id}-{index}",
            first=planned.window.first_scored,
            lora=self.lora,
        )
        self.num_cached_tokens += answer.num_cached_tokens
        return -json_logprobs(answer.rows.logprobs[:, 0])

    def result(self) -> Perplexity:
        """Perplexity of every window handed over so far, over all their tokens."""
        return perplexity(np.concatenate(self.nlls).tolist())
