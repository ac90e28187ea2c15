"""The cache as a data structure."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode_server.cache import ENTRY_BYTES, LogprobCache, Whole, pack, unpack

SIZE = 2
ROOM = 1 << 20


def tokens(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.int32)


def block(value: int, width: int = 1) -> bytes:
    rows = np.full((SIZE, width), value)
    return pack(rows, -rows.astype(np.float32), rows[:, 0]).tobytes()


def cost(*blocks: bytes) -> int:
    return sum(len(each) + ENTRY_BYTES for each in blocks)


def test_a_block_is_keyed_by_every_token_up_to_the_one_behind_the_engines_block():
    cache = LogprobCache(SIZE, ROOM)
    keys = cache.chain(tokens(1, 2, 3, 4, 5, 6)).keys
    assert len(keys) == 2
    assert cache.chain(tokens(1, 2, 3, 4, 5)).keys == keys
    assert cache.chain(tokens(1, 2, 3, 4)).keys == keys[:1]
    assert cache.chain(tokens(1, 2)).keys == []
    for position in range(5):
        changed = tokens(1, 2, 3, 4, 5)
        changed[position] += 1
        assert [a == b for a, b in zip(cache.chain(changed).keys, keys, strict=True)] == [position > 2, False]


def test_everything_else_that_logprobs_depend_on_is_in_the_key():
    cache = LogprobCache(SIZE, ROOM)
    identities = [
        (),
        (None, None),
        ("a", None),
        (None, "a"),
        (("a", 1, "p"), None),
        (("a", 2, "p"), None),
        ("a, None",),
    ]
    keys = [cache.chain(tokens(1, 2, 3), *identity).head for identity in identities]
    cache.clear()
    keys += [cache.chain(tokens(1, 2, 3), *identity).head for identity in identities]
    assert len(set(keys)) == len(keys)


def test_rows_come_back_bit_for_bit_and_narrower_where_fewer_columns_are_asked_for():
    cache = LogprobCache(SIZE, ROOM)
    ids = np.arange(12).reshape(4, 3)
    logprobs = np.array([[-0.0, -1e-30, -np.inf]] * 4, np.float32) - ids.astype(np.float32)
    ranks = np.array([1, 200_000, 3, 4])
    table = pack(ids, logprobs, ranks)
    keys = cache.chain(tokens(1, 2, 3, 4, 5)).keys
    cache.put(0, keys, {keys[0]: table[:2].tobytes(), keys[1]: pack(ids, logprobs, ranks)[2:].tobytes()})
    for width in (1, 2, 3):
        found = cache.get(keys, width)
        narrow = cache.columns([found[key] for key in keys], width)
        for got, put in zip(unpack(narrow, width), (ids[:, :width], logprobs[:, :width], ranks), strict=True):
            assert got.astype(put.dtype).tobytes() == np.ascontiguousarray(put).tobytes()
    assert cache.get(keys, 4) == {}


def test_a_wider_block_replaces_a_narrower_one_and_not_the_other_way():
    cache = LogprobCache(SIZE, ROOM)
    for block_put, kept in [(block(1), block(1)), (block(2, 2), block(2, 2)), (block(3), block(2, 2))]:
        cache.put(0, [b"a"], {b"a": block_put})
        assert cache.get([b"a"], 1) == {b"a": kept}
        assert cache.num_bytes == cost(kept)


def test_the_least_recently_used_goes_first_and_of_a_chain_the_tail():
    cache = LogprobCache(SIZE, 4 * cost(block(0)))
    cache.put(0, [b"a", b"b", b"c"], {key: block(0) for key in (b"a", b"b", b"c")})
    cache.put(0, [b"x"], {b"x": block(0)})
    cache.put(0, [b"y"], {b"y": block(0)})
    assert [key for key in (b"a", b"b", b"c") if cache.get([key], 1)] == [b"a", b"b"]
    assert cache.counts.evictions == 1
    cache.get([b"a", b"b"], 1)
    cache.put(0, [b"z", b"w"], {b"z": block(0), b"w": block(0)})
    assert list(cache.get([b"a", b"b", b"x", b"y", b"z", b"w"], 1)) == [b"w", b"z", b"b", b"a"]


def test_a_chain_that_is_put_again_is_used_again_where_only_its_tail_is_new():
    cache = LogprobCache(SIZE, 3 * cost(block(0)))
    cache.put(0, [b"a"], {b"a": block(0)})
    cache.put(0, [b"x"], {b"x": block(0)})
    cache.put(0, [b"a", b"b"], {b"b": block(0)})
    cache.put(0, [b"y"], {b"y": block(0)})
    assert set(cache.get([b"a", b"b", b"x", b"y"], 1)) == {b"a", b"b", b"y"}


def table(num_rows: int, width: int = 1) -> np.ndarray:
    """Rows that differ: the first id of the one numbered n is n times the width."""
    ids = np.arange(num_rows * width).reshape(num_rows, width)
    return pack(ids, -ids.astype(np.float32), ids[:, 0])


def test_a_whole_chain_is_split_when_its_head_is_asked_for():
    cache = LogprobCache(SIZE, ROOM)
    chain = cache.chain(np.arange(8, dtype=np.int32))
    rows = table(7)
    cache.put_whole(0, chain, rows)
    assert len(cache) == 3
    assert cache.num_bytes == Whole(chain, rows).num_bytes
    assert cache.find(cache.chain(np.arange(1, 9, dtype=np.int32)), 1) == {}
    assert cache.num_bytes == Whole(chain, rows).num_bytes
    longer = cache.chain(np.array([0, 1, 2, 3, 4, 9, 9, 9, 9], np.int32))
    expected = {key: rows[2 * index : 2 * index + 2].tobytes() for index, key in enumerate(chain.keys)}
    assert cache.find(longer, 1) == {key: expected[key] for key in longer.keys[:2]}
    assert cache.num_bytes == cost(*expected.values())
    assert cache.find(cache.chain(np.arange(8, dtype=np.int32)), 1) == expected


def test_a_whole_chain_gives_way_to_wider_blocks_and_adds_to_those_that_are_here():
    cache = LogprobCache(SIZE, ROOM)
    chain, shorter = cache.chain(np.arange(8, dtype=np.int32)), cache.chain(np.arange(5, dtype=np.int32))
    wide = cache.split(shorter.keys, table(4, width=3))
    cache.put_whole(0, chain, table(7))
    cache.put(0, shorter.keys, wide)
    cache.put_whole(0, chain, table(7))
    assert cache.find(chain, 3) == wide
    assert cache.find(chain, 1) == cache.split(chain.keys, table(7)) | wide
    assert cache.num_bytes == cost(*cache.find(chain, 1).values())


def test_a_whole_chain_that_is_larger_than_the_budget_leaves_its_first_blocks():
    cache = LogprobCache(SIZE, 3 * cost(block(0)))
    chain = cache.chain(np.arange(101, dtype=np.int32))
    cache.put_whole(0, chain, table(100))
    assert cache.find(chain, 1) == cache.split(chain.keys[:3], table(100))


def test_a_whole_chain_of_an_earlier_generation_or_from_amid_a_change_is_not_kept():
    cache = LogprobCache(SIZE, ROOM)
    chain = cache.chain(np.arange(8, dtype=np.int32))
    cache.clear()
    cache.put_whole(0, chain, table(7))
    with cache.change():
        cache.put_whole(cache.generation, chain, table(7))
    assert len(cache) == cache.num_bytes == 0


def test_nothing_of_an_earlier_generation_is_kept():
    cache = LogprobCache(SIZE, ROOM)
    cache.put(0, [b"a"], {b"a": block(0)})
    cache.clear()
    assert (len(cache), cache.num_bytes, cache.generation) == (0, 0, 1)
    cache.put(0, [b"a"], {b"a": block(0)})
    assert len(cache) == 0
    cache.put(1, [b"a"], {b"a": block(0)})
    assert len(cache) == 1


def test_the_cache_is_off_while_weights_change_and_begins_a_generation_before_and_behind():
    cache = LogprobCache(SIZE, ROOM)
    with cache.change():
        assert (cache.enabled, cache.generation) == (False, 1)
        cache.put(1, [b"a"], {b"a": block(0)})
        with cache.change():
            assert not cache.enabled
        assert not cache.enabled
    assert (cache.enabled, cache.generation, len(cache)) == (True, 4, 0)


def test_a_change_that_fails_has_changed_something_and_is_over():
    cache = LogprobCache(SIZE, ROOM)
    with pytest.raises(ZeroDivisionError), cache.change():
        raise ZeroDivisionError
    assert (cache.enabled, cache.generation) == (True, 2)


def test_no_budget_is_off():
    assert not LogprobCache(SIZE, 0).enabled


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 5 * cost(block(0))),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 6)), max_size=40),
)
def test_the_bytes_stay_within_the_bound_at_every_step(max_bytes: int, chains: list[tuple[int, int, int]]):
    cache = LogprobCache(SIZE, max_bytes)
    put = 0
    for start, length, width in chains:
        keys = [bytes([start, index]) for index in range(length)]
        cache.put(0, keys, {key: block(start, width) for key in keys})
        put += length
        held = cache.get([bytes([a, b]) for a in range(10) for b in range(6)], 1)
        assert len(held) == len(cache)
        assert cache.num_bytes == cost(*held.values()) <= max_bytes
    assert cache.counts.evictions <= put - len(cache)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 8 * cost(block(0))),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(1, 3), st.booleans()), max_size=40),
)
def test_the_bytes_stay_within_the_bound_with_whole_chains(max_bytes: int, puts: list[tuple[int, int, int, bool]]):
    cache = LogprobCache(SIZE, max_bytes)
    for start, num_blocks, width, asked in puts:
        chain = cache.chain(np.array([start, *range(num_blocks * SIZE)], np.int32))
        cache.put_whole(0, chain, table(num_blocks * SIZE, width))
        entries = cache._entries.values()
        costs = [entry.num_bytes if isinstance(entry, Whole) else cost(entry) for entry in entries]
        assert cache.num_bytes == sum(costs) <= max_bytes
        for key, kept in cache.find(chain, width).items() if asked else ():
            stored = len(kept) // (4 * SIZE) // 2
            rows = range(SIZE * chain.keys.index(key), SIZE * chain.keys.index(key) + SIZE)
            assert cache.columns([kept], width)[:, 0].tolist() == [stored * row for row in rows]


def test_ten_times_the_budget_leaves_the_newest_budget():
    num_blocks = 100
    cache = LogprobCache(SIZE, num_blocks * cost(block(0)))
    for index in range(10 * num_blocks):
        cache.put(0, [b"%d" % index], {b"%d" % index: block(0)})
    assert len(cache) == num_blocks
    assert cache.counts.evictions == 9 * num_blocks
    assert len(cache.get([b"%d" % index for index in range(9 * num_blocks, 10 * num_blocks)], 1)) == num_blocks
