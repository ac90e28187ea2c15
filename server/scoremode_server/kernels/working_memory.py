"""Working memory of prompt logprobs, in bytes a row of logits, and how many rows a budget holds."""

import math
from dataclasses import dataclass

MAX_TOP = 256
"""Top tokens per row that the Triton kernels find; PyTorch's find any number."""

RESERVED_TOP = 20
"""Top tokens per position that are counted and reserved: vLLM's default `max_logprobs`."""

VOCABULARY_PADDING = 64
"""vLLM pads the rows of the vocabulary projection to a multiple of this."""

RESULT_BYTES = 28
"""Per token returned: top-k values and indices (4 + 8), both again with the actual token before them, indices as int32
(4 + 8 + 4)."""

TILE_ROWS = 128
"""Rows that the projection's kernels compute together; part of a tile costs as much as all of it."""

BLOCK_ENTRIES = 2**18
"""Entries of logits that `torch_kernels` takes at a time, where a row has no more."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a program walks through its row: in tiles of `lanes` x `width` entries, both powers of two. A lane keeps a
    maximum, and takes `width` neighboring entries of a tile; 8 of 2 bytes are the widest load."""

    lanes: int
    width: int
    num_warps: int

    def lane_entries(self, columns: int) -> int:
        """Entries of a row that a lane takes, those past the row's end among them."""
        return max(1, -(-columns // (self.lanes * self.width))) * self.width


TILING = Tiling(lanes=1024, width=8, num_warps=8)
PAIR_TILING = Tiling(lanes=512, width=8, num_warps=8)
"""Of kernels that read two rows: as many entries at a time."""


@dataclass(frozen=True, slots=True)
class LogitsShape:
    """The numbers that decide the size of one row of logits."""

    vocab_size: int
    """Entries, before padding."""
    logit_bytes: int
    """Of one logit as the projection leaves it, in the dtype of the model's head."""
    tensor_parallel_size: int = 1

    @property
    def padded(self) -> int:
        """Entries of a row in memory."""
        return math.ceil(self.vocab_size / VOCABULARY_PADDING) * VOCABULARY_PADDING


def row_bytes_fused(shape: LogitsShape, num_top: int, copies: int | None, sharded: bool = False) -> int:
    """Peak working memory per row of `fused_logprobs`, with `num_top` top tokens. At its peak the projection holds
    `copies` of the logits, None where that is not known. If `sharded`, a rank keeps to its part of the vocabulary."""
    return _row_bytes(shape, _entry_bytes(shape, copies, sharded), num_top + 1, num_top)


def row_bytes_compared(
    shape: LogitsShape, reference_logit_bytes: int, num_top: int, copies: int | None, sharded: bool = False
) -> int:
    """Peak working memory per row of `kl_divergence.compare`, as `row_bytes_fused` has it for the served model. On a
    CPU add `block_bytes`, once for all rows."""
    num_top = max(1, num_top)
    both_bytes = (shape.logit_bytes + reference_logit_bytes) / (shape.tensor_parallel_size if sharded else 1)
    # Two peaks: the served model's projection, and both sides' logits.
    entry_bytes = max(_entry_bytes(shape, copies, sharded), both_bytes)
    # Results of both sides; one is reduced after the other.
    return _row_bytes(shape, entry_bytes, 2 * (num_top + 1), num_top)


def block_bytes(shape: LogitsShape) -> int:
    """Peak memory of `torch_kernels` in addition to logits and results: a block in four float64 buffers, and a mask."""
    return max(BLOCK_ENTRIES, shape.padded) * (4 * 8 + 1)


def _entry_bytes(shape: LogitsShape, copies: int | None, sharded: bool) -> float:
    """Bytes per vocabulary entry at the peak of a projection, as `row_bytes_fused` has it."""
    ranks = shape.tensor_parallel_size
    if ranks > 1 and (copies is None or not sharded):
        # The shard, all shards as they arrive, and the same again in the order of the vocabulary.
        return (2 + 1 / ranks) * shape.logit_bytes
    # Where it is not known: before and after capping.
    return (2 if copies is None else copies) * shape.logit_bytes / ranks


def _row_bytes(shape: LogitsShape, entry_bytes: float, num_results: int, num_top: int) -> int:
    """Add up the bytes of a row, including the lanes' maxima and the candidates from the chosen ones,
    which are float32."""
    entries = TILING.lanes + num_top * TILING.lane_entries(shape.padded) if 1 < num_top <= MAX_TOP else 0
    return math.ceil(shape.padded * entry_bytes) + RESULT_BYTES * num_results + 4 * entries


def rows_per_chunk(budget_bytes: int, row_bytes: int) -> int:
    """Rows whose working memory stays within the budget, in whole tiles where there are several; at least one."""
    rows = budget_bytes // row_bytes
    return max(1, rows - rows % TILE_ROWS if rows > TILE_ROWS else rows)
