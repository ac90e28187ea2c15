"""Perplexity of a corpus on one or several servers: what `ppl-client` runs, as a library.

The windows are cut here and scored over `/v1/score`, so that every token's NLL is known.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Unpack

from scoremode.client import AsyncScoreClient
from scoremode.corpora import Corpus
from scoremode.errors import ResponseError
from scoremode.journal import Journal
from scoremode.metrics import Perplexity, TextMetrics, perplexity, text_metrics
from scoremode.plan import Plan, WindowNlls, make_plan
from scoremode.pool import Pool
from scoremode.run import OnProgress, Run
from scoremode.score import Score
from scoremode.token_texts import texts_of_occurring
from scoremode.windows import Window, WindowSettings

StartJournal = Callable[[Plan], Journal[WindowNlls]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation: its figures, and what it takes to repeat it."""

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
    def text_metrics(self) -> TextMetrics:
        """Figures that do not depend on the tokenizer."""
        plan = self.plan
        sizes = {"num_tokens": len(plan.tokens), "num_bytes": plan.num_bytes, "num_words": plan.num_words}
        return text_metrics(self.result, plan.method, **sizes)

    @property
    def tokens_per_second(self) -> float:
        """Scored tokens per second."""
        return self.result.num_scored / self.seconds


async def evaluate(
    clients: AsyncScoreClient | Sequence[AsyncScoreClient],
    corpus: Corpus,
    *,
    return_ranks: bool = False,
    return_token_texts: bool = False,
    concurrency: int | None = None,
    start_journal: StartJournal | None = None,
    on_progress: OnProgress | None = None,
    **windows: Unpack[WindowSettings],
) -> Evaluation:
    """Measure the perplexity of a corpus, cutting the windows here, and spreading them over servers of the same model.

    Args:
        clients: One, or one for each server.
        corpus: The text.
        return_ranks: Keep the rank of every target too.
        return_token_texts: Keep the text of every token that is a target. A server that cannot give them costs the
            texts, not the run: the log says so.
        concurrency: Windows in flight at once at each server; as many sequences as it runs at once when left out.
        start_journal: Opens the journal once it is known what is to be scored. Windows that are in it are not scored
            again, and every other is added to it. Closing it is left to the caller.
        on_progress: Called for the windows of the journal together, and then for each that was scored.
        **windows: How the text is cut into windows.

    Raises:
        WindowError: windows that cannot be cut, or a text too short for one.
        ScoremodeError: the only server or the last of several fails, the servers differ, or the journal cannot be
            written. Windows in flight are cancelled.
    """
    pool = await Pool.connect(clients, concurrency)
    plan = await make_plan(pool.clients[0], pool.info, corpus, return_ranks=return_ranks, **windows)
    journal = None if start_journal is None else start_journal(plan)
    run = Run(plan.num_windows, lambda window: window.nll_sum, journal, on_progress)
    await pool.score(run.missing(), partial(_score_window, plan), run.keep)
    scored = run.in_order()
    return Evaluation(
        plan=plan,
        concurrency=pool.concurrency,
        result=perplexity(nll for window in scored for nll in window.nlls),
        windows=scored,
        seconds=run.seconds(),
        token_texts=await texts_of_occurring(pool.clients[0], plan.target_ids()) if return_token_texts else {},
    )


async def _score_window(plan: Plan, client: AsyncScoreClient, index: int) -> WindowNlls:
    window = plan.windows[index]
    sequence = window.token_ids(plan.tokens)
    scores = await client.score([sequence], return_ranks=plan.return_ranks)
    if len(scores) != 1 or scores[0].token_ids != sequence:
        raise ResponseError("the server did not score the tokens that it was sent")
    nlls: list[float] = (-scores[0].logprob_array[window.first_scored :]).tolist()
    if num_missing := sum(map(math.isnan, nlls)):
        given = window.num_scored - num_missing
        raise ResponseError(f"the server gave {given} logprobs for the {window.num_scored} targets of a window")
    ranks = _ranks(scores[0], window) if plan.return_ranks else None
    return WindowNlls(index, len(nlls), math.fsum(nlls), nlls, ranks)


def _ranks(score: Score, window: Window) -> list[int]:
    targets = (score.ranks or [])[window.first_scored :]
    ranks = [rank for rank in targets if rank is not None]
    if len(ranks) != window.num_scored:
        raise ResponseError(f"the server gave {len(ranks)} ranks for the {window.num_scored} targets of a window")
    return ranks
