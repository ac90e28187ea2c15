"""Perplexity of a corpus on one or several servers: what `ppl-client` runs, as a library.

`evaluate` cuts the windows here and scores them over `/v1/score`, so that every token's NLL is known;
`evaluate_on_server` leaves both to `/v1/perplexity`. They give the same figures.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from scoremode.client import AsyncScoreClient
from scoremode.corpora import Corpus
from scoremode.errors import ResponseError
from scoremode.journal import Journal
from scoremode.metrics import Perplexity, TextMetrics, perplexity, text_metrics
from scoremode.plan import Plan, WindowNlls, adds_special_tokens, make_plan
from scoremode.pool import Pool
from scoremode.protocol import PerplexityResponse, PerplexityWindow, ServerInfo
from scoremode.run import OnProgress, Progress, Run
from scoremode.score import Score
from scoremode.token_texts import texts_of_occurring
from scoremode.windows import Method, Window

StartJournal = Callable[[Plan], Journal[WindowNlls]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation: its figures, and what it takes to repeat it."""

    corpus: Corpus
    server: ServerInfo
    model: str
    server_side: bool
    method: Method
    context_length: int
    stride: int
    max_tokens: int | None
    add_special_tokens: bool
    concurrency: int | None
    """Windows in flight at once, at all servers together; None where the server cut the windows."""
    num_tokens: int
    """Tokens of the text used, with any special tokens that the tokenizer added."""
    num_bytes: int
    """UTF-8 bytes of the text used."""
    num_words: int
    result: Perplexity
    text_metrics: TextMetrics
    windows: list[WindowNlls]
    token_ids: list[int] | None
    """Of all targets, in the order of windows; None where the server cut the windows."""
    seconds: float
    """From the first request for scores to the last answer; of a run in several sittings, the sum."""
    token_texts: dict[int, str] = field(default_factory=dict)
    """Of every id in `token_ids`, where they were asked for and a server gave them."""

    @property
    def tokens_per_second(self) -> float:
        """Scored tokens a second."""
        return self.result.num_scored / self.seconds


