"""The store replaces and evicts blocks, and only the same tokens have the same block hashes.

`test_streams.py` compares the rows that come back.
"""

import numpy as np

from scoremode_server.engine.store import BLOCK_OVERHEAD_BYTES, RowStore
from scoremode_server.rows import Rows, score_columns

SIZE = 2
ROOM = 1 << 20
ONE = score_columns(1)


def block(value: int, num_columns: int = 1) -> bytes:
    ids = np.full((SIZE, num_columns), value)
    return Rows.from_arrays(ids, -ids.astype(np.float32), ids[:, 0]).table.tobytes()


def cost(*blocks: bytes) -> int:
    return sum(len(each) + BLOCK_OVERHEAD_BYTES for each in blocks)


def test_only_a_block_with_more_columns_replaces_another():
    store = RowStore(SIZE, ROOM)
    for block_put, kept in [(block(1), block(1)), (block(2, 2), block(2, 2)), (block(3), block(2, 2))]:
        store.put(0, [b"a"], {b"a": block_put})
        assert store.get([b"a"], ONE) == {b"a": kept}
        assert store.num_bytes == cost(kept)


def test_the_last_blocks_of_the_least_recently_used_sequence_go_first():
    store = RowStore(SIZE, 4 * cost(block(0)))
    store.put(0, [b"a", b"b", b"c"], {key: block(0) for key in (b"a", b"b", b"c")})
    store.put(0, [b"x"], {b"x": block(0)})
    assert store.put(0, [b"y"], {b"y": block(0)}) == 1
    assert [key for key in (b"a", b"b", b"c") if store.get([key], ONE)] == [b"a", b"b"]
    store.get([b"a", b"b"], ONE)
    store.put(0, [b"z", b"w"], {b"z": block(0), b"w": block(0)})
    assert list(store.get([b"a", b"b", b"x", b"y", b"z", b"w"], ONE)) == [b"w", b"z", b"b", b"a"]


def test_the_first_blocks_of_a_sequence_stay_as_long_as_those_computed_later():
    store = RowStore(SIZE, 3 * cost(block(0)))
    for sequence, computed in ([b"a"], b"a"), ([b"x"], b"x"), ([b"a", b"b"], b"b"), ([b"y"], b"y"):
        store.put(0, sequence, {computed: block(0)})
    assert store.get([b"a", b"b", b"x"], ONE).keys() == {b"a", b"b"}


def test_nothing_of_an_earlier_generation_stays():
    store = RowStore(SIZE, ROOM)
    store.put(0, [b"a"], {b"a": block(0)})
    store.clear()
    assert (len(store._blocks), store.num_bytes, store.generation) == (0, 0, 1)
    store.put(0, [b"a"], {b"a": block(0)})
    assert len(store._blocks) == 0
    store.put(1, [b"a"], {b"a": block(0)})
    assert len(store._blocks) == 1


def test_another_process_has_other_hashes():
    ours, others = (RowStore(4, ROOM).hashes(np.arange(9, dtype=np.int32), "m") for _ in range(2))
    assert not set(ours) & set(others)


def test_a_hash_is_of_all_tokens_to_its_blocks_end_and_of_the_identity():
    store = RowStore(SIZE, ROOM)

    def hashes(*token_ids: int, identity: str = "m") -> list[bytes]:
        return store.hashes(np.array(token_ids, np.int32), identity)

    # The first token is of no block.
    assert [len(hashes(*range(num_tokens))) for num_tokens in range(6)] == [0, 0, 0, 1, 1, 2]
    first, second = hashes(1, 2, 3, 4, 5)
    assert hashes(1, 2, 3, 4) == [first]
    others = [*hashes(0, 2, 3, 4, 5), *hashes(1, 2, 0, 4, 5), *hashes(1, 2, 3, 4, 5, identity="n")]
    assert len({first, second, *others}) == 8
