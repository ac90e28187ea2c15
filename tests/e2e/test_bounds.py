"""Requests that a short body makes large: each is answered by the bound that is meant for it, and costs little."""

from typing import Any, NamedTuple

import httpx
import pytest

from tests.bad_inputs import COMPLETIONS, SCORE
from tests.e2e.metrics import metric

TURNS = "/v1/turns"
GENERATE = "/inference/v1/generate"
CONTEXT = 2048


def chat(*contents: Any) -> dict[str, Any]:
    """A conversation with these contents, by turns."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(contents)]
    return {"messages": messages}


def generation(**fields: Any) -> dict[str, Any]:
    return {"token_ids": [5] * 9, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}, **fields}


class Large(NamedTuple):
    route: str
    body: dict[str, Any]
    status: int
    message: str = ""
    """A part of the error's."""
    renderings: int = 0
    """At most."""
    characters: int = 0
    """Of conversations that are encoded, at most."""


TAGS = [("<think>", 8000), ("<think></think>", 4000), ("</think>", 8000), ("<think>a", 8000)]
LINE = '{"a": [1, {"b": "\\"}"}]}\n'
TOO_LONG = "and the model takes at most"
TOO_MANY_TOKENS = "but the model takes at most 2048"
TOO_MUCH_TEXT = "(--max-request-bytes)"
TOO_MANY_MESSAGES = "messages, and can have at most 1024"
NOT_A_TEXT = "that is not a text, content[1]"

LARGE = {
    # A regular expression looked for the end of each.
    **{
        f"{count} {tag}": Large(TURNS, chat("Why?", tag * count), 400, "the model takes at most", 1, 70_000)
        for tag, count in TAGS
    },
    # Each turn was rendered from the beginning.
    "100 messages": Large(TURNS, chat(*["Yes."] * 100), 200, "", 150, 9_000),
    "600 messages": Large(SCORE, chat(*["Yes."] * 600), 400, TOO_MANY_TOKENS, 1, 40_000),
    "1,025 messages": Large(TURNS, chat(*["Yes."] * 1025), 400, TOO_MANY_MESSAGES),
    "20,000 messages": Large("/v1/perplexity", chat(*["Yes."] * 20_000), 400, TOO_MANY_MESSAGES),
    "70,000 conversations": Large(
        TURNS, {"messages": [chat("Why?")["messages"]] * 70_000}, 400, "has 140001 lists and objects"
    ),
    "65,537 messages of all": Large(
        TURNS, {"messages": [chat(*["Why?"] * 1024)["messages"]] * 65}, 400, "has 66560 sequences to score"
    ),
    "a long message": Large(TURNS, chat("word " * 200_000, "Yes."), 400, TOO_LONG, 1),
    # Prompts were multiplied by continuations before their lengths were checked.
    "long ids": Large(SCORE, {"prompt": [5] * 10_000, "continuations": [[6]] * 3000}, 400, TOO_MANY_TOKENS),
    "many ids": Large(
        SCORE,
        {"prompt": [[5] * 2000] * 60, "continuations": [[each % 900, 6] for each in range(900)], "return_ranks": True},
        413,
        "(--max-scoring-tokens)",
    ),
    "a long text": Large(SCORE, {"prompt": "x" * 100_000, "continuations": [" a"] * 4000}, 413, TOO_MUCH_TEXT),
    "many texts": Large(SCORE, {"prompt": ["x" * 500] * 16_000, "continuations": list("abcd")}, 413, TOO_MUCH_TEXT),
    "a text of no more than the bound": Large(
        SCORE, {"prompt": "x" * 10_000, "continuations": list("abcd")}, 400, TOO_MANY_TOKENS
    ),
    # Completions had no bound on logprobs.
    **{
        f"logprobs of {fields}": Large(
            COMPLETIONS, {"prompt": [[5] * 2000] * 140, "max_tokens": 1, **fields}, 413, "logprobs with top tokens"
        )
        for fields in (
            {"prompt_logprobs": 256},
            {"echo": True, "logprobs": 250},
            {"echo": True, "prompt_logprobs": 240},
        )
    },
    "logprobs of lists": Large(
        SCORE, {"prompt": [[5] * 2000] * 40, "candidate_token_ids": [7] * 250}, 413, "logprobs with top tokens"
    ),
    # Brackets and commas in texts were counted.
    "JSON in a message": Large(TURNS, chat(LINE * 30_000, "Yes."), 400, TOO_LONG, 1),
    "JSON in many messages": Large(TURNS, chat(*[LINE * 400] * 100), 400, TOO_LONG, 1),
    "JSON in a tool": Large(TURNS, chat("Why?", "So.") | {"tools": [{"type": LINE * 30_000}]}, 400, "tools.0"),
    "lists among texts": Large(SCORE, {"prompt": ["a", *[[]] * 100_001]}, 400, "prompt has 100002 lists and objects"),
    # Errors without a field, and parts that are not texts, were answered with 500.
    **{
        f"features {features}": Large(GENERATE, generation(**features), 400, "the same modalities")
        for features in (
            {"features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}},
            {"features": {"mm_hashes": {}, "mm_placeholders": {"image": []}}},
            {"features": {"mm_hashes": {}, "mm_placeholders": {}, "mm_metadata": {"image": []}}},
        )
    },
    **{
        f"a part {part}": Large(TURNS, chat(["A text", part], "Yes."), 400, NOT_A_TEXT)
        for part in (None, 1, [None], {"text": "a"}, {"type": "text", "text": "a", "image_url": "b"}, {"type": "video"})
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_a_request_is_answered_by_its_bound(smollm2_server: str, name: str):
    large, names = LARGE[name], ("scoremode_renderings_total", "scoremode_encoded_characters_total")
    before = [metric(smollm2_server, f"{each}.*") for each in names]
    answer = httpx.post(f"{smollm2_server}{large.route}", json=large.body, timeout=120)
    after = [metric(smollm2_server, f"{each}.*") for each in names]
    assert answer.status_code == large.status, answer.text[:1000]
    if large.status != 200:
        assert large.message in answer.json()["error"]["message"]
    renderings, characters = (now - then for now, then in zip(after, before, strict=True))
    assert renderings <= large.renderings
    assert characters <= large.characters
    assert httpx.get(f"{smollm2_server}/health", timeout=60).status_code == 200