async def evaluate(
    clients: AsyncScoreClient | Sequence[AsyncScoreClient],
    corpus: Corpus,
    *,
    method: Method = "sliding",
    context_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    add_special_tokens: bool | None = None,
    return_ranks: bool = False,
    return_token_texts: bool = False,
    concurrency: int | None = None,
    start_journal: StartJournal | None = None,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Measure the perplexity of a corpus, cutting the windows here, and spreading them over servers of the same model.

    Args:
        clients: One, or one for each server.
        corpus: The text.
        method: This and the next four are as for `AsyncScoreClient.perplexity`.
        context_length: Tokens a window.
        stride: Tokens from one window to the next.
        max_tokens: Take at most this many tokens of the text.
        add_special_tokens: Let the tokenizer add its special tokens.
        return_ranks: Keep the rank of every target too.
        return_token_texts: Keep the text of every token that is a target. A server that cannot give them costs the
            texts, which is said in the log, and not the run.
        concurrency: Windows in flight at once at each server; as many sequences as it runs at once when left out.
        start_journal: Opens the journal once it is known what is to be scored. Windows that are in it are not scored
            again, and every other is added to it. Closing it is left to the caller.
        on_progress: Called for the windows of the journal together, and then for each that was scored.

    Raises:
        WindowError: windows that cannot be cut, or a text too short for one.
        ScoremodeError: the only server or the last of several fails, the servers differ, or the journal cannot be
            written. Windows in flight are cancelled.
    """
    clients = [clients] if isinstance(clients, AsyncScoreClient) else clients
    pool = await Pool.connect(clients, concurrency)
    plan = await make_plan(
        clients[0],
        pool.info,
        corpus,
        method=method,
        context_length=context_length,
        stride=stride,
        max_tokens=max_tokens,
        add_special_tokens=add_special_tokens,
        return_ranks=return_ranks,
    )
    journal = None if start_journal is None else start_journal(plan)
    run = Run(plan.num_windows, lambda window: window.nll_sum, journal, on_progress)
    await pool.score(run.missing(), partial(_score_window, plan), run.keep)
    scored = run.in_order()
    result = perplexity(nll for window in scored for nll in window.nlls or ())
    token_ids = plan.target_ids()
    return Evaluation(
        corpus=corpus,
        server=plan.server,
        model=plan.model,
        server_side=False,
        method=plan.method,
        context_length=plan.context_length,
        stride=plan.stride,
        max_tokens=plan.max_tokens,
        add_special_tokens=plan.add_special_tokens,
        concurrency=pool.concurrency,
        num_tokens=len(plan.tokens),
        num_bytes=plan.num_bytes,
        num_words=plan.num_words,
        result=result,
        text_metrics=text_metrics(
            result, method, num_tokens=len(plan.tokens), num_bytes=plan.num_bytes, num_words=plan.num_words
        ),
        windows=scored,
        token_ids=token_ids,
        seconds=run.seconds(),
        token_texts=await texts_of_occurring(pool.clients[0], token_ids) if return_token_texts else {},
    )


async def evaluate_on_server(
    client: AsyncScoreClient,
    corpus: Corpus,
    *,
    method: Method = "sliding",
    context_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    add_special_tokens: bool | None = None,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """As `evaluate`, with the windows cut and scored by the server; the NLLs of single tokens stay there.

    Raises:
        ScoremodeError: the server fails, or refuses the windows.
    """
    info = await client.info()
    windows: list[WindowNlls] = []

    def take(window: PerplexityWindow) -> None:
        windows.append(WindowNlls(window.index, window.num_scored, window.nll_sum, None))
        if on_progress is not None:
            mean = math.log(window.perplexity)
            on_progress(Progress(len(windows), window.num_windows, window.total_scored, mean))

    started = time.perf_counter()
    response = await client.perplexity(
        **corpus.prompt,
        method=method,
        context_length=context_length,
        stride=stride,
        max_tokens=max_tokens,
        add_special_tokens=add_special_tokens,
        on_window=take,
    )
    seconds = time.perf_counter() - started
    if response.num_bytes is None or response.num_words is None:
        raise ResponseError("the server's result lacks the bytes and words of the text that it was given")
    return Evaluation(
        corpus=corpus,
        server=info,
        model=response.model,
        server_side=True,
        method=response.method,
        context_length=response.context_length,
        stride=response.stride,
        max_tokens=max_tokens,
        add_special_tokens=adds_special_tokens(method, add_special_tokens),
        concurrency=None,
        num_tokens=response.num_tokens,
        num_bytes=response.num_bytes,
        num_words=response.num_words,
        result=_perplexity_of(response),
        text_metrics=TextMetrics(
            response.bits_per_byte,
            # Infinite on a text of few, very long words, and then null in JSON.
            math.inf if response.word_perplexity is None else response.word_perplexity,
        ),
        windows=sorted(windows, key=lambda window: window.index),
        token_ids=None,
        seconds=seconds,
    )


async def _score_window(plan: Plan, client: AsyncScoreClient, index: int) -> WindowNlls:
    window = plan.windows[index]
    sequence = window.token_ids(plan.tokens)
    scores = await client.score([sequence], return_ranks=plan.return_ranks)
    if len(scores) != 1 or scores[0].token_ids != sequence:
        raise ResponseError("the server did not score the tokens that it was sent")
    targets = scores[0].logprobs[window.first_scored :]
    nlls = [-logprob for logprob in targets if logprob is not None]
    if len(nlls) != window.num_scored:
        raise ResponseError(f"the server gave {len(nlls)} logprobs for the {window.num_scored} targets of a window")
    ranks = _ranks(scores[0], window) if plan.return_ranks else None
    return WindowNlls(index, len(nlls), math.fsum(nlls), nlls, ranks)


def _ranks(score: Score, window: Window) -> list[int]:
    targets = (score.ranks or [])[window.first_scored :]
    ranks = [rank for rank in targets if rank is not None]
    if len(ranks) != window.num_scored:
        raise ResponseError(f"the server gave {len(ranks)} ranks for the {window.num_scored} targets of a window")
    return ranks


def _perplexity_of(response: PerplexityResponse) -> Perplexity:
    return Perplexity(
        num_scored=response.num_scored,
        nll_sum=response.nll_sum,
        nll_mean=response.nll_mean,
        nll_stderr=response.nll_stderr,
        perplexity=response.perplexity,
        perplexity_stderr=response.perplexity_stderr,
    )
