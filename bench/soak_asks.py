"""The requests of a soak, drawn at random, and what a right answer to each of them is."""

import base64
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parents[1]))

from scoremode.corpora import load_corpus
from scoremode.windows import Window, cut_windows
from tests import oracle

BAR = 2e-3
"""Nats by which a token's logprob may differ from the oracle's, in float32."""
SHARED_BY = 4
"""Sequences with one beginning."""
LARGEST_TEXT = 1500
"""Characters, fewer than 1,024 tokens."""
WINDOWS = {"method": "sliding", "context_length": 128, "stride": 64}


class WrongAnswerError(Exception):
    """An answer of status 200 that is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, and what its tokens should score."""

    text: str
    token_ids: list[int]
    logprobs: np.ndarray
    """[tokens] in nats; the first, which has no context, is NaN."""
    window_nlls: list[tuple[int, float]]
    """Of each of `WINDOWS`: tokens scored, and the sum of their NLLs in nats."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and what reads its answer: the largest difference from the oracle, in nats a token.

    `difference` raises `WrongAnswerError`.
    """

    path: str
    body: dict[str, Any]
    difference: Callable[[bytes], float]


def make_passages(model: Path, count: int, rng: random.Random) -> list[Passage]:
    """Pieces of the Python language reference."""
    text, tokenizer = load_corpus("pydoc").text, AutoTokenizer.from_pretrained(model)
    starts = [rng.randrange(len(text) - LARGEST_TEXT) for _ in range(-(-count // SHARED_BY))]
    passages = []
    for index in range(count):
        start = starts[index // SHARED_BY]
        piece = text[start : start + rng.randrange(20, LARGEST_TEXT)]
        passages.append(make_passage(piece, tokenizer(piece)["input_ids"], lambda tokens: _logprobs(model, tokens)))
    return passages


def make_passage(text: str, token_ids: list[int], logprobs: Callable[[list[int]], np.ndarray]) -> Passage:
    """`logprobs` gives those of all tokens of a sequence but the first."""
    windows = cut_windows(len(token_ids), **WINDOWS)
    return Passage(
        text,
        token_ids,
        np.concatenate([[np.nan], logprobs(token_ids)]),
        [(window.num_scored, _window_nll(window, token_ids, logprobs)) for window in windows],
    )


def _window_nll(window: Window, token_ids: list[int], logprobs: Callable[[list[int]], np.ndarray]) -> float:
    return -float(logprobs(window.token_ids(token_ids))[window.first_scored - 1 :].sum(dtype=np.float64))


def _logprobs(model: Path, token_ids: list[int]) -> np.ndarray:
    (result,) = oracle.logprobs(model, [token_ids])
    return result


def draw_ask(passages: Sequence[Passage], rng: random.Random) -> Ask:
    """Any request of the load."""
    draw = rng.choices((draw_score, draw_continuations, draw_completion, draw_perplexity), (3, 2, 3, 2))[0]
    return draw(passages, rng)


def draw_score(passages: Sequence[Passage], rng: random.Random) -> Ask:
    """One prompt or several to `/v1/score`, as texts or as token ids."""
    prompt, expected = draw_prompt(passages, rng)
    return score_ask({"prompt": prompt}, expected, rng)


def draw_continuations(passages: Sequence[Passage], rng: random.Random) -> Ask:
    """The rest of a passage after a prompt, and the beginning of that rest."""
    passage = rng.choice(passages)
    split = rng.randrange(1, len(passage.token_ids))
    end = rng.randrange(split, len(passage.token_ids)) + 1
    continuations = [passage.token_ids[split:], passage.token_ids[split:end]]
    body = {"prompt": passage.token_ids[:split], "continuations": continuations}
    return score_ask(body, [passage.logprobs[split:], passage.logprobs[split:end]], rng)


def score_ask(body: dict[str, Any], expected: Sequence[np.ndarray], rng: random.Random) -> Ask:
    """`body` with any options."""
    options = {
        "top_logprobs": rng.choice((0, 0, 1, 5, 20)),
        "return_ranks": rng.random() < 0.3,
        "return_tokens": rng.random() < 0.3,
        "encoding_format": rng.choice(("float", "base64")),
        "use_cache": rng.random() < 0.8,
        # Salts make several copies of a prefix, so that the caches go on dropping what they have.
        "cache_salt": rng.choice((None, None, "a", "b", "c")),
    }
    return Ask("/v1/score", body | options, lambda answer: score_difference(answer, expected))


def draw_completion(passages: Sequence[Passage], rng: random.Random) -> Ask:
    """One prompt or several to `/v1/completions`, echoed."""
    prompt, expected = draw_prompt(passages, rng)
    generated = rng.choice((0, 1))
    options = {"echo": True, "logprobs": rng.choice((0, 1, 5)), "max_tokens": generated, "temperature": 0}
    body = {"prompt": prompt} | options
    return Ask("/v1/completions", body, lambda answer: echo_difference(answer, expected, generated))


def draw_perplexity(passages: Sequence[Passage], rng: random.Random) -> Ask:
    """A stream of a passage's windows."""
    passage = rng.choice(passages)
    body = {"prompt": passage.token_ids, "stream": True, **WINDOWS}
    return Ask("/v1/perplexity", body, lambda answer: stream_difference(answer, passage.window_nlls))


def draw_prompt(passages: Sequence[Passage], rng: random.Random) -> tuple[Any, list[np.ndarray]]:
    """Any of the four shapes of a prompt, and the logprobs of each sequence."""
    chosen = rng.sample(passages, rng.choice((1, 1, 2, 4)))
    prompts = [passage.text for passage in chosen] if rng.random() < 0.5 else [each.token_ids for each in chosen]
    return prompts if len(chosen) > 1 else prompts[0], [passage.logprobs for passage in chosen]


def score_difference(answer: bytes, expected: Sequence[np.ndarray]) -> float:
    """Of an answer of `/v1/score`.

    Raises:
        WrongAnswerError: it is about other tokens than asked for.
    """
    results = [result["logprobs"] for result in json.loads(answer)["data"]]
    return largest_difference([decoded(logprobs) for logprobs in results], expected)


def echo_difference(answer: bytes, expected: Sequence[np.ndarray], generated: int) -> float:
    """Of an answer of `/v1/completions`, without so many generated tokens of each sequence.

    Raises:
        WrongAnswerError: it is about other tokens than asked for.
    """
    choices = [decoded(choice["logprobs"]["token_logprobs"]) for choice in json.loads(answer)["choices"]]
    return largest_difference([choice[: len(choice) - generated] for choice in choices], expected)


def decoded(logprobs: list[float | None] | str) -> np.ndarray:
    """Logprobs in either encoding, NaN where there is none."""
    if isinstance(logprobs, str):
        return np.frombuffer(base64.b64decode(logprobs), dtype="<f4")
    return np.array(logprobs, dtype=np.float64)


def largest_difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Of any token, in nats.

    Raises:
        WrongAnswerError: the numbers of sequences or tokens differ, or what has a logprob.
    """
    if [len(each) for each in found] != [len(each) for each in expected]:
        raise WrongAnswerError(f"{[len(each) for each in found]} tokens in place of {[len(each) for each in expected]}")
    one, other = np.concatenate(found), np.concatenate(expected)
    if not np.array_equal(np.isnan(one), np.isnan(other)):
        raise WrongAnswerError(
            f"no logprob at {np.flatnonzero(np.isnan(one))}, expected at {np.flatnonzero(np.isnan(other))}"
        )
    return float(np.nanmax(np.abs(one - other), initial=0))


def stream_difference(answer: bytes, window_nlls: Sequence[tuple[int, float]]) -> float:
    """Of the windows of an event stream of `/v1/perplexity`, and of the result after them.

    Raises:
        WrongAnswerError: the stream ends early, has an error in it, or its windows are not these.
    """
    events = answer.decode().removesuffix("\n\n").split("\n\n")
    if events.pop() != "data: [DONE]":
        raise WrongAnswerError(f"a stream that ends with {answer[-200:]!r}")
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    if failed := [event for event in found if "error" in event]:
        raise WrongAnswerError(f"an error in a stream: {failed[0]}")
    expected = [*window_nlls, (sum(scored for scored, _ in window_nlls), sum(nll for _, nll in window_nlls))]
    if [event["num_scored"] for event in found] != [scored for scored, _ in expected]:
        raise WrongAnswerError(f"windows of {[event['num_scored'] for event in found]} tokens in place of {expected}")
    return max(abs(event["nll_sum"] - nll) / scored for event, (scored, nll) in zip(found, expected, strict=True))


def check(ask: Ask, status: int, answer: bytes) -> float:
    """The largest difference of a token's logprob from the oracle's, in nats.

    Raises:
        WrongAnswerError: it is no answer, not the one that was asked for, or beyond `BAR`.
    """
    if status != 200:
        raise WrongAnswerError(f"{status} {answer[:300]!r}")
    try:
        difference = ask.difference(answer)
    except (ValueError, LookupError, TypeError) as error:
        raise WrongAnswerError(f"{error!r}, reading {answer[:300]!r}") from error
    if not difference <= BAR:
        raise WrongAnswerError(f"{difference:.2g} nats beside the oracle")
    return difference
