"""Requests for the scores of many texts, and their answers, read without a Python object for every token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from scoremode._arrays import decode_array
from scoremode._calls import Call, WholeBody
from scoremode.errors import ResponseError
from scoremode.protocol import LOWEST_LOGPROB


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of one text, or of one window of it."""

    token_ids: list[int]
    sum_logprob: float
    """Nats, over all tokens that were scored."""
    num_scored: int
    encoded_logprobs: str

    def logprobs(self) -> NDArray[np.float32]:
        """Of every token, [num_tokens] in nats; NaN where there is none.

        Raises:
            ResponseError: they are not float32 in base64, one for each token.
        """
        logprobs = decode_array("logprobs", self.encoded_logprobs, "<f4")
        if len(logprobs) != len(self.token_ids):
            raise ResponseError(f"{len(logprobs)} logprobs for {len(self.token_ids)} tokens in the server's answer")
        # Minus infinity is what it is in JSON, and in `sum_logprob`.
        bounded: NDArray[np.float32] = np.maximum(logprobs, np.float32(LOWEST_LOGPROB))
        return bounded


def score_texts(model: str | None, texts: Sequence[str], prefix_token_id: int) -> Call[list[Answer]]:
    """Every token of every text, each text after the prefix token alone; the server tokenizes."""
    return _score(model, len(texts), prompt=[[prefix_token_id]], continuations=texts)


def score_sequences(model: str | None, sequences: Sequence[Sequence[int]]) -> Call[list[Answer]]:
    """Every token but the first of sequences of token ids."""
    return _score(model, len(sequences), prompt=sequences)


def _score(model: str | None, num_answers: int, **fields: object) -> Call[list[Answer]]:
    body = {**fields, "encoding_format": "base64"}
    if model is not None:
        body["model"] = model
    return Call("POST", "/v1/score", lambda: WholeBody(lambda content: _parse(content, num_answers)), body)


def _parse(content: bytes, num_answers: int) -> list[Answer]:
    try:
        answers = [_answer(result) for result in from_json(content)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ResponseError(f"the server's answer is not what the protocol says: {error}") from error
    if len(answers) != num_answers:
        raise ResponseError(f"the server gave {len(answers)} scores for {num_answers} texts")
    return answers


def _answer(result: dict[str, Any]) -> Answer:
    return Answer(result["token_ids"], float(result["sum_logprob"]), int(result["num_scored"]), result["logprobs"])
