"""`Score`, the log-probabilities of one scored sequence, and how it is read from the wire."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from scoremode._arrays import TopLogprobs, decode_array, decode_top_logprobs
from scoremode.errors import ResponseError
from scoremode.protocol import LOWEST_LOGPROB, ScoreResponse, ScoreResult

_SCORE_RESPONSE = TypeAdapter(ScoreResponse)


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """One scored text, or one continuation. Lists run over `token_ids`; log-probabilities are in nats."""

    index: int
    """Position among all results of the request."""
    prompt_index: int
    continuation_index: int | None
    """None where the prompt itself was scored."""
    token_ids: list[int]
    logprobs: list[float | None]
    """float32 values. None at the first token of a text, which nothing stands before."""
    sum_logprob: float
    """Sum over the scored tokens, in float64."""
    num_scored: int
    ranks: list[int | None] | None
    """Rank of each token in the vocabulary, 1 for the likeliest; with `return_ranks` or continuations."""
    is_greedy: bool | None
    """Whether every scored token was the likeliest one; with `return_ranks` or continuations."""
    tokens: list[str] | None
    """With `return_tokens`."""
    top_logprobs: TopLogprobs | None
    """The likeliest tokens at each position; when asked for."""
    candidate_logprobs: NDArray[np.float32] | None
    """[n, m], of the candidates at each position, in the order in which they were given; NaN where there is no context;
    when asked for."""

    @property
    def nlls(self) -> list[float]:
        """NLLs of the scored tokens, in nats."""
        return [-logprob for logprob in self.logprobs if logprob is not None]


def parse_scores(body: bytes) -> list[Score]:
    """Read the body of a `POST /v1/score` answer.

    Raises:
        ValidationError: it is not a score response.
        ResponseError: its logprobs do not fit its tokens.
    """
    return [_score(result) for result in _SCORE_RESPONSE.validate_json(body)["data"]]


def _score(result: ScoreResult) -> Score:
    logprobs = result["logprobs"]
    if isinstance(logprobs, str):
        logprobs = decode_logprobs(logprobs)
    if len(logprobs) != len(result["token_ids"]):
        raise ResponseError(f"{len(logprobs)} logprobs for {len(result['token_ids'])} tokens in the server's answer")
    return Score(
        index=result["index"],
        prompt_index=result["prompt_index"],
        continuation_index=result["continuation_index"],
        token_ids=result["token_ids"],
        logprobs=logprobs,
        sum_logprob=result["sum_logprob"],
        num_scored=result["num_scored"],
        ranks=result.get("ranks"),
        is_greedy=result.get("is_greedy"),
        tokens=result.get("tokens"),
        top_logprobs=_top_logprobs(result),
        candidate_logprobs=_candidate_logprobs(result),
    )


def _top_logprobs(result: ScoreResult) -> TopLogprobs | None:
    top = result.get("top_logprobs")
    if isinstance(top, list):
        raise ResponseError("the server's top_logprobs are not in base64")
    return None if top is None else decode_top_logprobs(top)


def _candidate_logprobs(result: ScoreResult) -> NDArray[np.float32] | None:
    candidates = result.get("candidate_logprobs")
    if isinstance(candidates, list):
        raise ResponseError("the server's candidate_logprobs are not in base64")
    if candidates is None:
        return None
    return decode_array("candidate_logprobs", candidates["logprobs"], "<f4", candidates["shape"])


def decode_logprobs(encoded: str) -> list[float | None]:
    """Little-endian float32 in base64 to logprobs; NaN stands for a token without one.

    Minus infinity becomes LOWEST_LOGPROB, as it is in JSON, so that a result does not hang on the encoding.

    Raises:
        ResponseError: it is not base64, or not whole floats.
    """
    values: list[float] = decode_array("logprobs", encoded, "<f4").tolist()
    return [None if math.isnan(value) else max(value, LOWEST_LOGPROB) for value in values]
