"""Computes the divergence of a served model from a reference, from the logits of both.

Let p be the reference's distribution over the vocabulary and q the served model's. Each side's logits z are reduced as
for prompt logprobs: to their maximum m, the sum s of exp(z - m), and the values of single tokens. One more pass over
both sides adds up

    KL(p||q) = sum of (p log(p/q) - p + q),    KL(q||p) = sum of (q log(q/p) - q + p),    sum of |p - q|

where p = exp(z - m) / s, and log(p/q) is the difference between both sides' z - m - log s. No term is negative, so
terms do not cancel each other, and two equal rows give exactly 0. The acceptance, the sum of min(p, q), is 1 minus half
the sum of |p - q|.

Under tensor parallelism, ranks exchange three things per chunk: the reference's logits of the targets, its reduced
rows, and the sums. `fused_logprobs` does the same for the served model.
"""

from dataclasses import replace

import torch

from scoremode_server.kernels.fused_logprobs import Chunk, kernels_for
from scoremode_server.kernels.reduced_rows import ReducedRows, gather_rows, share_targets
from scoremode_server.worker.sinks import Statistics


def compare(
    chunk: Chunk, reference_logits: torch.Tensor, statistics: Statistics | None = None
) -> dict[str, torch.Tensor]:
    """Compare the served model with a reference in every row of a chunk, at a temperature of 1.

    Args:
        chunk: rows of the served model, with at least one top token.
        reference_logits: [rows, at least `chunk.num_columns`], for the same part of the vocabulary, in any dtype.
        statistics: figures of the reference's distribution to add, with "reference_" before their names.

    Returns:
        kld, reverse_kld, acceptance: [rows] float32, NaN where either side has a NaN: KL(reference||served) and
            KL(served||reference) in nats, 0 or more; the sum of the smaller of both probabilities, 0 to 1.
        reference_token_ids, reference_logprobs: [rows, 1 + k]: the target, then the reference's top k.
        reference_ranks: [rows] int32, the target's rank in the reference.
    """
    shard, served = chunk.shard, chunk.scores
    kernels = kernels_for(chunk.targets.device, served.num_top)
    reference = ReducedRows.empty(len(chunk.targets), served.num_top, chunk.targets.device)
    kernels.take_targets(reference_logits, chunk.targets, chunk.first, chunk.num_columns, reference)
    if shard is not None:
        share_targets(shard.group, reference)
    kernels.reduce_rows(reference_logits, chunk.first, chunk.num_columns, reference)
    if shard is not None:
        reference = gather_rows(shard.group, reference)
    # A row's ratio is not finite if either side has a NaN or only -inf there.
    log_sum_ratios = (reference.sums / served.sums).log()
    sums = kernels.sum_divergences(chunk.logits, reference_logits, chunk.num_columns, served, reference, log_sum_ratios)
    sums = chunk.add_up(sums.masked_fill_(~log_sum_ratios.isfinite()[:, None], torch.nan))
    columns = {
        "kld": sums[:, 0].contiguous(),
        "reverse_kld": sums[:, 1].contiguous(),
        # Rounding may bring the sum for two disjoint distributions slightly above 2.
        "acceptance": (1.0 - sums[:, 2] / 2).clamp(min=0.0),
        "reference_token_ids": reference.tokens,
        "reference_logprobs": reference.logprobs(),
        "reference_ranks": reference.ranks,
    }
    if statistics is not None:
        figures = statistics.compute(replace(chunk, logits=reference_logits, scores=reference), ())
        columns |= {f"reference_{name}": column for name, column in figures.items()}
    return columns
