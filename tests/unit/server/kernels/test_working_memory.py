"""Rows per chunk, worked out by hand; what blocks of them take, measured."""

import pytest

from scoremode_server.kernels.fused_logprobs import in_chunks
from scoremode_server.kernels.working_memory import LogitsShape, row_bytes_compared, row_bytes_fused, rows_per_chunk

MEBIBYTE = 1024**2


BFLOAT16 = LogitsShape(128_256, 2)
TWO_RANKS = LogitsShape(128_256, 2, 2)
LANES = (1024 + 20 * 128) * 4
"""1,024 lanes with 16 tiles of 8 entries: their maxima, and 20 lanes' entries, in float32."""


@pytest.mark.parametrize(
    ("shape", "num_top", "temperature", "sharded", "expected"),
    [
        # 28 bytes of results for the actual token; 50,257 entries are padded to 50,304.
        (LogitsShape(50_257, 2), 0, 1, False, 50_304 * 2 + 28),
        # More top tokens than Triton finds need no lanes.
        (BFLOAT16, 300, 1, False, 128_256 * 2 + 28 * 301),
        (BFLOAT16, 0, 1, False, 128_256 * 2 + 28),
        (BFLOAT16, 1, 1, False, 128_256 * 2 + 56),
        (BFLOAT16, 20, 1, False, 128_256 * 2 + 588 + LANES),
        (BFLOAT16, 0, 2, False, 128_256 * 4 + 28),
        (BFLOAT16, 0, None, False, 128_256 * 4 + 28),
        # Gathered as in vLLM, or half a row each.
        (TWO_RANKS, 0, 1, False, 128_256 * 5 + 28),
        (TWO_RANKS, 0, 1, True, 128_256 + 28),
        (LogitsShape(128_256, 4, 4), 0, 2, True, 128_256 * 2 + 28),
    ],
)
def test_bytes_of_a_row_that_is_read_once(shape, num_top, temperature, sharded, expected):
    assert row_bytes_fused(shape, num_top, temperature, sharded=sharded) == expected


@pytest.mark.parametrize(
    ("shape", "reference_bytes", "num_top", "temperature", "sharded", "expected"),
    [
        # Two sides take what capping takes of one; 28 bytes for each of two tokens of both.
        (BFLOAT16, 2, 0, 1, False, 128_256 * 4 + 112),
        (BFLOAT16, 2, 1, 2, False, 128_256 * 4 + 112),
        (BFLOAT16, 4, 1, None, False, 128_256 * 6 + 112),
        # Lanes of one side after the other; 21 tokens of both.
        (BFLOAT16, 2, 20, 1, False, 128_256 * 4 + 28 * 42 + LANES),
        # Gathering the served side takes more than both in order; or half a row of each.
        (TWO_RANKS, 2, 0, 1, False, 128_256 * 5 + 112),
        (TWO_RANKS, 4, 0, 1, True, 128_256 * 3 + 112),
        (LogitsShape(50_257, 4), 4, 0, 1, False, 50_304 * 8 + 112),
    ],
)
def test_bytes_of_a_row_of_both_sides(shape, reference_bytes, num_top, temperature, sharded, expected):
    assert row_bytes_compared(shape, reference_bytes, num_top, temperature, sharded=sharded) == expected


@pytest.mark.parametrize(
    ("budget", "row_bytes", "rows"),
    [
        (256 * MEBIBYTE, 128_256 * 4 + 588, 512),  # 522 fit: four whole tiles
        (256 * MEBIBYTE, 262_144 * 4 + 588, 128),  # 255 fit
        (256 * MEBIBYTE, 262_144 * 10 + 588, 102),
        (1290, 10, 128),
        (1, 10, 1),
    ],
)
def test_rows_within_a_budget(budget: int, row_bytes: int, rows: int):
    assert rows_per_chunk(budget, row_bytes) == rows


@pytest.mark.parametrize(
    ("rows", "limit", "expected"),
    # As few chunks as can be, of equal size in whole tiles of 128 rows: 600 and a limit of 512 are 384 and 216.
    [(1, 512, 128), (512, 512, 512), (600, 512, 384), (1000, 512, 512), (1000, 300, 256), (500, 100, 100)],
)
def test_rows_of_chunks_by_hand(rows: int, limit: int, expected: int):
    starts = range(0, rows, expected)
    assert list(in_chunks(rows, limit)) == [slice(start, min(start + expected, rows)) for start in starts]
