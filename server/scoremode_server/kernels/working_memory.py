"""Working memory of prompt logprobs, in bytes per row of logits, and how many rows fit a budget."""

import math
from dataclasses import dataclass

MAX_TOP = 256
"""Limit on top tokens per row in the Triton kernels. The PyTorch kernels have no limit."""

RESERVED_TOP = 20
"""Top tokens per row for which memory is reserved: vLLM's default `max_logprobs`."""

VOCABULARY_PADDING = 64
"""vLLM pads the rows of the vocabulary projection to a multiple of this."""

RESULT_BYTES = 28
"""Bytes per returned token at the peak: its value and index from top-k (4 + 8), a copy of both after the actual token
(4 + 8), and the index as int32 (4)."""

TILE_ROWS = 128
"""Rows that the kernels of the vocabulary projection compute together, as a tile. Part of a tile costs as much as all
of it."""

BLOCK_ENTRIES = 2**18
"""Entries of logits that `torch_kernels` converts at a time; a longer row is converted alone."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a Triton program reads a row of logits: in tiles of `lanes` x `width` entries, both powers of two. A lane
    reads `width` neighboring entries of each tile, and keeps a maximum. The widest load has 8 entries of 2 bytes."""

    lanes: int
    width: int
    num_warps: int

    def lane_entries(self, columns: int) -> int:
        """Entries of a row that one lane reads, including those past the row's end."""
        return max(1, -(-columns // (self.lanes * self.width))) * self.width


TILING = Tiling(lanes=1024, width=8, num_warps=8)
PAIR_TILING = Tiling(lanes=512, width=8, num_warps=8)
"""Tiling of kernels that read two rows at once: half as many entries of each."""


@dataclass(frozen=True, slots=True)
class LogitsShape:
    """The numbers that decide the size of one row of logits."""

    vocab_size: int
    """Entries of a row, without padding."""
    logit_bytes: int
    """Bytes of one logit in the projection's output, whose dtype is that of the model's head."""
    tensor_parallel_size: int = 1

    @property
    def padded(self) -> int:
        """Entries of a row in memory, with padding."""
        return math.ceil(self.vocab_size / VOCABULARY_PADDING) * VOCABULARY_PADDING


def row_bytes_fused(shape: LogitsShape, num_top: int, copies: int | None, sharded: bool = False) -> int:
    """Peak working memory per row of `fused_logprobs`, with `num_top` top tokens. At its peak the projection holds
    `copies` copies of the logits; None if this number is unknown. If `sharded`, a rank computes only its part of the
    vocabulary."""
    return _row_bytes(shape, _entry_bytes(shape, copies, sharded), num_top + 1, num_top)


def row_bytes_compared(
    shape: LogitsShape, reference_logit_bytes: int, num_top: int, copies: int | None, sharded: bool = False
) -> int:
    """Peak working memory per row of `kl_divergence.compare`. The arguments of the same name as in `row_bytes_fused`
    describe the served model. On a CPU add `block_bytes`, once for all rows."""
    num_top = max(1, num_top)
    both_bytes = (shape.logit_bytes + reference_logit_bytes) / (shape.tensor_parallel_size if sharded else 1)
    # Memory peaks during the served model's projection, or while both models' logits exist.
    entry_bytes = max(_entry_bytes(shape, copies, sharded), both_bytes)
    # Both models have results, but their rows are reduced one after the other.
    return _row_bytes(shape, entry_bytes, 2 * (num_top + 1), num_top)


def block_bytes(shape: LogitsShape) -> int:
    """Peak memory of `torch_kernels` in addition to logits and results: four float64 buffers and a mask, each for one
    block."""
    return max(BLOCK_ENTRIES, shape.padded) * (4 * 8 + 1)


def _entry_bytes(shape: LogitsShape, copies: int | None, sharded: bool) -> float:
    """Bytes per vocabulary entry at the peak of a projection, for arguments of `row_bytes_fused`."""
    ranks = shape.tensor_parallel_size
    if ranks > 1 and (copies is None or not sharded):
        # Count this rank's shard, all shards as they arrive, and a copy of them in the order of the vocabulary.
        return (2 + 1 / ranks) * shape.logit_bytes
    # If unknown, assume two copies: before and after capping.
    return (2 if copies is None else copies) * shape.logit_bytes / ranks


def _row_bytes(shape: LogitsShape, entry_bytes: float, num_results: int, num_top: int) -> int:
    """Add up the bytes of a row's logits and results. If it has several top tokens, add the lanes' maxima and the
    chosen lanes' entries, in float32."""
    entries = TILING.lanes + num_top * TILING.lane_entries(shape.padded) if 1 < num_top <= MAX_TOP else 0
    return math.ceil(shape.padded * entry_bytes) + RESULT_BYTES * num_results + 4 * entries


def rows_per_chunk(budget_bytes: int, row_bytes: int) -> int:
    """How many rows fit the budget: at least one. More than `TILE_ROWS` are rounded down to whole tiles."""
    rows = budget_bytes // row_bytes
    return max(1, rows - rows % TILE_ROWS if rows > TILE_ROWS else rows)
