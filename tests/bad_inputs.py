"""Requests that are refused, and how: the table of docs/errors.md, and what tests post to a running server.

python -m tests.bad_inputs      write docs/errors.md
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"

SCORE = "/v1/score"
PERPLEXITY = "/v1/perplexity"
COMPLETIONS = "/v1/completions"
REFERENCES = "/v1/references"
KLD = "/v1/kld"
TOKENS = "/v1/tokens"

JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
TOO_MANY_DIGITS = "1" * 5000


class BadInput(NamedTuple):
    """A request that is refused, on a server that has a context of 2,048 tokens, a vocabulary that ends before 10**6,
    and a folder for references."""

    wrong: str
    route: str
    body: Any
    """Bytes as they are, anything else as JSON."""
    status: int
    param: str | None
    message: str
    """How it begins."""
    headers: Mapping[str, str] = JSON
    needs_engine: bool = False
    """A model, a tokenizer or vLLM's own route finds the fault."""

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def scoring(**fields: Any) -> dict[str, Any]:
    """A scoring completion."""
    return {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 1, **fields}


NOT_JSON = "the body is not valid JSON: "
PROMPT_FORMS = "prompt: must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
SURROGATE = r"\ud800 is half of a surrogate pair, not a character"

BODIES: list[tuple[Any, ...]] = [
    ("no body", b"", 400, None, NOT_JSON + "Input data was truncated"),
    ("the body is cut off", b'{"prompt": ', 400, None, NOT_JSON + "Input data was truncated"),
    ("the body is a list", [1, 2], 400, None, "the body must be a JSON object"),
    ("the body is null", b"null", 400, None, "the body must be a JSON object"),
    ("the body is plain text", b"hello", 400, None, NOT_JSON + "invalid character (byte 0)"),
    ("something after the object", b'{"prompt": [5, 6]} x', 400, None, NOT_JSON + "trailing characters"),
    ("a comma too many", b'{"prompt": [5, 6],}', 400, None, NOT_JSON + "trailing comma in object (byte 18)"),
    ("a number that is none", b'{"prompt": [5, 06]}', 400, "prompt", NOT_JSON + "invalid number (byte 16)"),
    ("NaN", b'{"prompt": [5, 6], "temperature": NaN}', 400, "temperature", NOT_JSON + "invalid character"),
    ("UTF-16", '{"prompt": "a"}'.encode("utf-16"), 400, None, NOT_JSON + "invalid character (byte 0)"),
    ("a name that is not UTF-8", b'{"caf\xe9": 1}', 400, None, NOT_JSON + "the name of a field is not UTF-8"),
    ("a model that is not UTF-8", b'{"prompt": [5], "model": "\xff"}', 400, "model", "model is not valid UTF-8"),
    ("nested too deep", b'{"prompt": ' + b"[" * 100_000, 400, None, NOT_JSON + "it is nested too deep"),
    ("half a surrogate pair", b'{"prompt": "a\\ud800"}', 400, "prompt", f"prompt: {SURROGATE}"),
    ("half of one in a list", b'{"prompt": ["a", "\\ud800 b"]}', 400, "prompt", f"prompt: {SURROGATE}"),
    ("half of one in the model", b'{"prompt": [5], "model": "\\ud800"}', 400, "model", f"model: {SURROGATE}"),
    ("half of one in a name", b'{"prompt": [5], "\\ud800": 1}', 400, None, f"the name of a field: {SURROGATE}"),
    ("a number of 5,000 digits", f'{{"model": {TOO_MANY_DIGITS}}}'.encode(), 400, "model", "model: number too large"),
    ("a model of a wrong type", {"prompt": [5], "model": 5}, 400, "model", "model: should be a valid string"),
]
"""(what is wrong, body, status, param, message) on every route."""

