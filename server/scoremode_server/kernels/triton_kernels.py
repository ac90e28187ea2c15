"""Triton kernels that read rows of logits once and leave what prompt logprobs are made of.

A program takes one row and walks through it in tiles of `LANES` x `WIDTH` entries. Lane l of a tile holds the entries
l * WIDTH to (l + 1) * WIDTH, one load of a thread, and keeps what it has seen in all tiles: the maximum, the sum of
exponentials below it (online softmax, Milakov and Gimelshein 2018), and how many entries reach the target. So the loop
needs no exchange between threads, and at its end the maxima of the lanes serve the top k as well: k entries that are
the top k lie in the k lanes with the highest maxima.

Everything is computed in float32, into which the logits' own dtypes convert exactly. A NaN anywhere in a row makes its
sum NaN.
"""

import torch
import triton
import triton.language as tl

from scoremode_server.kernels.reduced_rows import ReducedRows
from scoremode_server.kernels.tiling import TILING, Tiling

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Stands for -inf where entries are picked, so that entries of probability 0 come before columns that do not exist."""

NO_COLUMN = tl.constexpr(2**31 - 1)
TARGET_ROWS = 128
"""Rows that one program takes the targets of."""


def take_targets(logits: torch.Tensor, targets: torch.Tensor, first: int, columns: int, out: ReducedRows) -> None:
    """Write each row's target and its logit, -inf where these columns do not hold it.

    Args:
        logits: [rows, at least `columns`], of a floating dtype, neighbouring columns next to each other in memory.
        targets: [rows] int32 or int64 tokens.
        first: token of the first column.
        columns: that count; those after them are padding.
        out: of these rows.
    """
    require_rows(logits)
    rows = len(targets)
    _take_targets[(triton.cdiv(rows, TARGET_ROWS),)](
        out.tokens,
        out.logits,
        out.tokens.stride(0),
        logits,
        logits.stride(0),
        targets,
        first,
        columns,
        rows,
        BLOCK=TARGET_ROWS,
    )


def reduce_rows(
    logits: torch.Tensor,
    first: int,
    columns: int,
    out: ReducedRows,
    temperature: float = 1.0,
    tiling: Tiling = TILING,
) -> None:
    """Write all else: what `ReducedRows` says of these columns, with -1 for a token where there are fewer than k.

    Args:
        logits: as for `take_targets`.
        first: token of the first column.
        columns: that count; those after them are padding.
        out: of these rows, with the logits of the targets.
        temperature: of the sums.
        tiling: for measurements.
    """
    require_rows(logits)
    rows, num_top = len(logits), out.num_top
    maxima = logits.new_empty((rows, tiling.lanes), dtype=torch.float32) if num_top > 1 else out.maxima
    _reduce_rows[(rows,)](
        out.tokens,
        out.logits,
        out.tokens.stride(0),
        out.maxima,
        out.sums,
        out.ranks,
        maxima,
        logits,
        logits.stride(0),
        first,
        columns,
        1 / temperature,
        LANES=tiling.lanes,
        WIDTH=tiling.width,
        STAGES=tiling.num_stages,
        BEST=num_top == 1,
        MAXIMA=num_top > 1,
        SCALED=temperature != 1.0,
        num_warps=tiling.num_warps,
    )
    if num_top > 1:
        _top_of_lanes(logits, first, columns, maxima, out, tiling)


def require_rows(logits: torch.Tensor) -> None:
    """Raises ValueError where neighbouring columns are not next to each other in memory."""
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be rows of neighbouring entries: {tuple(logits.shape)}, {logits.stride()}")


def _top_of_lanes(
    logits: torch.Tensor, first: int, columns: int, maxima: torch.Tensor, out: ReducedRows, tiling: Tiling
) -> None:
    """Write the k highest logits and their tokens, in falling order, from the lanes' maxima [rows, lanes]."""
    rows, num_top = len(logits), out.num_top
    lanes = torch.topk(maxima, num_top, dim=-1, sorted=False).indices
    entries = tiling.lane_entries(columns)
    candidates = maxima.new_empty((rows, num_top * entries))
    block = triton.next_power_of_2(num_top)
    shape = {"LANES": tiling.lanes, "WIDTH": tiling.width, "BLOCK": block}
    _candidates[(rows, entries // tiling.width)](
        candidates, lanes, logits, logits.stride(0), columns, num_top, entries, **shape
    )
    places = torch.topk(candidates, num_top, dim=-1).indices
    _pick[(rows,)](
        out.tokens,
        out.logits,
        out.tokens.stride(0),
        places,
        lanes,
        logits,
        logits.stride(0),
        first,
        columns,
        num_top,
        entries,
        **shape,
    )


@triton.jit
def _take_targets(
    tokens, target_logits, out_stride, logits, stride, targets, first, columns, rows, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row, mask=row < rows, other=-1).to(tl.int64)
    column = target - first
    held = (row < rows) & (column >= 0) & (column < columns)
    logit = tl.load(logits + row * stride + column, mask=held, other=float("-inf"))
    tl.store(tokens + row * out_stride, target.to(tl.int32), mask=row < rows)
    tl.store(target_logits + row * out_stride, logit.to(tl.float32), mask=row < rows)


@triton.jit
def _reduce_rows(
    tokens,
    kept_logits,
    out_stride,
    row_maxima,
    row_sums,
    ranks,
    lane_maxima,
    logits,
    stride,
    first,
    columns,
    scale,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    BEST: tl.constexpr,
    MAXIMA: tl.constexpr,
    SCALED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(kept_logits + row * out_stride)
    tile: tl.constexpr = LANES * WIDTH
    lanes = tl.arange(0, LANES)
    entries = lanes[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    maxima = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    counts = tl.zeros([LANES], tl.int32)
    origins = tl.zeros([LANES], tl.int32)
    whole = columns // tile * tile
    # Whole tiles need no mask, which would keep loads narrow wherever the vocabulary is not a multiple of 16.
    for origin in tl.range(0, whole, tile, num_stages=STAGES):
        seen = tl.load(start + origin + entries).to(tl.float32)
        maxima, sums, counts, origins = _fold(seen, origin, target, maxima, sums, counts, origins, scale, SCALED)
    padding = 0
    if whole < columns:
        rest = tl.load(start + whole + entries, mask=whole + entries < columns, other=float("-inf")).to(tl.float32)
        maxima, sums, counts, origins = _fold(rest, whole, target, maxima, sums, counts, origins, scale, SCALED)
        padding = whole + tile - columns
    maximum = tl.max(maxima, 0)
    total = tl.sum((sums * _exp(maxima - _finite(maximum), scale, SCALED)).to(tl.float64), 0)
    # A target of -inf is reached by the padding of the last tile too.
    count = tl.sum(counts, 0) - tl.where(target == float("-inf"), padding, 0)
    tl.store(row_maxima + row, maximum)
    tl.store(row_sums + row, total)
    tl.store(ranks + row, count)
    if BEST:
        group = tl.min(tl.where(maxima == maximum, origins + lanes * WIDTH, NO_COLUMN), 0)
        # No entry equals a maximum of NaN; the row is NaN with any choice.
        group = tl.where(group == NO_COLUMN, 0, group)
        width = tl.arange(0, WIDTH)
        held = tl.load(start + group + width, mask=group + width < columns, other=float("-inf")).to(tl.float32)
        column = group + tl.min(tl.where(held == maximum, width, WIDTH), 0) % WIDTH
        tl.store(kept_logits + row * out_stride + 1, maximum)
        tl.store(tokens + row * out_stride + 1, tl.where(columns > 0, first + column, -1))
    if MAXIMA:
        kept = tl.where(lanes * WIDTH < columns, tl.maximum(maxima, LOWEST), float("-inf"))
        tl.store(lane_maxima + row * LANES + lanes, kept)


@triton.jit
def _fold(seen, origin, target, maxima, sums, counts, origins, scale, SCALED: tl.constexpr):
    """Take a tile [lanes, width] that starts at column `origin` into what the lanes keep."""
    tile_maxima = tl.max(seen, 1)
    risen = tl.maximum(maxima, tile_maxima)
    base = _finite(risen)
    sums = sums * _exp(maxima - base, scale, SCALED) + tl.sum(_exp(seen - base[:, None], scale, SCALED), 1)
    counts += tl.sum((seen >= target).to(tl.int32), 1)
    origins = tl.where(tile_maxima > maxima, origin, origins)
    return risen, sums, counts, origins


@triton.jit
def _exp(logit, scale, SCALED: tl.constexpr):
    if SCALED:
        logit *= scale
    return tl.exp(logit)


@triton.jit
def _finite(maximum):
    """What to subtract in exponents: where all is -inf so far, 0, as -inf less -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _candidates(
    out,
    lanes,
    logits,
    stride,
    columns,
    num_top,
    lane_entries,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one tile's entries of the chosen lanes: out [rows, num_top, lane_entries]."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.arange(0, BLOCK)
    width = tl.arange(0, WIDTH)[None, :]
    lane = tl.load(lanes + row * num_top + slot, mask=slot < num_top, other=0).to(tl.int32)
    column = (tile * LANES + lane[:, None]) * WIDTH + width
    held = (slot < num_top)[:, None] & (column < columns)
    logit = tl.load(logits + row * stride + column, mask=held, other=float("-inf")).to(tl.float32)
    logit = tl.where(held, tl.maximum(logit, LOWEST), float("-inf"))
    place = (row * num_top + slot[:, None]) * lane_entries + tile * WIDTH + width
    tl.store(out + place, logit, mask=(slot < num_top)[:, None])


@triton.jit
def _pick(
    tokens,
    kept_logits,
    out_stride,
    places,
    lanes,
    logits,
    stride,
    first,
    columns,
    num_top,
    lane_entries,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn places among the candidates into tokens and their logits."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    place = tl.load(places + row * num_top + slot, mask=slot < num_top, other=0).to(tl.int32)
    lane = tl.load(lanes + row * num_top + place // lane_entries).to(tl.int32)
    entry = place % lane_entries
    column = (entry // WIDTH * LANES + lane) * WIDTH + entry % WIDTH
    held = (slot < num_top) & (column < columns)
    logit = tl.load(logits + row * stride + column, mask=held, other=float("-inf"))
    out = row * out_stride + 1 + slot
    tl.store(kept_logits + out, logit.to(tl.float32), mask=slot < num_top)
    tl.store(tokens + out, tl.where(held, first + column, -1), mask=slot < num_top)
