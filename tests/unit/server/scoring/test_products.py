"""Requests that a short body makes large: each is refused by the bound that is meant for it, before it costs much."""

from dataclasses import replace
from typing import Any

import pytest
from vllm.renderers.base import BaseRenderer

from scoremode_server.engine.sequence import EnginePass
from tests.bad_inputs import COMPLETIONS, PERPLEXITY, SCORE
from tests.unit.server.engine.cache_setup import LARGE
from tests.unit.server.light_app import app_with_completions, check_error, client_of, error_of, light_app
from tests.unit.server.scoring.test_rendering import TURNS, counted


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


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the sequences whose tokens were copied for the engine."""
    lengths: list[int] = []
    stock = EnginePass.begin

    def note_length(self: EnginePass, *how: Any) -> EnginePass:
        lengths.append(self.sequence.num_tokens)
        return stock(self, *how)

    monkeypatch.setattr(EnginePass, "begin", note_length)
    return lengths


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each text that was encoded."""
    lengths: list[int] = []
    tokenize = BaseRenderer.tokenize_prompts_async

    async def noted(self: BaseRenderer, prompts: Any, params: Any) -> Any:
        lengths.extend(len(prompt.get("prompt", "")) for prompt in prompts)
        return await tokenize(self, prompts, params)

    monkeypatch.setattr(BaseRenderer, "tokenize_prompts_async", noted)
    return lengths


@pytest.mark.parametrize(("route", "body", "error", "work"), PRODUCTS.values(), ids=PRODUCTS)
async def test_a_product_is_refused_by_its_bound(random_model, joined, encoded, route, body, error, work):
    app = app_with_completions(random_model)
    async with client_of(app) as client:
        check_error(await client.post(route, json=body), *error)
    renderings, characters = counted(app)
    assert renderings <= work[0]
    assert characters + sum(encoded) <= work[1]
    assert joined == []


async def test_a_context_is_copied_for_what_was_admitted_alone(joined):
    """900 tokens before each of 3,000 pairs, which are 2.7 million tokens, but 60 passes: so many differ."""
    pairs = [[5, 5 + index % 60, 5] for index in range(3000)]
    app = light_app(size=replace(LARGE, max_scoring_tokens=60_000))
    async with client_of(app) as client:
        answer = (await client.post(SCORE, json={"prompt": list(range(5, 905)), "continuations": pairs})).json()
        assert len(answer["data"]) == 3000
        assert joined == [903] * 60


async def test_one_wrong_prompt_ends_the_encoding_of_the_others(encoded, random_model):
    """Encoding continues in a thread, one prompt after another."""
    prompts = ["", *["the " * 100] * 500]
    async with client_of(app_with_completions(random_model)) as client:
        answer = await client.post(SCORE, json={"prompt": prompts, "continuations": [" a", " b"]})
        assert error_of(answer) == (400, "prompt", "prompt[0] is empty: a continuation needs a token before it")
        num_encoded = len(encoded)
        assert (await client.post(SCORE, json={"prompt": "the end"})).status_code == 200
    assert len(encoded) == num_encoded + 1
