"""Keys of prefixes: the same for the same tokens, however long the sequences, and for nothing else."""

import numpy as np
import pytest

from scoremode_server.prefix_hash import Chain, PrefixHash

SIZE = 4


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def keys(hashes: PrefixHash, token_ids: np.ndarray, identity: str = "m") -> list[bytes]:
    return Chain(hashes, token_ids, SIZE, identity).keys


@pytest.mark.parametrize(("length", "num_keys"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (4001, 1000)])
def test_a_key_for_each_whole_block_behind_the_first_token(length, num_keys):
    chain = Chain(PrefixHash(), np.arange(length, dtype=np.int32), SIZE, "m")
    assert len(set(chain.keys)) == chain.num_blocks == num_keys
    assert chain.keys[:1] == [chain.head][:num_keys]


def test_what_comes_behind_a_block_does_not_matter():
    """Also where a longer sequence needs factors that were not drawn before."""
    hashes = PrefixHash()
    rng = np.random.default_rng(1)
    long = rng.integers(0, 2**31 - 1, 3000).astype(np.int32)
    short = keys(hashes, long[:50])
    assert keys(hashes, long)[: len(short)] == short
    assert keys(hashes, long[:77])[: len(short)] == short


def test_every_token_up_to_the_end_of_a_block_matters():
    hashes = PrefixHash()
    base = tokens(*range(13))
    unchanged = keys(hashes, base)
    seen = {tuple(unchanged)}
    for position in range(13):
        changed = base.copy()
        changed[position] += 1
        others = keys(hashes, changed)
        first = max(0, (position - 1) // SIZE)
        assert others[:first] == unchanged[:first]
        assert not set(others[first:]) & set(unchanged)
        seen.add(tuple(others))
    assert len(seen) == 14


def test_tokens_of_zero_count():
    assert len(set(keys(PrefixHash(), np.zeros(401, np.int32)))) == 100


def test_sequences_in_another_order_or_of_another_identity_have_other_keys():
    hashes = PrefixHash()
    sequence = tokens(1, 2, 3, 4, 5, 6, 7, 8, 9)
    all_keys = [*keys(hashes, sequence), *keys(hashes, sequence[::-1].copy()), *keys(hashes, sequence, "m, adapter")]
    assert len(set(all_keys)) == 6


def test_no_two_processes_have_the_same_keys():
    assert not set(keys(PrefixHash(), tokens(*range(9)))) & set(keys(PrefixHash(), tokens(*range(9))))