PROMPTS: list[tuple[Any, ...]] = [
    ("text that is not UTF-8", b'{"prompt": "caf\xe9"}', 400, "prompt", "prompt is not valid UTF-8"),
    (
        "a token id of 5,000 digits",
        f'{{"prompt": [5, {TOO_MANY_DIGITS}]}}'.encode(),
        400,
        "prompt",
        "prompt[1]: number",
    ),
    ("a number past float64", b'{"prompt": [5, 1e999]}', 400, "prompt", "prompt[1]: number too large"),
    ("a prompt of a wrong type", {"prompt": 5}, 400, "prompt", "prompt: must be"),
    ("a fraction among token ids", {"prompt": [5, 6, 1.5]}, 400, "prompt", "prompt[2] must be a token id, not a float"),
    ("a list of fractions", {"prompt": [1.5] * 100_000}, 400, "prompt", "prompt[0] must be a token id, not a float"),
    ("a text among token ids", {"prompt": [1, "a"]}, 400, "prompt", "prompt[1] must be a token id, not a string"),
    ("null among token ids", {"prompt": [1, None]}, 400, "prompt", "prompt[1] must be a token id, not null"),
    ("an object among token ids", {"prompt": [1, {}]}, 400, "prompt", "prompt[1] must be a token id, not an object"),
]
"""On every route that has a prompt."""

SCORE_OR_COMPLETIONS = [
    ("a number among texts", {"prompt": ["a", 1]}, 400, "prompt", "prompt[1] must be a string, not a number"),
    (
        "a number among lists",
        {"prompt": [[5], 6]},
        400,
        "prompt",
        "prompt[1] must be a list of token ids, not a number",
    ),
    ("a text in a list of ids", {"prompt": [[5], [6, "a"]]}, 400, "prompt", "prompt[1][1] must be a token id, not a"),
    ("too many lists", {"prompt": [[1]] * 100_001}, 400, "prompt", "prompt has 100001 lists, but a request can"),
]

OF_SCORE: list[tuple[Any, ...]] = [
    ("no prompt", {}, 400, "prompt", "prompt is required"),
    ("an object as prompt", {"prompt": {}}, 400, "prompt", PROMPT_FORMS),
    ("no token", {"prompt": []}, 400, "prompt", "prompt is empty: there is no token to score"),
    ("no text", {"prompt": ""}, 400, "prompt", "prompt[0] is empty", JSON, True),
    ("an empty sequence", {"prompt": [[5, 6], []]}, 400, "prompt", "prompt[1] is empty"),
    ("booleans as token ids", {"prompt": [True]}, 400, "prompt", "prompt[0] must be a token id, not a b"),
    ("a token past the vocabulary", {"prompt": [[5], [10**6]]}, 400, "prompt", "prompt[1] has token id 1"),
    ("a negative token", {"prompt": [-1, 1]}, 400, "prompt", "prompt[0] has token id -1, outside the"),
    ("a token past 64 bits", {"prompt": [1, 2**70]}, 400, "prompt", f"prompt[0] has token id {2**70}"),
    ("a sequence too long", {"prompt": [5] * 2049}, 400, "prompt", "prompt[0] has 2049 tokens, but"),
    ("an unknown field", {"prompt": [5], "n": 1}, 400, "n", "unknown field n"),
    ("large unknown fields", {"prompt": [5], "x": [{}] * 10_000}, 400, "x", "unknown field x"),
    ("a number as text", {"prompt": [5], "top_logprobs": "5"}, 400, "top_logprobs", "top_logprobs: should"),
    ("a list as a number", {"prompt": [5], "top_logprobs": [1]}, 400, "top_logprobs", "top_logprobs: should"),
    ("a number that is a float", {"prompt": [5], "top_logprobs": 1.0}, 400, "top_logprobs", "top_logprobs: "),
    ("too many alternatives", {"prompt": [5], "top_logprobs": 257}, 400, "top_logprobs", "top_logprobs: s"),
    ("a boolean as text", {"prompt": [5], "use_cache": "no"}, 400, "use_cache", "use_cache: should be a"),
    ("an unknown encoding", {"prompt": [5], "encoding_format": "hex"}, 400, "encoding_format", "encoding_"),
    ("an unknown model", {"prompt": [5], "model": "gpt-5"}, 404, "model", "The model `gpt-5` does not"),
    ("no continuation", {"prompt": [5], "continuations": []}, 400, "continuations", "continuations is empty"),
    ("a text as continuations", {"prompt": [5], "continuations": "a"}, 400, "continuations", "continuations: "),
    (
        "token ids as continuations",
        {"prompt": [5], "continuations": [5]},
        400,
        "continuations",
        "continuations[0] must be a list of token ids, not a number",
    ),
    (
        "an empty continuation",
        {"prompt": [5], "continuations": [[6], []]},
        400,
        "continuations",
        "continuations[1] after prompt[0] has no token of its own",
    ),
    (
        "an empty text as continuation",
        {"prompt": "one", "continuations": [" two", ""]},
        400,
        "continuations",
        "continuations[1] after prompt[0] has no token of its own",
        JSON,
        True,
    ),
    (
        "a continuation too long",
        {"prompt": [5], "continuations": [[5] * 2048]},
        400,
        "continuations",
        "continuations[0] after prompt[0] has 2049 tokens, but the model takes at most",
    ),
    ("an empty context", {"prompt": [[]], "continuations": [[6]]}, 400, "prompt", "prompt[0] is empty"),
]

