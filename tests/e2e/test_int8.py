"""Quantized weights *and* activations: what the deployed kernels compute is what is scored.

The oracle quantizes both in torch, as the kernels do. transformers decompresses the weights and leaves activations
alone, which is another model; that difference is why this project exists.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_oracle import int8_products_saturate, oracle_model
from transformers import PreTrainedModel

from tests import oracle


@pytest.fixture(scope="module")
def quantized_model(int8_random_model: Path) -> PreTrainedModel:
    """The model that the kernels compute, in float64."""
    return oracle_model(int8_random_model, dtype=torch.float64)


def test_the_server_runs_quantized_kernels_and_says_so(int8_client):
    info = int8_client.info()
    assert (info.quantization, info.fingerprint[:3], info.dtype) == ("compressed-tensors", "v2-", "float32")
    computed_by = info.computed_by
    assert any("CompressedTensorsW8A8Int8, CPU" in each for each in computed_by.kernels)
    assert bool(computed_by.fault) == int8_products_saturate()
    assert (computed_by.model_runner, computed_by.attention_backends) == ("v1", ["CPU_ATTN"])
    assert (computed_by.device, computed_by.num_devices, computed_by.kv_cache_dtype) == ("cpu", 1, "float32")
    assert (computed_by.eager, computed_by.compilation) == (True, None)


def test_logprobs_equal_int8_arithmetic_and_not_decompressed_weights(
    int8_client, int8_random_model, quantized_model, wikitext
):
    tokens = int8_client.tokenize(wikitext[:3000])[:512]
    (score,) = int8_client.score(tokens)
    ours = np.array(score.logprobs[1:])
    (quantized,) = oracle.logprobs(quantized_model, [tokens])
    decompressed_model = oracle_model(int8_random_model, quantized_activations=False, dtype=torch.float64)
    (decompressed,) = oracle.logprobs(decompressed_model, [tokens])
    to_quantized, to_decompressed = np.abs(ours - quantized), np.abs(ours - decompressed)
    # A quantized activation that lies on the edge between two integers may fall on either side of it, which float32
    # rounding decides: such a token is off by hundredths of a nat, between the kernel and the oracle as between the
    # oracle and itself on weights disturbed by 1e-6. All others agree to float32 rounding.
    assert np.median(to_quantized) < oracle.MEAN
    assert to_quantized.mean() < 0.2 * to_decompressed.mean()
    assert np.median(to_decompressed) > 100 * oracle.MEAN


def test_their_divergence_is_that_of_int8_arithmetic(client, int8_client, random_model, quantized_model, wikitext):
    """Most positions agree to float32 rounding; docs/methods.md has how far the others are apart."""
    tokens = client.tokenize(wikitext[:1800])[:256]
    client.record_reference("tiny", tokens)
    (window,) = int8_client.kld("tiny").data
    client.delete_reference("tiny")
    (expected,) = oracle.divergences(random_model, quantized_model, [tokens])
    assert np.median(np.abs(window.positions.kld - expected.kld)) < oracle.MEAN
    assert window.positions.kld.mean() == pytest.approx(expected.kld.mean(), rel=0.02)
