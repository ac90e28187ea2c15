"""Requests that are refused, and how."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from scoremode.wire.protocol import PROMPT_FORMS

SCORE = "/v1/score"
PERPLEXITY = "/v1/perplexity"
COMPLETIONS = "/v1/completions"
REFERENCES = "/v1/references"
KLD = "/v1/kld"
TOKENS = "/v1/tokens"

CANDIDATES = "candidate_token_ids"

JSON = {"Content-Type": "application/json"}
TOO_MANY_DIGITS = "1" * 5000


class BadInput(NamedTuple):
    """A request that is refused, on a server that has a context of 2,048 tokens, a vocabulary that ends before 10**6,
    and a folder for references."""

    wrong: str
    route: str
    body: Any
    """Bytes as they are, anything else as JSON."""
    param: str | None
    message: str | tuple[str, ...]
    """Its beginning, or the beginnings that releases of a library give it."""
    status: int = 400
    headers: Mapping[str, str] = JSON

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    def check(self, response: httpx.Response) -> None:
        """Check that a response refuses this request, and names its field."""
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (self.status, self.status, self.param)
        assert error["message"].startswith(self.message)
        assert len(error["message"]) < 1000
        assert set(error) == {"message", "type", "param", "code"}


NOT_JSON = "the body is not valid JSON: "
NOT_UTF_8 = ("'utf-8' codec can't decode byte", "Invalid UTF-8 encoded string")
"""Reasons that msgspec gives before 0.23, and since."""
PROMPT_MUST_BE = f"prompt: {PROMPT_FORMS}"
NO_TOKEN_OF_ITS_OWN = "continuations[1] after prompt[0] has no token of its own"
CONTINUED = {"prompt": [5], "continuations": [[6]]}
MESSAGES = {"name": "a", "messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]}
LONG_NAME = "gpt-5" * 200_000
SHORT_NAME = f"The model `{'gpt-5' * 20}…` does not"

EVERY_ROUTE = (SCORE, PERPLEXITY, COMPLETIONS, REFERENCES, KLD, TOKENS)
WITH_A_PROMPT = EVERY_ROUTE[:4]

BODIES: dict[tuple[str, ...], list[tuple[Any, ...]]] = {
    EVERY_ROUTE: [
        ("the body is cut off", b'{"prompt": ', None, NOT_JSON + "Input data was truncated"),
        ("the body is a list", [1, 2], None, "the body must be a JSON object"),
        ("an invalid number", b'{"prompt": [5, 06]}', None, NOT_JSON + "invalid number (byte 16)"),
        ("a name that is not UTF-8", b'{"caf\xe9": 1}', None, tuple(NOT_JSON + reason for reason in NOT_UTF_8)),
        (
            "a model that is not UTF-8",
            b'{"prompt": [5], "model": "\xff"}',
            "model",
            tuple(f"model: {reason}" for reason in NOT_UTF_8),
        ),
        ("nested too deep", b'{"prompt": ' + b"[" * 100_000, None, NOT_JSON + "maximum recursion depth"),
        ("half a surrogate", b'{"prompt": "a\\udc00"}', None, NOT_JSON + "invalid utf-16 surrogate pair (b"),
        (
            "a number of 5,000 digits",
            f'{{"model": {TOO_MANY_DIGITS}}}'.encode(),
            "model",
            "model: Integer",
        ),
        ("a model of a wrong type", {"prompt": [5], "model": 5}, "model", "model: should be a valid string"),
        (
            *("compressed", b"\x1f\x8b\x08", None, "Content-Encoding gzip is not", 415),
            {**JSON, "Content-Encoding": "gzip"},
        ),
        (
            *("another type", b"prompt=a", None, "Unsupported Media Type: Only 'application/json'", 400),
            {"Content-Type": "application/x-www-form-urlencoded"},
        ),
    ],
    (*WITH_A_PROMPT[:2], *EVERY_ROUTE[3:]): [
        ("a field given twice", b'{"model": "m", "model": "n"}', "model", "model is given more than once"),
    ],
    WITH_A_PROMPT: [
        (
            "text that is not UTF-8",
            b'{"prompt": "caf\xe9"}',
            "prompt",
            tuple(f"prompt: {reason}" for reason in NOT_UTF_8),
        ),
        (
            "a token id of 5,000 digits",
            f'{{"prompt": [5, {TOO_MANY_DIGITS}]}}'.encode(),
            "prompt",
            "prompt: Integer",
        ),
        ("a fraction among token ids", {"prompt": [5, 6, 1.5]}, "prompt", "prompt: must be a string"),
    ],
    (SCORE, COMPLETIONS): [
        ("a number among texts", {"prompt": ["a", 1]}, "prompt", PROMPT_MUST_BE + "; [1] should be a valid string"),
        ("a number among lists", {"prompt": [[5], 6]}, "prompt", PROMPT_MUST_BE + "; [1] should be a valid list"),
        (
            "a text in a list of ids",
            {"prompt": [[5], [6, "a"]]},
            "prompt",
            PROMPT_MUST_BE + "; [1][1] ",
        ),
        ("too many lists", {"prompt": [[1]] * 2**18}, "prompt", "prompt has 262145 lists and objects, but a"),
    ],
    (SCORE,): [
        ("no prompt", {}, "prompt", "prompt or messages is required"),
        ("no token", {"prompt": []}, "prompt", "prompt is empty: there is no token to score"),
        ("no text", {"prompt": ""}, "prompt", "prompt[0] is empty"),
        ("an empty sequence", {"prompt": [[5, 6], []]}, "prompt", "prompt[1] is empty"),
        ("booleans as token ids", {"prompt": [True]}, "prompt", PROMPT_MUST_BE),
        ("a token past the vocabulary", {"prompt": [[5], [10**6]]}, "prompt", "prompt[1] has token id 1"),
        ("a negative token", {"prompt": [-1, 1]}, "prompt", "prompt[0] has token id -1, outside the"),
        ("a token past 64 bits", {"prompt": [1, 2**70]}, "prompt", f"prompt[0] has token id {2**70}"),
        ("a sequence too long", {"prompt": [5] * 2049}, "prompt", "prompt[0] has 2049 tokens, but"),
        ("an empty list", {"prompt": ["a", "b"], "continuations": [["c"], []]}, "continuations", "continuations[1] is"),
        ("an empty text", {"prompt": "one", "continuations": [" two", ""]}, "continuations", NO_TOKEN_OF_ITS_OWN),
        ("candidate lists", CONTINUED | {"candidate_token_ids": [[1]]}, "candidate_token_ids", "candidate_token_ids: "),
        ("too many prompts", {"prompt": [[5]] * 65_537}, "prompt", "the request has 65537 sequences to score, more"),
        (
            "too many pairs",
            {"prompt": [[5]] * 300, "continuations": [[6]] * 300},
            "continuations",
            "the request has 90000",
        ),
        ("a first position", CONTINUED | {"logprobs_from": 1}, "logprobs_from", "logprobs_from: leave it out with"),
        (
            *("an answer too large", {"prompt": [[5] * 2000] * 40, CANDIDATES: [7] * 250}),
            *("prompt", "the answer would have 20080000 logprobs", 413),
        ),
    ],
    (PERPLEXITY,): [
        ("no text", {}, "prompt", "give either prompt (one text) or texts (several)"),
        ("a text too short", {"prompt": [5]}, "prompt", "no token can be scored: prompt has 1 tokens"),
        ("a rolling one too long", {"prompt": [5], "method": "rolling", "context_length": 2048}, "context_length", ""),
        ("too many windows", {"prompt": [5] * 70_000, "context_length": 8, "stride": 1}, "stride", "the request has 7"),
        ("a stride past the context", {"prompt": [5, 6], "context_length": 8, "stride": 9}, "stride", ""),
    ],
    (COMPLETIONS,): [
        ("a negative token", {"prompt": [5, -1]}, "prompt", PROMPT_MUST_BE + "; [1] should be greater than"),
        ("no prompt", {}, "prompt", "Either prompt or prompt_embeds must be provided"),
        (
            "a field given twice",
            b'{"prompt": [5], "echo": true, "max_tokens": 0, "echo": 1}',
            "echo",
            "echo is given more than once",
        ),
        ("too many prompts", {"prompt": ["a"] * 1025}, "prompt", "prompt list length 1025 exceeds"),
        ("a wrong stop string", {"prompt": [5], "stop": ["a", 5]}, "stop", "stop: should be"),
    ],
    (REFERENCES,): [
        ("no name", {"prompt": [5, 6]}, "name", "name is required"),
        ("a text and messages", MESSAGES | {"prompt": "x"}, "prompt", "prompt cannot be given with messages"),
        ("a method of texts", MESSAGES | {"method": "sliding"}, "method", "messages are scored by method 'conv"),
        ("too many labels", MESSAGES | {"labels": ["one", "two"]}, "labels", "labels has 2 labels for 1"),
        ("a text as messages", {"name": "a", "prompt": "x", "method": "conversation"}, "method", ""),
    ],
    (KLD,): [
        ("no reference", {}, "reference", "reference is required"),
        ("an unknown reference", {"reference": "x"}, "reference", "there is no reference 'x'", 404),
    ],
    (TOKENS,): [("no token ids", {}, "token_ids", "token_ids is required")],
}
"""Bad requests by routes: (fault, body, param, message, status, headers)."""

VALID: dict[str, dict[str, Any]] = {
    SCORE: {"prompt": [5, 6, 7]},
    PERPLEXITY: {"prompt": [5, 6]},
    REFERENCES: {"name": "a", "prompt": [5, 6]},
    KLD: {"reference": "x"},
    TOKENS: {"token_ids": [5]},
}
"""A valid body per route; it may still need an engine or a folder."""

WITH_ONE_FIELD: list[tuple[str, str, str, Any, str]] = [
    (SCORE, "an unknown field", "n", 1, "unknown field n"),
    (SCORE, "too many alternatives", "top_logprobs", 257, "top_logprobs: 257 exceeds this server's limit of "),
    (SCORE, "lists for other prompts", "continuations", [[[5]], [[6]]], "continuations has lists for 2 prompts, and"),
    (SCORE, "token ids as continuations", "continuations", [5], "continuations: must be a list of strings or of"),
    (SCORE, "an empty continuation", "continuations", [[6], []], NO_TOKEN_OF_ITS_OWN),
    (SCORE, "a continuation too long", "continuations", [[5] * 2046], "continuations[0] after prompt[0] has 2049"),
    (SCORE, "no candidate", CANDIDATES, [], "candidate_token_ids must be one or more token ids"),
    (SCORE, "a candidate past the end", CANDIDATES, [1, 10**6], "candidate_token_ids has token id 1000000"),
    (SCORE, "too few lists", CANDIDATES, [[1], [2]], "candidate_token_ids has 2 lists for the 3 positions"),
    (SCORE, "too many candidates", CANDIDATES, [1] * 257, "candidate_token_ids has 257 tokens for a position"),
    (SCORE, "no temperature", "temperature", 0, "temperature: should be greater than or equal to 0.01"),
    (SCORE, "a temperature too high", "temperature", 1e39, "temperature: should be less than or equal to 1000"),
    (SCORE, "a position past the prompt", "logprobs_from", 3, "logprobs_from is 3, but prompt[0] has 3 tokens"),
    (SCORE, "a negative position", "logprobs_from", -1, "logprobs_from: must be a position, counted"),
    *((route, "a lane that the engine lacks", "lane", "verify", "lane") for route in (SCORE, PERPLEXITY)),
    (SCORE, "a context without a lane", "context", 5, "context"),
    (PERPLEXITY, "a token past the vocabulary", "prompt", [5, 10**6], "prompt has token id 1000000"),
    (PERPLEXITY, "a window too long", "context_length", 2049, ""),
    (REFERENCES, "a path as name", "name", "../a", "name: String should match pattern"),
    (REFERENCES, "a name with a line break", "name", "a\n", "name: String should match pattern"),
    (KLD, "one window", "windows", [1], "windows: List should have at least 2 items"),
    (TOKENS, "a token past the vocabulary", "token_ids", [5, 10**6], "token_ids has token id 1000000"),
    (TOKENS, "more than the vocabulary", "token_ids", [5] * 10**6, "token_ids has 1000000 tokens, more than"),
]
"""(route, what is wrong, field, its value, message) of a body that is valid but for this field."""

BAD_INPUTS = [
    *(BadInput(wrong, route, *row) for routes, rows in BODIES.items() for route in routes for wrong, *row in rows),
    *(
        BadInput(wrong, route, VALID[route] | {field: value}, field, message)
        for route, wrong, field, value, message in WITH_ONE_FIELD
    ),
    *(
        BadInput(wrong, route, body | {"model": model}, "model", message, status=404)
        for route, body in VALID.items()
        for wrong, model, message in (
            ("an unknown model", "gpt-5", "The model `gpt-5` does not"),
            ("a long name of a model", LONG_NAME, SHORT_NAME),
        )
    ),
]
