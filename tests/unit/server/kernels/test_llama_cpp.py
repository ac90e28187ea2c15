"""Rows of llama.cpp's base files, against its formula in numpy."""

import numpy as np
import torch

from scoremode_server.kernels import llama_cpp


def read(rows: torch.Tensor, vocab_size: int) -> np.ndarray:
    """Log-probabilities [rows, vocabulary] as llama-perplexity reads them."""
    numbers = rows.numpy().view(np.uint16)
    steps, lowest = np.ascontiguousarray(numbers[:, :4]).view(np.float32).T[:, :, None]
    return np.asarray(lowest + steps * numbers[:, 4 : 4 + vocab_size].astype(np.float32))


def test_what_is_far_below_the_top_is_sixteen_nats_below() -> None:
    logits = torch.tensor([[0.0, -20.0, -5.0, -torch.inf]])
    log_sum = np.log(1 + np.exp(-20) + np.exp(-5))
    expected = np.array([[0, -16, -5, -16]]) - log_sum
    np.testing.assert_allclose(read(llama_cpp.quantized(logits), 4), expected, atol=16 / 65535)


def test_equal_logits_and_nan_and_an_odd_vocabulary() -> None:
    rows = read(llama_cpp.quantized(torch.tensor([[2.0] * 4, [0.0, torch.nan, 0.0, 0.0]])), 4)
    np.testing.assert_allclose(rows[0], -np.log(4), rtol=1e-6)
    assert np.isnan(rows[1]).all()
    assert llama_cpp.quantized(torch.zeros(5, 1001)).shape == (5, 2 + 501)
