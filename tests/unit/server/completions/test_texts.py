"""The text of a prompt, joined from prefixes, is what the tokenizer decodes from the whole."""

import random
from hashlib import blake2b

import pytest
from transformers import AutoTokenizer

from scoremode_server.scoring.tokenizer import PromptTexts

SIZE = 4


def block_hashes(token_ids: list[int]) -> list[bytes]:
    """A hash of every whole block of a prompt, and of all that is before it."""
    return [blake2b(repr(token_ids[:end]).encode()).digest() for end in range(SIZE, len(token_ids) + 1, SIZE)]


@pytest.mark.parametrize("model", ["random_model", "byte_fallback_model"])
def test_joined_texts_equal_those_of_whole_prompts(request, model):
    """Prompts that branch at random, of any tokens: parts of characters, special tokens, spaces."""
    tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue(model))
    texts = PromptTexts(lambda: tokenizer, SIZE)
    rng = random.Random(1)
    prompts = [[0]]
    for _ in range(1500):
        start = rng.choice(prompts)
        prompt = start[: rng.randint(0, len(start))] + [rng.randrange(1024) for _ in range(rng.randint(1, 30))]
        prompts.append(prompt)
        hashes = block_hashes(prompt)
        assert texts.text(prompt, hashes[: rng.randint(0, len(hashes))]) == tokenizer.decode(prompt)


@pytest.mark.parametrize("character", ["é", "日"])
@pytest.mark.parametrize("start", [b"\x80\x80", b""])
def test_a_long_run_of_bytes_is_decoded_as_the_tokenizer_does(byte_fallback_model, start, character):
    """SentencePiece's decoder replaces a whole run of bytes, however long, if one of them fits no character."""
    tokenizer = AutoTokenizer.from_pretrained(byte_fallback_model)
    texts = PromptTexts(lambda: tokenizer, SIZE)
    run = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in start + character.encode() * 20])
    for num_blocks in range(len(run) // SIZE):
        assert texts.text(run, block_hashes(run)[:num_blocks]) == tokenizer.decode(run)
