"""Perplexity of a corpus on a server: what `ppl-client` runs, as a library.

`evaluate` cuts the windows here and scores them over `/v1/score`, so that every token's NLL is known;
`evaluate_on_server` leaves both to `/v1/perplexity`. They give the same figures.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scoremode.client import AsyncScoreClient
from scoremode.corpora import Corpus
from scoremode.errors import ResponseError
from scoremode.metrics import Perplexity, TextMetrics, count_words, exp, perplexity, text_metrics
from scoremode.protocol import PerplexityRequest, PerplexityResponse, PerplexityWindow, ServerInfo
from scoremode.windows import Method, Window, WindowError, cut_windows, resolve_context_length, resolve_stride

DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an evaluation is."""

    windows_done: int
    num_windows: int
    num_scored: int
    """Tokens so far."""
    perplexity: float
    """Of the tokens so far."""


OnProgress = Callable[[Progress], object]


@dataclass(frozen=True, slots=True)
class WindowNlls:
    """What one window came to, in nats."""

    index: int
    num_scored: int
    nll_sum: float
    nlls: list[float] | None
    """NLL of each target, in order; None where the server cut the windows and kept them."""


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
    """Windows in flight at once; None where the server cut the windows."""
    num_tokens: int
    """Tokens of the text used, with any special tokens that the tokenizer added."""
    num_bytes: int
    """UTF-8 bytes of the text used."""
    num_words: int
    result: Perplexity
    text_metrics: TextMetrics
    windows: list[WindowNlls]
    seconds: float
    """From the first request for scores to the last answer."""

    @property
    def tokens_per_second(self) -> float:
        """Scored tokens a second."""
        return self.result.num_scored / self.seconds


async def evaluate(
    client: AsyncScoreClient,
    corpus: Corpus,
    *,
    method: Method = "sliding",
    context_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    add_special_tokens: bool | None = None,
    concurrency: int = DEFAULT_CONCURRENCY,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Measure the perplexity of a corpus, cutting the windows here and scoring `concurrency` of them at once.

    The arguments are those of `AsyncScoreClient.perplexity`. The first window that fails cancels the others.

    Raises:
        WindowError: windows that cannot be cut, or a text too short for one.
        ScoremodeError: the server fails.
    """
    info = await client.info()
    context_length = resolve_context_length(method, context_length, info.max_model_len)
    stride = resolve_stride(method, context_length, stride)
    add_special_tokens = _adds_special_tokens(method, add_special_tokens)
    tokens = await client.tokenize(corpus.text, add_special_tokens)
    text = corpus.text
    if max_tokens is not None and len(tokens) > max_tokens:
        tokens = tokens[:max_tokens]
        text = await _text_of(client, tokens, info.bos_token_id if add_special_tokens and info.adds_bos else None)
    windows = cut_windows(
        len(tokens),
        method,
        context_length,
        stride,
        prefix_token_id=info.prefix_token_id,
        bos_token_id=info.chunk_token_id,
    )
    if not windows:
        raise WindowError(
            f"the text is too short: {len(tokens)} tokens make no window of {context_length} with method {method!r}",
            "context_length",
        )
    started = time.perf_counter()
    scored = await _score_windows(client, tokens, windows, concurrency, on_progress)
    seconds = time.perf_counter() - started
    result = perplexity(nll for nlls in scored for nll in nlls)
    num_bytes, num_words = len(text.encode()), count_words(text)
    return Evaluation(
        corpus=corpus,
        server=info,
        model=client.model or info.model,
        server_side=False,
        method=method,
        context_length=context_length,
        stride=stride,
        max_tokens=max_tokens,
        add_special_tokens=add_special_tokens,
        concurrency=concurrency,
        num_tokens=len(tokens),
        num_bytes=num_bytes,
        num_words=num_words,
        result=result,
        text_metrics=text_metrics(result, method, num_tokens=len(tokens), num_bytes=num_bytes, num_words=num_words),
        windows=[WindowNlls(index, len(nlls), math.fsum(nlls), nlls) for index, nlls in enumerate(scored)],
        seconds=seconds,
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
            on_progress(Progress(len(windows), window.num_windows, window.total_scored, window.perplexity))

    started = time.perf_counter()
    response = await client.perplexity(
        corpus.text,
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
        add_special_tokens=_adds_special_tokens(method, add_special_tokens),
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
        seconds=seconds,
    )


async def _score_windows(
    client: AsyncScoreClient,
    tokens: Sequence[int],
    windows: Sequence[Window],
    concurrency: int,
    on_progress: OnProgress | None,
) -> list[list[float]]:
    """NLLs of each window's targets, in the windows' order."""
    scored: list[list[float]] = [[] for _ in windows]
    pending = enumerate(windows)
    windows_done = num_scored = 0
    nll_sum = 0.0

    async def work() -> None:
        nonlocal windows_done, num_scored, nll_sum
        for index, window in pending:
            nlls = await _score_window(client, tokens, window)
            scored[index] = nlls
            windows_done += 1
            num_scored += len(nlls)
            nll_sum += math.fsum(nlls)
            if on_progress is not None:
                on_progress(Progress(windows_done, len(windows), num_scored, exp(nll_sum / num_scored)))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(windows))):
                workers.create_task(work())
    except ExceptionGroup as failures:
        # The first failure says what is wrong; its group would only hide its type from the caller.
        first = failures.exceptions[0]
        raise first from first.__cause__
    return scored


async def _score_window(client: AsyncScoreClient, tokens: Sequence[int], window: Window) -> list[float]:
    sequence = window.token_ids(tokens)
    scores = await client.score([sequence])
    if len(scores) != 1 or scores[0].token_ids != sequence:
        raise ResponseError("the server did not score the tokens that it was sent")
    targets = scores[0].logprobs[window.first_scored :]
    nlls = [-logprob for logprob in targets if logprob is not None]
    if len(nlls) != window.num_scored:
        raise ResponseError(f"the server gave {len(nlls)} logprobs for the {window.num_scored} targets of a window")
    return nlls


async def _text_of(client: AsyncScoreClient, tokens: Sequence[int], added_bos: int | None) -> str:
    """The text of truncated tokens, without a BOS that the tokenizer put before it."""
    if added_bos is not None and tokens[0] == added_bos:
        tokens = tokens[1:]
    return await client.detokenize(tokens) if tokens else ""


def _adds_special_tokens(method: Method, add_special_tokens: bool | None) -> bool:
    fields = {"method": method, "add_special_tokens": add_special_tokens}
    return PerplexityRequest.model_validate(fields).adds_special_tokens


def _perplexity_of(response: PerplexityResponse) -> Perplexity:
    return Perplexity(
        num_scored=response.num_scored,
        nll_sum=response.nll_sum,
        nll_mean=response.nll_mean,
        nll_stderr=response.nll_stderr,
        perplexity=response.perplexity,
        perplexity_stderr=response.perplexity_stderr,
    )
