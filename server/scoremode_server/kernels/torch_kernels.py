"""Implements the Triton kernels in PyTorch, in float64: for servers on a CPU, which have no Triton, for more than
`MAX_TOP` top tokens, and as the reference in tests.

Whole rows are converted to float64 a block at a time. So the memory in addition to the logits depends neither on the
number of rows nor, up to `BLOCK_ENTRIES`, on the vocabulary. All blocks use the same memory: a server on a CPU returns
large tensors to the operating system when they are freed (`cli.MMAP_THRESHOLD`), and new pages take longer than the
arithmetic.
"""

import math
from collections.abc import Iterator

import torch

from scoremode_server.kernels.reduced_rows import ReducedRows, put_first
from scoremode_server.kernels.working_memory import BLOCK_ENTRIES

LARGEST = torch.finfo(torch.float64).max

LOWEST_EXPONENT = -1e4
"""Replaces an exponent of -inf in `sum_moments`: its exp is 0 in float64, and its square is finite in float32."""


def take_targets(logits: torch.Tensor, targets: torch.Tensor, first: int, columns: int, out: ReducedRows) -> None:
    """Do the same as `triton_kernels.take_targets`."""
    out.tokens[:, 0] = targets
    out.logits[:, 0] = take(logits, targets[:, None], first, columns)[:, 0]


def take(logits: torch.Tensor, tokens: torch.Tensor, first: int, columns: int) -> torch.Tensor:
    """Read the logits [rows, m] float32 of `tokens` [rows, m]; -inf for tokens outside these columns, which start with
    token `first`. Also used on a GPU."""
    column = tokens.long() - first
    held = (column >= 0) & (column < columns)
    values = logits.gather(1, column.clamp(0, logits.shape[1] - 1)).float()
    return values.masked_fill_(~held, -math.inf)


def reduce_rows(logits: torch.Tensor, first: int, columns: int, out: ReducedRows, temperature: float = 1.0) -> None:
    """Do the same as `triton_kernels.reduce_rows`."""
    num_held = min(out.num_top, columns)
    out.tokens[:, 1 + num_held :] = -1
    out.logits[:, 1 + num_held :] = -math.inf
    if columns == 0:
        out.maxima.fill_(-math.inf)
        out.sums.zero_()
        out.ranks.zero_()
        return
    for block, (values, as_high) in _blocks(logits, columns, 2):
        rows = out[block]
        values.copy_(logits[block, :columns])
        highest, tokens = values.max(1, keepdim=True) if num_held == 1 else values.topk(num_held)
        rows.tokens[:, 1 : 1 + num_held] = tokens + first
        if num_held > 1:
            put_first(rows.tokens[:, 1 : 1 + num_held], values.argmax(1, keepdim=True).int() + first)
        rows.logits[:, 1 : 1 + num_held] = highest
        rows.ranks[:] = torch.ge(values, rows.logits[:, :1], out=as_high).sum(1)
        rows.maxima[:] = values.amax(1)
        # If all logits are -inf, subtracting -inf would give NaN.
        base = rows.maxima.masked_fill(rows.maxima == -math.inf, 0.0)
        rows.sums[:] = values.sub_(base[:, None]).div_(temperature).exp_().sum(1)


def sum_divergences(
    logits: torch.Tensor,
    reference_logits: torch.Tensor,
    columns: int,
    served: ReducedRows,
    reference: ReducedRows,
    log_sum_ratios: torch.Tensor,
) -> torch.Tensor:
    """Sum these columns' shares of the divergences between the reference's distribution p and the served model's q.

    Args:
        logits: [rows, at least `columns`], like `reference_logits`, of a floating dtype.
        columns: how many columns count; later columns are padding.
        served: maxima and sums over the whole vocabulary, like `reference`.
        log_sum_ratios: [rows] float64, log(the reference's sum) - log(the served model's sum). If it is not finite, the
            result is undefined.

    Returns:
        [rows, 3] float32: the sum of p log(p/q) - p + q, for KL(p||q); of q log(q/p) - q + p, for KL(q||p); of |p - q|.
        Sums are never negative, and those of a vocabulary's parts add up.
    """
    sums = logits.new_empty((len(logits), 3), dtype=torch.float32)
    for block, (p, q, log_ratios, terms) in _blocks(logits, columns, 4):
        p.copy_(reference_logits[block, :columns]).sub_(reference.maxima[block, None])
        q.copy_(logits[block, :columns]).sub_(served.maxima[block, None])
        # Two logits of -inf count as equal.
        torch.sub(p, q, out=log_ratios).masked_fill_(p == q, 0.0).sub_(log_sum_ratios[block, None])
        p.exp_().div_(reference.sums[block, None])
        q.exp_().div_(served.sums[block, None])
        sums[block, 0] = _excess(p, q, log_ratios, terms)
        sums[block, 1] = _excess(q, p, log_ratios.neg_(), terms)
        sums[block, 2] = p.sub_(q).abs_().sum(1)
    return sums


def sum_moments(logits: torch.Tensor, columns: int, scores: ReducedRows, temperature: float = 1.0) -> torch.Tensor:
    """Sum these columns' shares of the first two moments of x = (logit - m) / T under the distribution p. `scores` has
    the maxima m, and sums, of the whole vocabulary at the same temperature T.

    Returns:
        [rows, 2] float32: the sums of p x and of p x squared. Entries of probability 0 count as 0. The sums of a
        vocabulary's parts add up.
    """
    sums = logits.new_empty((len(logits), 2), dtype=torch.float32)
    for block, (x, p) in _blocks(logits, columns, 2):
        x.copy_(logits[block, :columns]).sub_(scores.maxima[block, None]).div_(temperature)
        torch.exp(x, out=p).div_(scores.sums[block, None])
        x.clamp_(min=LOWEST_EXPONENT)
        sums[block, 0] = p.mul_(x).sum(1)
        sums[block, 1] = p.mul_(x).sum(1)
    return sums


def _blocks(logits: torch.Tensor, columns: int, num_buffers: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield blocks of rows, each with buffers [num_buffers, rows, columns] float64 to compute in. All blocks share the
    memory of the buffers."""
    step = max(1, BLOCK_ENTRIES // max(columns, 1))
    buffers = logits.new_empty((num_buffers, min(step, len(logits)), columns), dtype=torch.float64)
    for start in range(0, len(logits), step):
        rows = min(step, len(logits) - start)
        yield slice(start, start + rows), buffers[:, :rows]


def _excess(p: torch.Tensor, q: torch.Tensor, log_ratios: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Sum p log(p/q) - p + q over each row, [rows]. An entry adds q if p = 0, and infinity if q = 0 and p > 0.

    As p and q each add up to 1, this is the sum of p log(p/q). But in this form an error of their normalizers, which
    makes all of p or q a little too large or too small, cancels to the first order. `terms` is overwritten.
    """
    torch.clamp(log_ratios, -LARGEST, LARGEST, out=terms).mul_(p)
    # A probability that underflows to 0 here is still more than 0.
    terms.masked_fill_(log_ratios == math.inf, math.inf)
    return terms.sub_(p).add_(q).sum(1).clamp_(min=0.0)