OF_PERPLEXITY: list[tuple[Any, ...]] = [
    ("no text", {}, 400, "prompt", "give either prompt, one text, or texts, several"),
    ("a text twice", {"prompt": [5], "texts": ["a"]}, 400, "prompt", "give either prompt, one text"),
    ("several prompts", {"prompt": [[5]]}, 400, "prompt", "prompt[0] must be a token id, not a list"),
    ("token ids as texts", {"texts": [5, 6]}, 400, "texts", "texts[0] must be a string, not a number"),
    ("one text as texts", {"texts": "a"}, 400, "texts", "texts: should be a valid list"),
    ("half a surrogate pair in texts", b'{"texts": ["\\udc00"]}', 400, "texts", r"texts: \udc00 is half"),
    ("texts too short", {"texts": []}, 400, "texts", "no token can be scored: texts has 0 tokens"),
    ("a text too short", {"prompt": [5]}, 400, "prompt", "no token can be scored: prompt has 1 tokens"),
    ("a token past the vocabulary", {"prompt": [5, 10**6]}, 400, "prompt", "prompt has token id 1000000"),
    ("an unknown method", {"prompt": [5], "method": "strided"}, 400, "method", "method: should be"),
    ("a window too long", {"prompt": [5, 6], "context_length": 2049}, 400, "context_length", ""),
    (
        "a rolling window too long",
        {"prompt": [5, 6], "method": "rolling", "context_length": 2048},
        400,
        "context_length",
        "",
    ),
    (
        "a stride for a method without",
        {"prompt": [5, 6], "method": "disjoint", "context_length": 8, "stride": 4},
        400,
        "stride",
        "",
    ),
    ("a context of one", {"prompt": [5], "context_length": 1}, 400, "context_length", "context_length: "),
    ("no stride", {"prompt": [5, 6], "stride": 0}, 400, "stride", "stride: should be greater than or"),
    ("a stride past the context", {"prompt": [5, 6], "context_length": 8, "stride": 9}, 400, "stride", ""),
    ("a fraction of a token", {"prompt": [5], "max_tokens": 1.5}, 400, "max_tokens", "max_tokens: "),
]

OF_COMPLETIONS: list[tuple[Any, ...]] = [
    ("a negative token", {"prompt": [5, -1]}, 400, "prompt", "prompt has the negative token id -1"),
    ("a negative token in a list", {"prompt": [[5], [-1]]}, 400, "prompt", "prompt[1] has the negative"),
    ("no prompt", {}, 400, "prompt", "Either prompt or prompt_embeds must be provided"),
    ("too many prompts", {"prompt": ["a"] * 1025}, 400, "prompt", "prompt list length 1025 exceeds"),
    (
        "half a surrogate pair",
        b'{"prompt": [5], "request_id": "\\ud800"}',
        400,
        "request_id",
        f"request_id: {SURROGATE}",
    ),
    ("half of one in a list", b'{"prompt": [5], "stop": ["a", "\\ud800"]}', 400, "stop", f"stop: {SURROGATE}"),
    (
        "half of one in an object",
        b'{"prompt": [5], "vllm_xargs": {"a": "\\ud800"}}',
        400,
        "vllm_xargs",
        f"vllm_xargs: {SURROGATE}",
    ),
    (
        "half of one in a scoring request",
        b'{"prompt": [5, 6], "echo": true, "logprobs": 1, "max_tokens": 1, "user": "\\udfff"}',
        400,
        "user",
        r"user: \udfff is half of a surrogate pair",
    ),
    ("a temperature that is none", scoring(temperature="warm"), 400, "temperature", "temperature: "),
    ("a wrong stop string", {"prompt": [5], "stop": ["a", 5]}, 400, "stop", "stop: should be"),
    (
        "too many token ids",
        {"prompt": [5], "stop_token_ids": [1] * 500_001},
        400,
        "stop_token_ids",
        "stop_token_ids has 500001 values, but a request can have at most 500000",
    ),
    ("logprobs that are none", scoring(logprobs="x"), 400, "logprobs", "`logprobs` must be an integer"),
    ("an unknown model", scoring(model="gpt-5"), 404, "model", "The model `gpt-5`", JSON, True),
    ("a token past the vocabulary", scoring(prompt=[10**6]), 400, None, "Token id 1000000", JSON, True),
    ("a token past 64 bits", scoring(prompt=[2**70]), 400, None, "", JSON, True),
    ("a sequence too long", scoring(prompt=[5] * 2049), 400, "input_tokens", "This model's", JSON, True),
]

