"""`/v1/tokens` on the app without a model, with a real tokenizer."""

from transformers import PreTrainedTokenizerFast

from tests.models import random_llama
from tests.unit.server.api.calls import client_of, error_of
from tests.unit.server.api.light_app import light_app
from tests.unit.server.prefix_cache.fake_engine import VOCABULARY


async def test_each_token_has_the_text_that_it_decodes_to(tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(random_llama(tmp_path, vocab_size=VOCABULARY))
    parts = tokenizer.encode("💡")
    cases = [
        (tokenizer.encode("Paris."), None),
        # The whole vocabulary; a token twice; a part of a character; none; a special token.
        (list(range(VOCABULARY)), None),
        ([7, 7], None),
        (parts, ["\ufffd"] * len(parts)),
        ([], []),
        ([0], ["<s>"]),
    ]
    async with client_of(light_app(tokenizer=tokenizer)) as client:
        for token_ids, texts in cases:
            answer = (await client.post("/v1/tokens", json={"token_ids": token_ids})).json()
            expected = [tokenizer.decode([each]) for each in token_ids] if texts is None else texts
            assert answer == {"object": "tokens", "tokens": expected}
        status, param, message = error_of(await client.post("/v1/tokens", json={"token_ids": [5] * (VOCABULARY + 1)}))
    assert (status, param) == (400, "token_ids")
    assert f"the vocabulary has {VOCABULARY}" in message


async def test_without_a_tokenizer_tokens_have_no_text():
    async with client_of(light_app()) as client:
        status, param, message = error_of(await client.post("/v1/tokens", json={"token_ids": [5]}))
    assert (status, param) == (400, "token_ids")
    assert "without a tokenizer" in message
