"""Perplexity of texts, window by window, on a `Scorer`. Knows methods and windows; knows no HTTP."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from scoremode.metrics import Perplexity, perplexity
from scoremode.windows import Window
from scoremode_server.prefix_cache.admission import RequestQueue
from scoremode_server.rows import json_logprobs
from scoremode_server.scoring.scorer import ScoredSequence, Scorer, ScoreSettings


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """A window, and the tokens of the document that it is of."""

    document: Sequence[int]
    window: Window


@dataclass(slots=True)
class PerplexityRun:
    """Scores planned windows, and hands them over in order."""

    windows: Sequence[PlannedWindow]
    num_cached_tokens: int = 0
    """Of the windows so far, those that were not computed for this request."""
    nlls: list[np.ndarray] = field(default_factory=list)
    """Of each window that was handed over, [num_scored] in nats."""

    async def scored_windows(self, scorer: Scorer, settings: ScoreSettings) -> AsyncGenerator[np.ndarray, None]:
        """The NLLs of each window's targets, [num_scored] float64 in nats.

        A failure, or a reader that stops, cancels the windows that are with the engine.
        """
        async with aclosing(scorer.scores(self._sequences(settings.queue), settings)) as answers:
            async for answer in answers:
                self.num_cached_tokens += answer.num_cached_tokens
                self.nlls.append(-json_logprobs(answer.rows.logprobs[:, 0]))
                yield self.nlls[-1]

    def _sequences(self, queue: RequestQueue) -> Iterator[ScoredSequence]:
        for planned in self.windows:
            token_ids = planned.window.token_ids(planned.document)
            queue.add(1, len(token_ids))
            yield ScoredSequence(token_ids, planned.window.first_scored)

    def result(self) -> Perplexity:
        """Perplexity of every window handed over so far, over all their tokens."""
        return perplexity(np.concatenate(self.nlls).tolist())
