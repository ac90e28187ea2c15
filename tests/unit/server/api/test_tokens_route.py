"""`/v1/tokens` on the app without a model, with a real tokenizer."""

from pathlib import Path

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.models import random_llama
from tests.unit.server.api.light_app import light_app
from tests.unit.server.prefix_cache.fake_engine import VOCABULARY


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    path: Path = random_llama(tmp_path_factory.mktemp("models") / "llama", vocab_size=VOCABULARY)
    return PreTrainedTokenizerFast.from_pretrained(path)


async def post(body: dict[str, object], tokenizer: object = None) -> httpx.Response:
    transport = httpx.ASGITransport(light_app(tokenizer=tokenizer), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://light") as http:
        return await http.post("/v1/tokens", json=body)


async def test_each_token_has_the_text_that_it_decodes_to(tokenizer: PreTrainedTokenizerFast):
    token_ids = tokenizer.encode("The capital of France is Paris.")
    answer = (await post({"token_ids": [*token_ids, 0]}, tokenizer)).json()
    assert answer == {"object": "tokens", "tokens": [*(tokenizer.decode([each]) for each in token_ids), "<s>"]}
    assert "".join(answer["tokens"][:-1]) == "The capital of France is Paris."


async def test_the_whole_vocabulary_can_be_asked_for_and_a_token_twice(tokenizer: PreTrainedTokenizerFast):
    everything = list(range(VOCABULARY))
    answer = (await post({"token_ids": everything}, tokenizer)).json()
    assert answer["tokens"] == [tokenizer.decode([each]) for each in everything]
    assert (await post({"token_ids": [7, 7]}, tokenizer)).json()["tokens"] == [answer["tokens"][7]] * 2
    assert (await post({"token_ids": []}, tokenizer)).json()["tokens"] == []


async def test_a_part_of_a_character_is_the_replacement_character(tokenizer: PreTrainedTokenizerFast):
    parts = tokenizer.encode("💡")
    assert len(parts) > 1
    assert (await post({"token_ids": parts}, tokenizer)).json()["tokens"] == ["\ufffd"] * len(parts)


async def test_one_more_than_the_vocabulary_is_refused(tokenizer: PreTrainedTokenizerFast):
    response = await post({"token_ids": [5] * (VOCABULARY + 1)}, tokenizer)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "token_ids"
    assert f"the vocabulary has {VOCABULARY}" in response.json()["error"]["message"]


async def test_a_server_without_a_tokenizer_says_so():
    response = await post({"token_ids": [5]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "token_ids")
    assert "without a tokenizer" in response.json()["error"]["message"]
