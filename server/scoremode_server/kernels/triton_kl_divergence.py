"""The Triton kernel that reads two rows of logits at once and adds up how far their distributions are apart.

A program takes one row of both and walks through them as `triton_kernels` does. Each lane adds up its entries in
float32, and the lanes are added in float64. A term of the forward sum is p log(p/q) - p + q: q where p = 0, and
infinity where q = 0. Where p and q are close, it is the small difference of large numbers: there it is p times a power
series in log(p/q), whose error is but a rounding of itself. The backward sum's is the same with p and q exchanged.

Entries of -inf are rare, and to look for them takes a fifth of the arithmetic. So a row is added up as if it had none;
where that does not come to numbers, it is added up again.
"""

import torch
import triton
import triton.language as tl

from scoremode_server.kernels.reduced_rows import ReducedRows
from scoremode_server.kernels.tiling import PAIR_TILING, Tiling
from scoremode_server.kernels.triton_kernels import require_rows

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
CLOSE = tl.constexpr(0.25)
"""Below it the series' first omitted term is less than a rounding of float32."""


def sum_divergences(
    logits: torch.Tensor,
    reference_logits: torch.Tensor,
    columns: int,
    served: ReducedRows,
    reference: ReducedRows,
    log_sum_ratios: torch.Tensor,
    tiling: Tiling = PAIR_TILING,
) -> torch.Tensor:
    """As `torch_kernels.sum_divergences`; of both logits, neighbouring columns lie next to each other in memory.

    Args:
        tiling: for measurements.
    """
    require_rows(logits)
    require_rows(reference_logits)
    sums = logits.new_empty((len(logits), 3), dtype=torch.float32)
    _sum_divergences[(len(logits),)](
        sums,
        reference_logits,
        reference_logits.stride(0),
        reference.maxima,
        (1 / reference.sums).float(),
        logits,
        logits.stride(0),
        served.maxima,
        (1 / served.sums).float(),
        # An error of it, as one of the sums, cancels to the first order.
        log_sum_ratios.float(),
        columns,
        LANES=tiling.lanes,
        WIDTH=tiling.width,
        STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )
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
    STAGES: tl.constexpr,
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
        *(LANES, WIDTH, STAGES, False),
    )
    # Not true of NaN either.
    if not (forward + backward < float("inf")):
        forward, backward, distance = _add_up(
            *(p_start, p_maximum, p_scale, q_start, q_maximum, q_scale, log_sum_ratio, columns),
            *(LANES, WIDTH, STAGES, True),
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
    STAGES: tl.constexpr,
    INFINITE: tl.constexpr,
):
    """The three sums over a row. With entries of -inf they are right if `INFINITE`, and else NaN or infinite."""
    tile: tl.constexpr = LANES * WIDTH
    entries = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    forward = tl.zeros([LANES], tl.float32)
    backward = tl.zeros([LANES], tl.float32)
    distances = tl.zeros([LANES], tl.float32)
    whole = columns // tile * tile
    # Whole tiles need no mask, which would keep loads narrow wherever the vocabulary is not a multiple of 16.
    for origin in tl.range(0, whole, tile, num_stages=STAGES):
        p_seen = tl.load(p_start + origin + entries).to(tl.float32)
        q_seen = tl.load(q_start + origin + entries).to(tl.float32)
        terms = _terms(p_seen - p_maximum, q_seen - q_maximum, p_scale, q_scale, log_sum_ratio, INFINITE)
        forward += tl.sum(terms[0], 1)
        backward += tl.sum(terms[1], 1)
        distances += tl.sum(terms[2], 1)
    if whole < columns:
        held = whole + entries < columns
        # Entries of -inf on both sides add nothing.
        p_seen = tl.load(p_start + whole + entries, mask=held, other=float("-inf")).to(tl.float32)
        q_seen = tl.load(q_start + whole + entries, mask=held, other=float("-inf")).to(tl.float32)
        terms = _terms(p_seen - p_maximum, q_seen - q_maximum, p_scale, q_scale, log_sum_ratio, True)
        forward += tl.sum(terms[0], 1)
        backward += tl.sum(terms[1], 1)
        distances += tl.sum(terms[2], 1)
    return (
        tl.sum(forward.to(tl.float64), 0).to(tl.float32),
        tl.sum(backward.to(tl.float64), 0).to(tl.float32),
        tl.sum(distances.to(tl.float64), 0).to(tl.float32),
    )


@triton.jit
def _terms(p_logit, q_logit, p_scale, q_scale, log_sum_ratio, INFINITE: tl.constexpr):
    """Of the three sums, from logits less their rows' maxima."""
    p = tl.exp(p_logit) * p_scale
    q = tl.exp(q_logit) * q_scale
    difference = p - q
    log_ratio = p_logit - q_logit
    if INFINITE:
        # Two of -inf are as equal as any others.
        log_ratio = tl.where(p_logit == q_logit, 0.0, log_ratio)
    log_ratio -= log_sum_ratio
    close = tl.abs(log_ratio) < CLOSE
    square = log_ratio * log_ratio
    # exp(-x) - 1 + x, over x squared, has these even and odd terms.
    even = 1 / 2 + square * (1 / 24 + square * (1 / 720))
    odd = log_ratio * (1 / 6 + square * (1 / 120 + square * (1 / 5040)))
    finite = log_ratio
    if INFINITE:
        # A probability of 0 times an infinite ratio is 0.
        finite = tl.minimum(tl.maximum(log_ratio, -LARGEST), LARGEST)
    forward = tl.where(close, p * square * (even - odd), p * finite - difference)
    backward = tl.where(close, q * square * (even + odd), difference - q * finite)
    if INFINITE:
        # Where one side is 0 the other may be too small for a number, and is not 0.
        forward = tl.where(log_ratio == float("inf"), float("inf"), forward)
        backward = tl.where(log_ratio == float("-inf"), float("inf"), backward)
    return forward, backward, tl.abs(difference)
