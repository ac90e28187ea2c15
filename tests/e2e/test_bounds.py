"""Requests that a short body makes large, sent to a real server: each is answered by the bound that is meant for it."""

from typing import Any

import httpx
import pytest

from tests.bad_inputs import SCORE
from tests.e2e.metrics import metric
from tests.large_requests import LINE, PRODUCTS, TOO_LONG, TOO_MANY_TOKENS, TURNS, chat

GENERATE = "/inference/v1/generate"


def generation(**fields: Any) -> dict[str, Any]:
    return {"token_ids": [5] * 9, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}, **fields}


NOT_A_TEXT = (400, "messages", "that is not a text, content[1]")
TAGS = [("<think>", 8000), ("<think></think>", 4000), ("</think>", 8000), ("<think>a", 8000)]

LARGE = {
    **PRODUCTS,
    # A regular expression looked for the end of each.
    **{
        f"{count} {tag}": (
            TURNS,
            chat("Why?", tag * count),
            (400, "messages", "the model takes at most"),
            (1, 70_000),
        )
        for tag, count in TAGS
    },
    # Each turn was rendered from the beginning.
    "100 messages": (TURNS, chat(*["Yes."] * 100), (200, None, ""), (150, 9_000)),
    "70,000 conversations": (
        TURNS,
        {"messages": [chat("Why?")["messages"]] * 70_000},
        (400, "messages", "has 140001 lists and objects"),
        (0, 0),
    ),
    "a text of no more than the bound": (
        SCORE,
        {"prompt": "x" * 10_000, "continuations": list("abcd")},
        (400, "prompt", TOO_MANY_TOKENS),
        (0, 0),
    ),
    "logprobs of lists": (
        SCORE,
        {"prompt": [[5] * 2000] * 40, "candidate_token_ids": [7] * 250},
        (413, "prompt", "logprobs with top tokens"),
        (0, 0),
    ),
    # Brackets and commas in texts were counted.
    "JSON in a message": (TURNS, chat(LINE * 30_000, "Yes."), TOO_LONG, (1, 0)),
    "lists among texts": (
        SCORE,
        {"prompt": ["a", *[[]] * 100_001]},
        (400, "prompt", "prompt has 100002 lists and objects"),
        (0, 0),
    ),
    # Errors without a field, and parts that are not texts, were answered with 500.
    **{
        f"features {features}": (GENERATE, generation(**features), (400, "features", "the same modalities"), (0, 0))
        for features in (
            {"features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}},
            {"features": {"mm_hashes": {}, "mm_placeholders": {"image": []}}},
            {"features": {"mm_hashes": {}, "mm_placeholders": {}, "mm_metadata": {"image": []}}},
        )
    },
    **{
        f"a part {part}": (TURNS, chat(["A text", part], "Yes."), NOT_A_TEXT, (0, 0))
        for part in (None, 1, [None], {"text": "a"}, {"type": "text", "text": "a", "image_url": "b"}, {"type": "video"})
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_a_request_is_answered_by_its_bound(smollm2_server: str, name: str):
    route, body, (status, param, message), work = LARGE[name]
    names = ("scoremode_renderings_total", "scoremode_encoded_characters_total")
    before = [metric(smollm2_server, f"{each}.*") for each in names]
    answer = httpx.post(f"{smollm2_server}{route}", json=body, timeout=120)
    after = [metric(smollm2_server, f"{each}.*") for each in names]
    assert answer.status_code == status, answer.text[:1000]
    if status != 200:
        error = answer.json()["error"]
        assert error["param"] == param
        assert message in error["message"]
    for now, then, most in zip(after, before, work, strict=True):
        assert now - then <= most
    assert httpx.get(f"{smollm2_server}/health", timeout=60).status_code == 200
