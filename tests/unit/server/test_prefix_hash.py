"""Keys of prefixes: the same for the same tokens, however long the sequences, and for nothing else."""

import numpy as np
import pytest

from scoremode_server.prefix_hash import PrefixHash

SIZE = 4


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(("length", "num_keys"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (4001, 1000)])
def test_a_key_for_each_whole_block_behind_the_first_token(length, num_keys):
    assert len(set(PrefixHash().keys(np.arange(length, dtype=np.int32), SIZE, "m"))) == num_keys


def test_what_comes_behind_a_block_does_not_matter():
    """Also where a longer sequence needs factors that were not drawn before."""
    hashes = PrefixHash()
    rng = np.random.default_rng(1)
    long = rng.integers(0, 2**31 - 1, 3000).astype(np.int32)
    short = hashes.keys(long[:50], SIZE, "m")
    assert hashes.keys(long, SIZE, "m")[: len(short)] == short
    assert hashes.keys(long[:77], SIZE, "m")[: len(short)] == short


def test_every_token_up_to_the_end_of_a_block_matters():
    hashes = PrefixHash()
    base = tokens(*range(13))
    seen = {tuple(hashes.keys(base, SIZE, "m"))}
    for position in range(13):
        changed = base.copy()
        changed[position] += 1
        keys = hashes.keys(changed, SIZE, "m")
        first = max(0, (position - 1) // SIZE)
        unchanged = hashes.keys(base, SIZE, "m")
        assert keys[:first] == unchanged[:first]
        assert not set(keys[first:]) & set(unchanged)
        seen.add(tuple(keys))
    assert len(seen) == 14


def test_tokens_of_zero_count():
    keys = PrefixHash().keys(np.zeros(401, np.int32), SIZE, "m")
    assert len(set(keys)) == 100


def test_sequences_in_another_order_or_of_another_identity_have_other_keys():
    hashes = PrefixHash()
    (one,), (other,) = hashes.keys(tokens(1, 2, 3, 4, 5), SIZE, "m"), hashes.keys(tokens(5, 4, 3, 2, 1), SIZE, "m")
    (adapter,) = hashes.keys(tokens(1, 2, 3, 4, 5), SIZE, "m with an adapter")
    assert len({one, other, adapter}) == 3


def test_factors_are_secret():
    assert PrefixHash().keys(tokens(*range(9)), SIZE, "m") != PrefixHash().keys(tokens(*range(9)), SIZE, "m")
