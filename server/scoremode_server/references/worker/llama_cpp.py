"""Rows of log-probabilities in the format of llama.cpp's `llama-perplexity --kl-divergence-base`.

A row for a vocabulary of V tokens is 4 + 2 ceil(V / 2) numbers of 16 bits: a float32 `step`, a float32 `lowest`, and
one q per token, whose log-probability is `lowest + step * q`. `lowest` is the log-probability of the least likely
token, but at most 16 nats below that of the most likely token. Less likely tokens have a q of 0. Source: `log_softmax`
in llama.cpp's tools/perplexity/perplexity.cpp.
"""

import torch

DEPTH = 16.0
"""Nats from the most likely token of a row to the lowest possible `lowest`."""
STEPS = 65535

LOGIT_BYTES = 16
"""Bytes of memory that `quantized` needs per logit, in addition to the logit."""


def quantized(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize logits [rows, vocabulary]. Returns step and lowest [rows] float32, and quantized [rows, ceil(vocabulary
    / 2)] int32, pairs of numbers of 16 bits. `lowest` is NaN if a logit of the row is NaN."""
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    low = torch.maximum(logits.amin(-1, keepdim=True), top - DEPTH)
    log_sum = (logits - top).exp_().sum(-1, keepdim=True, dtype=torch.float64).log()
    lowest = ((low - top).double() - log_sum).float()
    step = (top - low) / STEPS
    # A row of equal logits has a step of 0, and every q is 0.
    steps = ((logits - low) * torch.where(step > 0, 1 / step, 0.0)).round_().clamp_(0, STEPS).to(torch.int32)
    if steps.shape[-1] % 2:
        steps = torch.nn.functional.pad(steps, (0, 1))
    return {"step": step[:, 0], "lowest": lowest[:, 0], "quantized": steps[:, ::2] | (steps[:, 1::2] << 16)}
