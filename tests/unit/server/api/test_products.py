"""Requests whose size is a product: what a short body asks for is refused, or not made before it is admitted."""

from dataclasses import replace
from typing import Any

import pytest
from vllm.renderers.base import BaseRenderer

from scoremode_server.scoring.sequences import ScoringPass
from tests.bad_inputs import SCORE
from tests.unit.server.api.light_app import app_with_completions, client_of, error_of, light_app
from tests.unit.server.prefix_cache.cache_setup import LARGE

CONTEXT = list(range(5, 905))


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the sequences whose tokens were copied for the engine."""
    lengths: list[int] = []
    scored = ScoringPass.scored

    def noted(self: ScoringPass) -> Any:
        lengths.append(self.sequence.num_tokens)
        return scored(self)

    monkeypatch.setattr(ScoringPass, "scored", noted)
    return lengths


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each text that was encoded."""
    lengths: list[int] = []
    tokenize = BaseRenderer.tokenize_prompts_async

    async def noted(self: BaseRenderer, prompts: Any, params: Any) -> Any:
        lengths.extend(len(prompt["prompt"]) for prompt in prompts)
        return await tokenize(self, prompts, params)

    monkeypatch.setattr(BaseRenderer, "tokenize_prompts_async", noted)
    return lengths


async def test_a_context_is_copied_for_what_was_admitted_alone(joined):
    """900 tokens before each of 3,000 pairs, which are 2.7 million tokens, but 60 passes: so many differ."""
    pairs = [[5, 5 + index % 60, 5] for index in range(3000)]
    app = light_app(size=replace(LARGE, max_scoring_tokens=60_000))
    async with client_of(app) as client:
        alike = await client.post(SCORE, json={"prompt": CONTEXT, "continuations": pairs})
        assert len(alike.json()["data"]) == 3000
        assert joined == [903] * 60
        joined.clear()
        apart = await client.post(SCORE, json={"prompt": CONTEXT, "continuations": pairs, "return_ranks": True})
        assert error_of(apart)[0] == 413
        assert "2709000 tokens to score exceed" in error_of(apart)[2]
        assert joined == []


async def test_a_context_that_is_too_long_is_refused_before_its_continuations(joined, encoded, random_model):
    ids = {"prompt": [5] * 10_000, "continuations": [[each % 900 + 5] for each in range(3000)]}
    app, _ = app_with_completions(random_model)
    async with client_of(app) as client:
        for body in (ids, {"prompt": "word " * 3000, "continuations": [" a", " b"]}):
            status, field, message = error_of(await client.post(SCORE, json=body))
            assert (status, field) == (400, "prompt")
            assert message.startswith("prompt[0] has ")
            assert message.endswith(" tokens, but the model takes at most 2048")
        assert joined == []


@pytest.mark.parametrize(
    ("prompts", "continuations"),
    [
        ("x" * 100_000, [" a"] * 4000),
        (["x" * 1000] * 5000, [" a", " b", " c", " d"]),
        (["x" * 10_000] * 40, [[f" {each}" for each in range(50)]] * 40),
    ],
    ids=["one context", "many contexts", "lists of their own"],
)
async def test_products_of_texts_are_bounded_before_any_is_encoded(encoded, random_model, prompts, continuations):
    app, _ = app_with_completions(random_model)
    async with client_of(app) as client:
        answer = await client.post(SCORE, json={"prompt": prompts, "continuations": continuations})
    status, field, message = error_of(answer)
    assert (status, field) == (413, "continuations")
    assert "(--max-request-bytes)" in message
    assert encoded == []


async def test_a_text_after_many_token_lists_is_encoded_once(joined, encoded, random_model):
    app, _ = app_with_completions(random_model)
    async with client_of(app) as client:
        answer = await client.post(SCORE, json={"prompt": [[5]] * 60_000, "continuations": [" a" * 1000]})
    assert error_of(answer)[:2] == (413, "prompt")
    assert (encoded, joined) == ([2000], [])


async def test_one_wrong_prompt_ends_the_encoding_of_the_others(encoded, random_model):
    """Encoding goes on in a thread, one prompt after another."""
    prompts, app = ["", *["the " * 100] * 500], app_with_completions(random_model)[0]
    async with client_of(app) as client:
        answer = await client.post(SCORE, json={"prompt": prompts, "continuations": [" a", " b"]})
        assert error_of(answer) == (400, "prompt", "prompt[0] is empty: a continuation needs a token before it")
        num_encoded = len(encoded)
        assert (await client.post(SCORE, json={"prompt": "the end"})).status_code == 200
    assert len(encoded) == num_encoded + 1
