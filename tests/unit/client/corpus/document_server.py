"""The fake server with what `corpus` asks for: continuations of the prefix token, and the bound of the context."""

import base64
import json
from collections.abc import Iterable

import httpx
from fake_scoremode import BOS, MAX_MODEL_LEN, answer, copy_of, error, logprob, score_response


def nlls(text: str, context_length: int = MAX_MODEL_LEN - 1) -> list[float]:
    """NLL of every byte, in nats, in `rolling` windows: lm-eval's, written out once more."""
    tokens = list(text.encode())
    values = []
    for start in range(0, len(tokens), context_length):
        end = min(start + context_length, len(tokens))
        # A later window has the token before its first target, and the last one reaches back until it is full.
        context = [BOS] if start == 0 else tokens[end - context_length - 1 : start]
        window = [*context, *tokens[start:end]]
        values += [-logprob(window, position) for position in range(len(context), len(window))]
    return values


class DocumentServer:
    """Answers as `fake_scoremode`; keeps the requests for scores.

    Args:
        refused: Texts that it answers 400 for, whatever else is in the request.
    """

    def __init__(self, refused: Iterable[str] = ()) -> None:
        self.requests: list[dict] = []
        self.num_tokenized = 0
        """Texts that were to be tokenized alone."""
        self.num_scored = 0
        """Documents and windows."""
        self._refused = set(refused)

    def __call__(self, request: httpx.Request) -> httpx.Response | None:
        if request.method != "POST" or request.url.path not in ("/v1/score", "/tokenize"):
            return answer(request)
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            self.num_tokenized += 1
            return copy_of(error(400, "broken")) if body["prompt"] in self._refused else answer(request)
        self.requests.append(body)
        return self.score(body)

    def score(self, body: dict) -> httpx.Response:
        texts = body.get("continuations")
        if texts is None:
            sequences = body["prompt"]
        else:
            assert body["prompt"] == [[BOS]]
            sequences = [[BOS, *text.encode()] for text in texts]
            if self._refused.intersection(texts):
                return copy_of(error(400, "broken", param="continuations"))
        for index, sequence in enumerate(sequences):
            if len(sequence) > MAX_MODEL_LEN:
                return copy_of(error(400, f"[{index}] has {len(sequence)} tokens, the model takes {MAX_MODEL_LEN}"))
        self.num_scored += len(sequences)
        response = score_response(sequences)
        if texts is not None:
            for index, result in enumerate(response["data"]):
                result |= {"prompt_index": 0, "continuation_index": index, "token_ids": result["token_ids"][1:]}
                # Base64 of float32: the prefix token's NaN is cut off.
                result["logprobs"] = _without_first(result["logprobs"])
        return httpx.Response(200, json=response)


def _without_first(encoded: str) -> str:
    return base64.b64encode(base64.b64decode(encoded)[4:]).decode()
