"""The text of a prompt, joined from prefixes, is what the tokenizer decodes from the whole."""

import random
from hashlib import blake2b

import pytest
from transformers import AutoTokenizer

from scoremode_server.completions.prompt_texts import PromptTexts

SIZE = 4
TOKENIZERS = ["random_model", "byte_fallback_model"]


def block_hashes(token_ids: list[int]) -> list[bytes]:
    """A hash of every whole block of a prompt, and of all that is before it."""
    ends = range(SIZE, len(token_ids) + 1, SIZE)
    return [blake2b(repr(token_ids[:end]).encode()).digest() for end in ends]


@pytest.mark.parametrize("model", TOKENIZERS)
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


def test_bytes_after_an_invalid_byte_are_decoded_as_the_tokenizer_does(byte_fallback_model):
    """SentencePiece's decoder gives up on a whole run of bytes, however long, if one of them fits no character."""
    tokenizer = AutoTokenizer.from_pretrained(byte_fallback_model)
    texts = PromptTexts(lambda: tokenizer, SIZE)
    run = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in b"\x80\x80" + "é".encode() * 20])
    for num_blocks in range(len(run) // SIZE):
        assert texts.text(run, block_hashes(run)[:num_blocks]) == tokenizer.decode(run)


class CountingTokenizer:
    """Decodes a token to a letter, and counts the tokens that it was given."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: list[int]) -> str:
        self.num_decoded += len(token_ids)
        return "".join(chr(97 + token_id) for token_id in token_ids)


def test_a_common_prefix_is_decoded_once():
    tokenizer = CountingTokenizer()
    texts = PromptTexts(lambda: tokenizer, SIZE)
    prefix = [position % 26 for position in range(400)]
    for end in (1, 2, 3):
        assert texts.text([*prefix, end], block_hashes(prefix))[-1] == chr(97 + end)
    assert tokenizer.num_decoded < 600


def test_the_least_recently_used_texts_are_dropped(monkeypatch):
    monkeypatch.setattr("scoremode_server.completions.prompt_texts.KEPT_CHARACTERS", 3 * 300)
    tokenizer = CountingTokenizer()
    texts = PromptTexts(lambda: tokenizer, SIZE)
    prompts = [[letter] * 41 for letter in range(4)]
    for prompt in prompts:
        texts.text(prompt, block_hashes(prompt))
    assert block_hashes(prompts[0])[-1] not in texts._kept
    assert len(texts._kept) == 3
