"""`Score`, the log-probabilities of one scored sequence, and how it is read from the wire."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from scoremode._arrays import TopLogprobs, decode_array, decode_top_logprobs
from scoremode.errors import ResponseError
from scoremode.protocol import LOWEST_LOGPROB, ScoreResponse, ScoreResult

_SCORE_RESPONSE = TypeAdapter(ScoreResponse)
_LOWEST = np.float32(LOWEST_LOGPROB)


# Not frozen: a request may have hundreds of texts, and setting frozen fields takes as long as decoding their values.
@dataclass(eq=False)
class Score:
    """One scored text, or one continuation. Lists and arrays run over `token_ids`; log-probabilities are in nats."""

    index: int
    """Position among all results of the request."""
    prompt_index: int
    continuation_index: int | None
    """None where the prompt itself was scored."""
    token_ids: list[int]
    logprob_array: NDArray[np.float32]
    """[n], NaN at the first token of a text, which has no context."""
    sum_logprob: float
    """Sum over the scored tokens, in float64."""
    num_scored: int
    ranks: list[int | None] | None
    """Rank of each token in the vocabulary, 1 for the most likely; with `return_ranks` or continuations."""
    is_greedy: bool | None
    """Whether every scored token was the most likely one; with `return_ranks` or continuations."""
    tokens: list[str] | None
    """With `return_tokens`."""
    top_logprobs: TopLogprobs | None
    """The most likely tokens at each position; when asked for."""
    candidate_logprobs: NDArray[np.float32] | None
    """[n, m], of the candidates at each position, in the order in which they were given; NaN where there is no context;
    when asked for."""

    @cached_property
    def logprobs(self) -> list[float | None]:
        """`logprob_array` as a list, with None in place of NaN."""
        return [None if math.isnan(logprob) else logprob for logprob in self.logprob_array.tolist()]

    @property
    def nlls(self) -> list[float]:
        """NLLs of the scored tokens, in nats."""
        nlls: list[float] = (-self.logprob_array[~np.isnan(self.logprob_array)]).tolist()
        return nlls


def parse_scores(body: bytes) -> list[Score]:
    """Read the body of a `POST /v1/score` answer."""
    return [_score(result) for result in _SCORE_RESPONSE.validate_json(body)["data"]]


def _score(result: ScoreResult) -> Score:
    sent, candidates = result["logprobs"], result.get("candidate_logprobs")
    logprobs = decode_array("logprobs", sent, "<f4") if isinstance(sent, str) else np.array(sent, np.float32)
    if len(logprobs) != len(result["token_ids"]):
        raise ResponseError(f"{len(logprobs)} logprobs for {len(result['token_ids'])} tokens in the server's answer")
    if isinstance(candidates, list):
        raise ResponseError("the server's candidate_logprobs are not in base64")
    return Score(
        index=result["index"],
        prompt_index=result["prompt_index"],
        continuation_index=result["continuation_index"],
        token_ids=result["token_ids"],
        # Minus infinity is what it is in JSON, and in `sum_logprob`.
        logprob_array=np.maximum(logprobs, _LOWEST),
        sum_logprob=result["sum_logprob"],
        num_scored=result["num_scored"],
        ranks=result.get("ranks"),
        is_greedy=result.get("is_greedy"),
        tokens=result.get("tokens"),
        top_logprobs=decode_top_logprobs(result.get("top_logprobs")),
        candidate_logprobs=None
        if candidates is None
        else decode_array("candidate_logprobs", candidates["logprobs"], "<f4", candidates["shape"]),
    )
