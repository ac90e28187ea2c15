"""The divergence of a served model from a reference, from the hidden states of both, in chunks of rows.

Let p be the reference's distribution over the vocabulary and q the served model's. Each side's logits are reduced as
for prompt logprobs, to their maximum m, their sum of exponentials s below it, and what is needed of single tokens. With
these, one more pass over both adds up

    KL(p||q) = sum of p log(p/q) - p + q,    KL(q||p) = sum of q log(q/p) - q + p,    sum of |p - q|

where p = exp(z - m) / s, and log(p/q) is the difference of both sides' z - m less that of their log s. No term is
negative, so that nothing cancels between terms, and two equal rows give exactly 0. The acceptance, which is the sum of
min(p, q), is 1 less half the sum of |p - q|.

Under tensor parallelism ranks exchange for each chunk the logits of the targets and the reduced rows, of both sides
together, and at the end the sums of all rows.
"""

from dataclasses import dataclass

import torch

from scoremode_server.kernels.fused_logprobs import LogitsFunction, in_chunks, kernels_for
from scoremode_server.kernels.reduced_rows import JoinedRows, ReducedRows, Shard, add_up, gather_rows, share_targets


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two distributions in each row, and figures [rows] float32, NaN where either side has a NaN in the row."""

    kld: torch.Tensor
    """KL(reference||served) in nats, 0 or more."""
    reverse_kld: torch.Tensor
    """KL(served||reference)."""
    acceptance: torch.Tensor
    """The sum of the smaller of both probabilities, 0 to 1."""
    served: ReducedRows
    reference: ReducedRows


def compare(
    targets: torch.Tensor,
    logits_fn: LogitsFunction,
    hidden_states: torch.Tensor | JoinedRows,
    reference_logits_fn: LogitsFunction,
    reference_hidden_states: torch.Tensor | JoinedRows,
    num_top: int,
    limit: int,
    shard: Shard | None = None,
) -> Comparison:
    """Compare the served model with a reference in every row. Arguments are as for `fused_logprobs.compute`, for both
    sides: dtypes and hidden sizes may differ, the vocabulary not. With `num_top` 0 there is still the top token."""
    kernels = kernels_for(targets.device)
    num_top = max(1, num_top)
    chunks = []
    for part in in_chunks(len(targets), limit):
        rows = part.stop - part.start
        logits, reference_logits = logits_fn(hidden_states[part]), reference_logits_fn(reference_hidden_states[part])
        first, columns = (shard.first, shard.columns) if shard else (0, logits.shape[-1])
        # Both sides in one, so that ranks exchange them at once.
        both = ReducedRows.empty(2 * rows, num_top, targets.device)
        sides = ((logits, both[:rows]), (reference_logits, both[rows:]))
        for side, reduced in sides:
            kernels.take_targets(side, targets[part], first, columns, reduced)
        if shard:
            share_targets(shard.group, both)
        for side, reduced in sides:
            kernels.reduce_rows(side, first, columns, reduced)
        if shard:
            both = gather_rows(shard.group, both)
        served, reference = both[:rows], both[rows:]
        # Not finite where a side has a NaN, or nothing but -inf.
        log_sum_ratios = (reference.sums / served.sums).log()
        sums = kernels.sum_divergences(logits, reference_logits, columns, served, reference, log_sum_ratios)
        chunks.append((served, reference, sums.masked_fill_(~log_sum_ratios.isfinite()[:, None], torch.nan)))
        # The next chunk's are computed where these were.
        del logits, reference_logits, sides, side
    served_rows, reference_rows, all_sums = zip(*chunks, strict=True)
    whole = add_up(shard.group, torch.cat(all_sums)) if shard else torch.cat(all_sums)
    return Comparison(
        kld=whole[:, 0].contiguous(),
        reverse_kld=whole[:, 1].contiguous(),
        # Rounding may leave distributions that have nothing in common a little more than 2 apart.
        acceptance=(1.0 - whole[:, 2] / 2).clamp(min=0.0),
        served=ReducedRows.join(served_rows),
        reference=ReducedRows.join(reference_rows),
    )
