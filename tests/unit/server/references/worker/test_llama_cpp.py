"""Rows of llama.cpp's base files, against its formula in numpy."""

import numpy as np
import pytest
import torch

from scoremode_server.references.worker import llama_cpp
from scoremode_server.references.worker.orders import exported_columns
from scoremode_server.worker.request_rows import pack


def quantized(logits: torch.Tensor) -> np.ndarray:
    """Rows of the file, as a worker packs them."""
    columns = llama_cpp.quantized(logits)
    return pack({**columns, "ranks": columns["step"]}, exported_columns(logits.shape[1])).numpy()


def read(rows: np.ndarray, vocab_size: int) -> np.ndarray:
    """Log-probabilities [rows, vocabulary] as llama-perplexity reads them."""
    numbers = rows.view(np.uint16)
    steps, lowest = np.ascontiguousarray(numbers[:, :4]).view(np.float32).T[:, :, None]
    return np.asarray(lowest + steps * numbers[:, 4 : 4 + vocab_size].astype(np.float32))


@pytest.mark.parametrize("vocab_size", [1000, 1001])
def test_log_probabilities_are_within_half_a_step(vocab_size: int) -> None:
    logits = 2 * torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1))
    exact = logits.double().log_softmax(-1).numpy()
    rows = quantized(logits)
    assert rows.shape == (5, 2 + (vocab_size + 1) // 2)
    # No token is 16 nats below the top one. A step is the range over 65,535, and float32 rounds a little more.
    half_steps = (exact.max(-1) - exact.min(-1)) / 65535 / 2 + 1e-6
    assert (np.abs(read(rows, vocab_size) - exact) <= half_steps[:, None]).all()


def test_what_is_far_below_the_top_is_sixteen_nats_below() -> None:
    logits = torch.tensor([[0.0, -20.0, -5.0, -torch.inf]])
    expected = np.array([[0, -16, -5, -16]]) - np.log(1 + np.exp(-20) + np.exp(-5))
    np.testing.assert_allclose(read(quantized(logits), 4), expected, atol=16 / 65535)


def test_equal_logits_and_nan() -> None:
    rows = read(quantized(torch.tensor([[2.0] * 4, [0.0, torch.nan, 0.0, 0.0]])), 4)
    np.testing.assert_allclose(rows[0], -np.log(4), rtol=1e-6)
    assert np.isnan(rows[1]).all()
