"""`/v1/tokens` on the app without a model, with a real tokenizer."""

from transformers import PreTrainedTokenizerFast

from tests.models import random_llama
from tests.unit.server.api.light_app import client_of, error_of, light_app
from tests.unit.server.prefix_cache.fake_engine import VOCABULARY


async def test_each_token_has_the_text_that_it_decodes_to(tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(random_llama(tmp_path, vocab_size=VOCABULARY))
    part = tokenizer.encode("💡")[0]
    async with client_of(light_app(tokenizer=tokenizer)) as client:
        for token_ids in (list(range(VOCABULARY)), [7, 7, part], []):
            answer = (await client.post("/v1/tokens", json={"token_ids": token_ids})).json()
            assert answer == {"object": "tokens", "tokens": [tokenizer.decode([each]) for each in token_ids]}
        assert error_of(await client.post("/v1/tokens", json={"token_ids": [5] * (VOCABULARY + 1)}))[0] == 400


async def test_without_a_tokenizer_tokens_have_no_text():
    async with client_of(light_app()) as client:
        assert error_of(await client.post("/v1/tokens", json={"token_ids": [5]}))[:2] == (400, "token_ids")
