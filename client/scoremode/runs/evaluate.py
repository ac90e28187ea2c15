"""Perplexity of a corpus on one or several servers: what `ppl-client` runs, as a library.

The windows are cut here and scored over `/v1/score`, so that every token's NLL is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from scoremode.client import AsyncScoreClient
from scoremode.metrics import Perplexity, TextMetrics, perplexity, text_metrics
from scoremode.runs.corpora import Corpus
from scoremode.runs.divergence import texts_of_occurring
from scoremode.runs.lanes import mean_batch
from scoremode.runs.plan import Plan, WindowNlls, make_plan
from scoremode.runs.pool import Pool
from scoremode.runs.run import OnProgress, StartJournal, measure
from scoremode.windows import WindowSettings
from scoremode.wire.protocol import Lane


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation: its figures, and all that is needed to repeat it."""

    plan: Plan
    concurrency: int
    """Windows in flight at once, at all servers together."""
    result: Perplexity
    windows: list[WindowNlls]
    seconds: float
    """From the first request for scores to the last answer; of a run in several sessions, the sum."""
    token_texts: dict[int, str] = field(default_factory=dict)
    """The text of every target, by its id, where it was asked for and a server gave it."""

    @property
    def mean_batch(self) -> float | None:
        """Mean of the windows'; None in the prefill lane."""
        return mean_batch(window.mean_batch for window in self.windows)

    @property
    def text_metrics(self) -> TextMetrics:
        """Figures that do not depend on the tokenizer."""
        plan = self.plan
        sizes = {"num_tokens": len(plan.tokens), "num_bytes": plan.num_bytes, "num_words": plan.num_words}
        return text_metrics(self.result, plan.method, **sizes)

    def result_of(self, windows: NDArray[np.bool_]) -> Perplexity:
        """The perplexity of some windows, [windows] true for each."""
        kept = (window for window, is_kept in zip(self.windows, windows, strict=True) if is_kept)
        return perplexity(nll for window in kept for nll in window.nlls)

    @property
    def tokens_per_second(self) -> float:
        return self.result.num_scored / self.seconds


async def evaluate(
    clients: AsyncScoreClient | Sequence[AsyncScoreClient],
    corpus: Corpus,
    *,
    return_ranks: bool = False,
    return_token_texts: bool = False,
    concurrency: int | None = None,
    lane: Lane = "prefill",
    start_journal: StartJournal[WindowNlls] | None = None,
    on_progress: OnProgress | None = None,
    **windows: Unpack[WindowSettings],
) -> Evaluation:
    """Measure the perplexity of a corpus, cutting the windows here, and spreading them over servers of the same model.

    `return_ranks` keeps the rank of every target too, `return_token_texts` its text. The other arguments are those of
    `measure_kld`.

    Raises:
        WindowError: windows that cannot be cut, or a text too short for one.
        ScoremodeError: the only server or the last of several fails, the servers differ, or the journal cannot be
            written. Windows in flight are cancelled.
    """
    pool = await Pool.connect(clients, concurrency)
    plan = await make_plan(pool.clients[0], pool.info, corpus, return_ranks=return_ranks, lane=lane, **windows)
    run = await measure(plan, pool, start_journal, on_progress)
    scored = run.in_order()
    return Evaluation(
        plan=plan,
        concurrency=pool.concurrency,
        result=perplexity(nll for window in scored for nll in window.nlls),
        windows=scored,
        seconds=run.seconds(),
        token_texts=await texts_of_occurring(pool.clients[0], plan.target_ids()) if return_token_texts else {},
    )
