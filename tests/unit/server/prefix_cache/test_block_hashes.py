"""Block hashes: the same for the same tokens, however long the sequences, and for nothing else."""

import numpy as np
import pytest

from scoremode_server.prefix_cache.store import BlockHasher

SIZE = 4
HASHER = BlockHasher(SIZE)


def hashes(*token_ids: int, identity: str = "m") -> list[bytes]:
    return HASHER.hashes(np.array(token_ids, np.int32), identity)


@pytest.mark.parametrize(("length", "num_blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (4001, 1000)])
def test_a_hash_for_each_whole_block_after_the_first_token(length: int, num_blocks: int):
    assert len(set(hashes(*range(length)))) == num_blocks


def test_every_token_up_to_the_end_of_a_block_matters():
    """The first token too, which has no row."""
    unchanged = hashes(*range(13))
    seen = {tuple(unchanged)}
    for position in range(13):
        changed = list(range(13))
        changed[position] += 1
        others = hashes(*changed)
        first = max(0, (position - 1) // SIZE)
        assert others[:first] == unchanged[:first]
        assert not set(others[first:]) & set(unchanged)
        seen.add(tuple(others))
    assert len(seen) == 14


def test_sequences_in_another_order_or_of_another_identity_have_other_hashes():
    sequence = range(1, 10)
    assert len({*hashes(*sequence), *hashes(*reversed(sequence)), *hashes(*sequence, identity="m, adapter")}) == 6


def test_no_two_processes_have_the_same_hashes():
    token_ids = np.arange(9, dtype=np.int32)
    assert not set(BlockHasher(SIZE).hashes(token_ids, "m")) & set(BlockHasher(SIZE).hashes(token_ids, "m"))
