"""The documents of `bench/corpora.py` have the token lengths that it promises, and no two runs the same."""

from pydoc_data.topics import topics

import corpora
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE, as the models' own are, with enough tokens that are words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(list(topics.values())[:40], trainer)
    return tokenizer


def test_lengths_are_spread_over_the_range(tokenizer):
    texts, token_ids = corpora.make_documents(tokenizer, 100, seed=1)
    lengths = [len(ids) for ids in token_ids]
    assert [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts] == lengths
    # A word that was cut may be a token more or less.
    assert corpora.SHORTEST - 2 <= min(lengths) < 200
    assert 1800 < max(lengths) <= corpora.LONGEST + 2
    assert 900 < sum(lengths) / 100 < 1150


def test_each_seed_has_other_documents(tokenizer):
    first, second = (set(corpora.make_documents(tokenizer, 20, seed)[0]) for seed in (1, 2))
    assert not first & second