OF_REFERENCES: list[tuple[Any, ...]] = [
    ("no name", {"prompt": [5, 6]}, 400, "name", "name is required"),
    ("a path as name", {"prompt": [5, 6], "name": "../a"}, 400, "name", "name: String should match pattern"),
    ("a hidden name", {"prompt": [5, 6], "name": ".a"}, 400, "name", "name: String should match pattern"),
    ("an empty name", {"prompt": [5, 6], "name": ""}, 400, "name", "name: String should match pattern"),
    ("a name with a line break", {"prompt": [5, 6], "name": "a\n"}, 400, "name", "name: String should match pattern"),
    ("a name too long", {"prompt": [5, 6], "name": "a" * 129}, 400, "name", "name: String should match pattern"),
    ("a number as name", {"prompt": [5, 6], "name": 5}, 400, "name", "name: should be a valid string"),
    ("no text", {"name": "a"}, 400, "prompt", "give either prompt, one text, or texts, several"),
    ("a text too short", {"name": "a", "prompt": [5]}, 400, "prompt", "no token can be scored: prompt has 1 tokens"),
    ("an unknown method", {"name": "a", "prompt": [5], "method": "strided"}, 400, "method", "method: should be"),
    ("a window too long", {"name": "a", "prompt": [5, 6], "context_length": 2049}, 400, "context_length", ""),
    (
        "an unknown field",
        {"name": "a", "prompt": [5, 6], "overwrite": True},
        400,
        "overwrite",
        "unknown field overwrite",
    ),
    ("an unknown model", {"name": "a", "prompt": [5, 6], "model": "gpt-5"}, 404, "model", "The model `gpt-5` does not"),
]

OF_KLD: list[tuple[Any, ...]] = [
    ("no reference", {}, 400, "reference", "reference is required"),
    ("a path as reference", {"reference": "../a"}, 400, "reference", "reference: String should match pattern"),
    ("an unknown reference", {"reference": "x"}, 404, "reference", "there is no reference 'x'"),
    ("a number as windows", {"reference": "x", "windows": 1}, 400, "windows", "windows: should be a valid list"),
    ("one window", {"reference": "x", "windows": [1]}, 400, "windows", "windows: List should have at least 2 items"),
    (
        "texts as windows",
        {"reference": "x", "windows": ["0", "1"]},
        400,
        "windows",
        "windows[0]: should be a valid int",
    ),
    ("too many windows", {"reference": "x", "windows": [0] * 500_001}, 400, "windows", "windows has 500001 values"),
    (
        "too many alternatives",
        {"reference": "x", "top_logprobs": 257},
        400,
        "top_logprobs",
        "top_logprobs: should be",
    ),
    (
        "an unknown encoding",
        {"reference": "x", "encoding_format": "hex"},
        400,
        "encoding_format",
        "encoding_format: ",
    ),
    (
        "a boolean as text",
        {"reference": "x", "as_noise_floor": "no"},
        400,
        "as_noise_floor",
        "as_noise_floor: should",
    ),
    ("a prompt", {"reference": "x", "prompt": [5, 6]}, 400, "prompt", "unknown field prompt"),
    ("an unknown model", {"reference": "x", "model": "gpt-5"}, 404, "model", "The model `gpt-5` does not"),
]

