"""Requests that a short body makes large: each is refused by the bound that is meant for it, before it costs much."""

from dataclasses import replace
from typing import Any

import pytest
from vllm.renderers.base import BaseRenderer

from scoremode_server.scoring.sequences import ScoringPass
from tests.bad_inputs import SCORE
from tests.large_requests import PRODUCTS
from tests.unit.server.engine.cache_setup import LARGE
from tests.unit.server.light_app import app_with_completions, check_error, client_of, error_of, light_app
from tests.unit.server.scoring.test_rendering import counted

CONTEXT = list(range(5, 905))


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the sequences whose tokens were copied for the engine."""
    lengths: list[int] = []
    stock = ScoringPass.sequence_to_score

    def note_length(self: ScoringPass) -> object:
        lengths.append(self.sequence.num_tokens)
        return stock(self)

    monkeypatch.setattr(ScoringPass, "sequence_to_score", note_length)
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
    app, _ = app_with_completions(random_model)
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
        answer = (await client.post(SCORE, json={"prompt": CONTEXT, "continuations": pairs})).json()
        assert len(answer["data"]) == 3000
        assert joined == [903] * 60


async def test_one_wrong_prompt_ends_the_encoding_of_the_others(encoded, random_model):
    """Encoding goes on in a thread, one prompt after another."""
    prompts, app = ["", *["the " * 100] * 500], app_with_completions(random_model)[0]
    async with client_of(app) as client:
        answer = await client.post(SCORE, json={"prompt": prompts, "continuations": [" a", " b"]})
        assert error_of(answer) == (400, "prompt", "prompt[0] is empty: a continuation needs a token before it")
        num_encoded = len(encoded)
        assert (await client.post(SCORE, json={"prompt": "the end"})).status_code == 200
    assert len(encoded) == num_encoded + 1
