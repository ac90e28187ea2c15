"""Triton kernels over rows of logits; `torch_kernels` has the same functions in PyTorch.

A program reads one row, or two to compare, in tiles of `LANES` x `WIDTH` entries. Lane l reads the entries l * WIDTH to
(l + 1) * WIDTH of each tile, with one load of a thread, and accumulates over all tiles. So the loop needs no exchange
between threads.
"""

import torch
import triton
import triton.language as tl

from scoremode_server.kernels.reduced_rows import ReducedRows, put_first
from scoremode_server.kernels.torch_kernels import LOWEST_EXPONENT
from scoremode_server.kernels.working_memory import PAIR_TILING, TILING, Tiling

LOWEST_X = tl.constexpr(LOWEST_EXPONENT)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Replaces -inf while top entries are picked, so that entries of probability 0 come before columns that do not
exist."""

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
CLOSE = tl.constexpr(0.25)
"""Limit on |log(p/q)| for the power series: below it, the first omitted term is less than a rounding of float32."""

NO_COLUMN = tl.constexpr(2**31 - 1)
TARGET_ROWS = 128
"""How many rows' targets one program reads."""


def take_targets(logits: torch.Tensor, targets: torch.Tensor, first: int, columns: int, out: ReducedRows) -> None:
    """Write each row's target and its logit, -inf if the target is outside these columns.

    Args:
        logits: [rows, at least `columns`], of a floating dtype, neighboring columns next to each other in memory.
        targets: [rows] int32 or int64 tokens.
        first: token id of the first column.
        columns: how many columns count; later columns are padding.
    """
    require_rows(logits)
    into = out.tokens, out.logits, out.tokens.stride(0)
    rows = len(targets)
    grid = (triton.cdiv(rows, TARGET_ROWS),)
    _take_targets[grid](*into, logits, logits.stride(0), targets, first, columns, rows, BLOCK=TARGET_ROWS)


def reduce_rows(
    logits: torch.Tensor, first: int, columns: int, out: ReducedRows, temperature: float = 1.0, tiling: Tiling = TILING
) -> None:
    """Write everything in `ReducedRows` except the target and its logit, for these columns. If there are fewer than k
    columns, the other top tokens are -1.

    Each lane keeps its maximum, the sum of exponentials relative to it (online softmax, Milakov and Gimelshein 2018),
    and how many entries reach the target. The k lanes with the highest maxima contain the top k. Everything is computed
    in float32, to which the logits' dtypes convert exactly. A NaN in a row makes its sum NaN.

    Arguments are as for `take_targets`. `out` must have the targets' logits already. `temperature` applies to the sums.
    `tiling` is for measurements.
    """
    require_rows(logits)
    rows, num_top = len(logits), out.num_top
    maxima = logits.new_empty((rows, tiling.lanes), dtype=torch.float32) if num_top > 1 else out.maxima
    into = out.tokens, out.logits, out.tokens.stride(0), out.maxima, out.sums, out.ranks, maxima
    variant = {"BEST": num_top > 0, "MAXIMA": num_top > 1, "SCALED": temperature != 1.0}
    _reduce_rows[(rows,)](*into, logits, logits.stride(0), first, columns, 1 / temperature, **_shape(tiling), **variant)
    if num_top > 1:
        best = out.tokens[:, 1:2].clone()
        _top_of_lanes(logits, first, columns, maxima, out, tiling)
        put_first(out.tokens[:, 1:], best)