OF_TOKENS: list[tuple[Any, ...]] = [
    ("no token ids", {}, 400, "token_ids", "token_ids is required"),
    ("a text", {"token_ids": "a"}, 400, "token_ids", "token_ids: should be a valid list"),
    ("a list of lists", {"token_ids": [[5]]}, 400, "token_ids", "token_ids[0] must be a token id, not a list"),
    ("a fraction", {"token_ids": [5, 1.5]}, 400, "token_ids", "token_ids[1] must be a token id, not a float"),
    ("booleans", {"token_ids": [True]}, 400, "token_ids", "token_ids[0] must be a token id, not a boolean"),
    ("a token past the vocabulary", {"token_ids": [5, 10**6]}, 400, "token_ids", "token_ids has token id 1000000"),
    ("a negative token", {"token_ids": [-1]}, 400, "token_ids", "token_ids has token id -1, outside the vocabulary"),
    ("more than the vocabulary", {"token_ids": [5] * 10**6}, 400, "token_ids", "token_ids has 1000000 tokens, and"),
    ("a prompt", {"token_ids": [5], "prompt": [5]}, 400, "prompt", "unknown field prompt"),
    ("an unknown model", {"token_ids": [5], "model": "gpt-5"}, 404, "model", "The model `gpt-5` does not"),
]

HEADERS: list[tuple[Any, ...]] = [
    ("compressed", b"\x1f\x8b\x08", 415, None, "Content-Encoding gzip is not", {**JSON, "Content-Encoding": "gzip"}),
    ("another type", b"prompt=a", 400, None, "Unsupported Media Type: Only 'application/json'", FORM),
]

WITH_A_PROMPT: list[tuple[Any, ...]] = [*BODIES, *PROMPTS, *HEADERS]

BAD_INPUTS = [
    BadInput(wrong, route, *row)
    for route, rows in (
        (SCORE, [*WITH_A_PROMPT, *SCORE_OR_COMPLETIONS, *OF_SCORE]),
        (PERPLEXITY, [*WITH_A_PROMPT, *OF_PERPLEXITY]),
        (COMPLETIONS, [*WITH_A_PROMPT, *SCORE_OR_COMPLETIONS, *OF_COMPLETIONS]),
        (REFERENCES, [*WITH_A_PROMPT, *OF_REFERENCES]),
        (KLD, [*BODIES, *HEADERS, *OF_KLD]),
        (TOKENS, [*BODIES, *HEADERS, *OF_TOKENS]),
    )
    for wrong, *row in rows
]

HEAD = """\
# Errors

Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`. `code` repeats the HTTP status, and
`param` names the field at fault, where there is one. A request is refused at the first wrong value of a prompt; of
other fields up to five faults are named.

A body is JSON in UTF-8 (RFC 8259), uncompressed, and at most `--max-request-bytes` long; a longer one gets 413.
Half a surrogate pair, which JSON can write as an escape and UTF-8 cannot, is refused wherever it is. A field has at
most 100,000 lists of token ids, and fields of `/v1/completions` other than the prompt have at most 500,000 values.

Scoremode's own routes coerce nothing: `"top_logprobs": "5"` and an unknown field are errors.
`/v1/completions` validates as vLLM does. Without `--reference-dir` whatever else is sent to `/v1/references` and
`/v1/kld` is answered 404.

Each of these requests is sent by a test. Messages are shown as they begin. `tests/bad_inputs.py` has the table, and
`make errors` writes this page.
"""

_SHOWN = 60
"""Characters of a body that the page shows."""


def page() -> str:
    """docs/errors.md."""
    routes = dict.fromkeys(row.route for row in BAD_INPUTS)
    return HEAD + "".join(_section(route) for route in routes)


def _section(route: str) -> str:
    lines = [f"\n## `{route}`\n", "| wrong | body | status | `param` | message |", "|---|---|---|---|---|"]
    for row in BAD_INPUTS:
        if row.route == route:
            param = f"`{row.param}`" if row.param else ""
            lines.append(f"| {row.wrong} | {_shown(row.content)} | {row.status} | {param} | {_escaped(row.message)} |")
    return "\n".join(lines) + "\n"


def _shown(content: bytes) -> str:
    text = content[: _SHOWN + 1].decode("latin-1")
    printable = "".join(char if " " <= char <= "~" else f"<{ord(char):02x}>" for char in text)
    shown = printable if len(content) <= _SHOWN else printable[: _SHOWN - 1] + "…"
    return f"`{shown}`" if shown else ""


def _escaped(message: str) -> str:
    return message.replace("|", r"\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
