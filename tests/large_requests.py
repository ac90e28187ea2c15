"""Requests that a short body makes large, and the bound that is meant for each."""

from typing import Any

from tests.bad_inputs import COMPLETIONS, PERPLEXITY, SCORE

TURNS = "/v1/turns"


def chat(*contents: Any) -> dict[str, Any]:
    """A conversation with these contents, by turns."""
    return {"messages": [{"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(contents)]}


LINE = '{"a": [1, {"b": "\\"}"}]}\n'
TOO_LONG = (400, "messages", "and the model takes at most")
TOO_MANY_TOKENS = "tokens, but the model takes at most 2048"
TOO_MANY_MESSAGES = (400, "messages", "messages, and can have at most 1024")
MANY_PROMPTS = {"prompt": [[5] * 2000] * 140, "max_tokens": 1}
PAIRS = {"prompt": [[5] * 2000] * 60, "continuations": [[each % 900, 6] for each in range(900)]}
NOTHING = (0, 0)

PRODUCTS = {
    "600 messages": (SCORE, chat(*["Yes."] * 600), (400, "messages", TOO_MANY_TOKENS), (1, 40_000)),
    "1,025 messages": (TURNS, chat(*["Yes."] * 1025), TOO_MANY_MESSAGES, NOTHING),
    "20,000 messages": (PERPLEXITY, chat(*["Yes."] * 20_000), TOO_MANY_MESSAGES, NOTHING),
    "66,560 messages of all": (
        *(TURNS, {"messages": [chat(*["Why?"] * 1024)["messages"]] * 65}),
        *((400, "messages", "has 66560 sequences to score"), NOTHING),
    ),
    "a long message": (TURNS, chat("word " * 200_000, "Yes."), TOO_LONG, (1, 0)),
    # Brackets and commas in texts are not counted.
    "JSON in messages": (TURNS, chat(*[LINE * 400] * 100), TOO_LONG, (1, 0)),
    "JSON in a tool": (TURNS, chat("?", "So.") | {"tools": [{"type": LINE * 30_000}]}, (400, "tools", "type"), NOTHING),
    # A prompt's length is checked before it is multiplied by continuations.
    "long ids": (
        *(SCORE, {"prompt": [5] * 10_000, "continuations": [[6]] * 3000}),
        *((400, "prompt", TOO_MANY_TOKENS), NOTHING),
    ),
    "a text of no more than the bound": (
        *(SCORE, {"prompt": "x" * 10_000, "continuations": list("abcd")}),
        *((400, "prompt", TOO_MANY_TOKENS), (0, 60_000)),
    ),
    "a long text": (
        *(SCORE, {"prompt": "word " * 3000, "continuations": [" a", " b"]}),
        *((400, "prompt", TOO_MANY_TOKENS), (0, 50_000)),
    ),
    "many ids": (SCORE, PAIRS | {"return_ranks": True}, (413, "prompt", "(--max-scoring-tokens)"), NOTHING),
    **{
        name: (
            *(SCORE, {"prompt": prompts, "continuations": texts}),
            *((413, "continuations", "(--max-request-bytes)"), NOTHING),
        )
        for name, prompts, texts in (
            ("one context", "x" * 100_000, [" a"] * 4000),
            ("many contexts", ["x" * 500] * 16_000, list("abcd")),
            ("lists of their own", ["x" * 10_000] * 40, [[f" {each}" for each in range(50)]] * 40),
        )
    },
    "a text after tokens": (
        *(SCORE, {"prompt": [[5]] * 10_000, "continuations": [" a" * 1000]}),
        *((413, "prompt", "10000000 logprobs"), (0, 2000)),
    ),
    **{
        f"logprobs of {list(fields)}": (
            *(COMPLETIONS, MANY_PROMPTS | fields),
            *((413, "prompt", "logprobs with top tokens"), NOTHING),
        )
        for fields in (
            *({"prompt_logprobs": 256}, {"echo": True, "logprobs": 250}),
            {"echo": True, "prompt_logprobs": 240},
        )
    },
}
"""(route, body, error as status, field and a part of its message, most renderings and characters that are encoded)."""