def require_rows(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be rows of neighboring entries: {tuple(logits.shape)}, {logits.stride()}")


def _shape(tiling: Tiling) -> dict[str, int]:
    return {"LANES": tiling.lanes, "WIDTH": tiling.width, "num_warps": tiling.num_warps}


def _top_of_lanes(
    logits: torch.Tensor, first: int, columns: int, maxima: torch.Tensor, out: ReducedRows, tiling: Tiling
) -> None:
    """Write the k highest logits and their tokens, in descending order, from the lanes' maxima [rows, lanes]."""
    rows, num_top = len(logits), out.num_top
    lanes = torch.topk(maxima, num_top, dim=-1, sorted=False).indices
    entries = tiling.lane_entries(columns)
    candidates = maxima.new_empty((rows, num_top * entries))
    block = triton.next_power_of_2(num_top)
    shape = {"LANES": tiling.lanes, "WIDTH": tiling.width, "BLOCK": block}
    grid = rows, entries // tiling.width
    _candidates[grid](candidates, lanes, logits, logits.stride(0), columns, num_top, entries, **shape)
    places = torch.topk(candidates, num_top, dim=-1).indices
    into = out.tokens, out.logits, out.tokens.stride(0)
    _pick[(rows,)](*into, places, lanes, logits, logits.stride(0), first, columns, num_top, entries, **shape)


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
    # Whole tiles need no mask, which would make loads narrow if the vocabulary is not a multiple of 16.
    for origin in tl.range(0, whole, tile, num_stages=1):
        seen = tl.load(start + origin + entries).to(tl.float32)
        maxima, sums, counts, origins = _fold(seen, origin, target, maxima, sums, counts, origins, scale, SCALED)
    padding = 0
    if whole < columns:
        rest = tl.load(start + whole + entries, mask=whole + entries < columns, other=float("-inf")).to(tl.float32)
        maxima, sums, counts, origins = _fold(rest, whole, target, maxima, sums, counts, origins, scale, SCALED)
        padding = whole + tile - columns
    maximum = tl.max(maxima, 0)
    total = tl.sum((sums * _exp(maxima - _finite(maximum), scale, SCALED)).to(tl.float64), 0)
    # If the target's logit is -inf, padding in the last tile was counted too.
    count = tl.sum(counts, 0) - tl.where(target == float("-inf"), padding, 0)
    tl.store(row_maxima + row, maximum)
    tl.store(row_sums + row, total)
    tl.store(ranks + row, count)
    if BEST:
        group = tl.min(tl.where(maxima == maximum, origins + lanes * WIDTH, NO_COLUMN), 0)
        # No entry equals a maximum of NaN. The row is then NaN, whatever the token.
        group = tl.where(group == NO_COLUMN, 0, group)
        width = tl.arange(0, WIDTH)
        held = tl.load(start + group + width, mask=group + width < columns, other=float("-inf")).to(tl.float32)
        column = group + tl.min(tl.where(held == maximum, width, WIDTH), 0) % WIDTH
        tl.store(kept_logits + row * out_stride + 1, maximum)
        tl.store(tokens + row * out_stride + 1, tl.where(columns > 0, first + column, -1))
    if MAXIMA:
        raised = tl.where(lanes * WIDTH < columns, tl.maximum(maxima, LOWEST), float("-inf"))
        tl.store(lane_maxima + row * LANES + lanes, raised)


@triton.jit
def _fold(seen, origin, target, maxima, sums, counts, origins, scale, SCALED: tl.constexpr):
    """Add a tile [lanes, width], which starts at column `origin`, to the lanes' maxima, sums and counts. `origins` has
    the tile of each maximum."""
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
    """Choose what to subtract in exponents: the maximum, or 0 if all entries so far are -inf, as -inf minus -inf is
    NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _candidates(
    out, lanes, logits, stride, columns, num_top, entries, LANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy one tile's entries of the chosen lanes to `out`, [rows, num_top, entries of a lane]."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.arange(0, BLOCK)
    width = tl.arange(0, WIDTH)[None, :]
    lane = tl.load(lanes + row * num_top + slot, mask=slot < num_top, other=0).to(tl.int32)
    column = (tile * LANES + lane[:, None]) * WIDTH + width
    held = (slot < num_top)[:, None] & (column < columns)
    logit = tl.load(logits + row * stride + column, mask=held, other=float("-inf")).to(tl.float32)
    logit = tl.where(held, tl.maximum(logit, LOWEST), float("-inf"))
    place = (row * num_top + slot[:, None]) * entries + tile * WIDTH + width
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


def sum_divergences(
    logits: torch.Tensor,
    reference_logits: torch.Tensor,
    columns: int,
    served: ReducedRows,
    reference: ReducedRows,
    log_sum_ratios: torch.Tensor,
) -> torch.Tensor:
    """Compute `torch_kernels.sum_divergences` of rows whose columns are next to each other in memory.

    Each lane sums its entries in float32, and the lanes are summed in float64. If p and q are close, a term is the
    small difference of large numbers, which loses digits. It is then computed as p times a power series in log(p/q).
    Entries of -inf are rare, and checking for them takes a fifth of the arithmetic. So a row is first summed without
    checks, and again with them if the sums are not finite.
    """
    require_rows(logits)
    require_rows(reference_logits)
    sums = logits.new_empty((len(logits), 3), dtype=torch.float32)
    p = reference_logits, reference_logits.stride(0), reference.maxima, (1 / reference.sums).float()
    q = logits, logits.stride(0), served.maxima, (1 / served.sums).float()
    # An error of the ratios in float32 cancels to the first order, like an error of the sums.
    _sum_divergences[(len(logits),)](sums, *p, *q, log_sum_ratios.float(), columns, **_shape(PAIR_TILING))
    return sums


@triton.jit
def _sum_divergences(
    out,
    p_logits,
    p_stride,
    p_maxima,
    p_scales,
    q_logits,
    q_stride,
    q_maxima,
    q_scales,
    log_sum_ratios,
    columns,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_start = p_logits + row * p_stride
    q_start = q_logits + row * q_stride
    p_maximum = tl.load(p_maxima + row)
    q_maximum = tl.load(q_maxima + row)
    p_scale = tl.load(p_scales + row)
    q_scale = tl.load(q_scales + row)
    log_sum_ratio = tl.load(log_sum_ratios + row)
    forward, backward, distance = _add_up(
        *(p_start, p_maximum, p_scale, q_start, q_maximum, q_scale, log_sum_ratio, columns),
        *(LANES, WIDTH, False),
    )
    # The comparison is also false if a sum is NaN.
    if not (forward + backward < float("inf")):
        forward, backward, distance = _add_up(
            *(p_start, p_maximum, p_scale, q_start, q_maximum, q_scale, log_sum_ratio, columns),
            *(LANES, WIDTH, True),
        )
    tl.store(out + row * 3, forward)
    tl.store(out + row * 3 + 1, backward)
    tl.store(out + row * 3 + 2, distance)


@triton.jit
def _add_up(
    p_start,
    p_maximum,
    p_scale,
    q_start,
    q_maximum,
    q_scale,
    log_sum_ratio,
    columns,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    INFINITE: tl.constexpr,
):
    """Compute the three sums over a row. If the row has entries of -inf, the sums are NaN or infinite unless `INFINITE`
    is set."""
    tile: tl.constexpr = LANES * WIDTH
    entries = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    forward = tl.zeros([LANES], tl.float32)
    backward = tl.zeros([LANES], tl.float32)
    distances = tl.zeros([LANES], tl.float32)
    whole = columns // tile * tile
    # Whole tiles need no mask, which would make loads narrow if the vocabulary is not a multiple of 16.
    for origin in tl.range(0, whole, tile, num_stages=1):
        p_seen = tl.load(p_start + origin + entries).to(tl.float32)
        q_seen = tl.load(q_start + origin + entries).to(tl.float32)
        forward, backward, distances = _add_tile(
            *(forward, backward, distances, p_seen - p_maximum, q_seen - q_maximum),
            *(p_scale, q_scale, log_sum_ratio, INFINITE),
        )
    if whole < columns:
        held = whole + entries < columns
        # Padding becomes -inf in both rows, which adds nothing.
        p_seen = tl.load(p_start + whole + entries, mask=held, other=float("-inf")).to(tl.float32)
        q_seen = tl.load(q_start + whole + entries, mask=held, other=float("-inf")).to(tl.float32)
        forward, backward, distances = _add_tile(
            *(forward, backward, distances, p_seen - p_maximum, q_seen - q_maximum),
            *(p_scale, q_scale, log_sum_ratio, True),
        )
    return (
        tl.sum(forward.to(tl.float64), 0).to(tl.float32),
        tl.sum(backward.to(tl.float64), 0).to(tl.float32),
        tl.sum(distances.to(tl.float64), 0).to(tl.float32),
    )


@triton.jit
def _add_tile(
    forwards, backwards, distances, p_logit, q_logit, p_scale, q_scale, log_sum_ratio, INFINITE: tl.constexpr
):
    """Add a tile's terms to the three sums of each lane, from logits minus their rows' maxima."""
    p = tl.exp(p_logit) * p_scale
    q = tl.exp(q_logit) * q_scale
    difference = p - q
    log_ratio = p_logit - q_logit
    if INFINITE:
        # Two logits of -inf count as equal.
        log_ratio = tl.where(p_logit == q_logit, 0.0, log_ratio)
    log_ratio -= log_sum_ratio
    close = tl.abs(log_ratio) < CLOSE
    square = log_ratio * log_ratio
    # The series of (exp(-x) - 1 + x) / x**2 for x = log_ratio, in even and odd terms.
    even = 1 / 2 + square * (1 / 24 + square * (1 / 720))
    odd = log_ratio * (1 / 6 + square * (1 / 120 + square * (1 / 5040)))
    finite = log_ratio
    if INFINITE:
        # A probability of 0 times an infinite ratio is 0.
        finite = tl.minimum(tl.maximum(log_ratio, -LARGEST), LARGEST)
    forward = tl.where(close, p * square * (even - odd), p * finite - difference)
    backward = tl.where(close, q * square * (even + odd), difference - q * finite)
    if INFINITE:
        # If one probability is 0, the other may have underflowed to 0, but is still more than 0: the sum is infinite.
        forward = tl.where(log_ratio == float("inf"), float("inf"), forward)
        backward = tl.where(log_ratio == float("-inf"), float("inf"), backward)
    return forwards + tl.sum(forward, 1), backwards + tl.sum(backward, 1), distances + tl.sum(tl.abs(difference), 1)


def sum_moments(logits: torch.Tensor, columns: int, scores: ReducedRows, temperature: float = 1.0) -> torch.Tensor:
    """Compute `torch_kernels.sum_moments` of rows whose columns are next to each other in memory. Each lane sums its
    entries in float32, and the lanes are summed in float64."""
    require_rows(logits)
    sums = logits.new_empty((len(logits), 2), dtype=torch.float32)
    arguments = logits, logits.stride(0), scores.maxima, (1 / scores.sums).float(), columns, 1 / temperature
    _sum_moments[(len(logits),)](sums, *arguments, **_shape(TILING))
    return sums


@triton.jit
def _sum_moments(
    out, logits, stride, maxima, scales, columns, inverse_temperature, LANES: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    maximum = tl.load(maxima + row)
    scale = tl.load(scales + row)
    tile: tl.constexpr = LANES * WIDTH
    entries = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    firsts = tl.zeros([LANES], tl.float32)
    seconds = tl.zeros([LANES], tl.float32)
    whole = columns // tile * tile
    for origin in tl.range(0, whole, tile, num_stages=1):
        x = (tl.load(start + origin + entries).to(tl.float32) - maximum) * inverse_temperature
        firsts, seconds = _add_moments(firsts, seconds, x, scale)
    if whole < columns:
        held = whole + entries < columns
        # Padding becomes -inf, which adds nothing.
        rest = tl.load(start + whole + entries, mask=held, other=float("-inf")).to(tl.float32)
        firsts, seconds = _add_moments(firsts, seconds, (rest - maximum) * inverse_temperature, scale)
    tl.store(out + row * 2, tl.sum(firsts.to(tl.float64), 0).to(tl.float32))
    tl.store(out + row * 2 + 1, tl.sum(seconds.to(tl.float64), 0).to(tl.float32))


@triton.jit
def _add_moments(firsts, seconds, x, scale):
    """Add a tile's terms to the two sums of each lane."""
    p = tl.exp(x) * scale
    x = tl.maximum(x, LOWEST_X)
    return firsts + tl.sum(p * x, 1), seconds + tl.sum(p * x * x, 1)
