"""Quantized weights *and* activations: what the deployed kernels compute is what is scored.

The oracle quantizes both in torch, as the kernels do. transformers decompresses the weights and leaves activations
alone, which is another model; that difference is why this project exists.
"""

from pathlib import Path

import numpy as np
import pytest

from scoremode import ScoreClient
from tests import oracle


@pytest.fixture(scope="module")
def tokens(int8_client: ScoreClient, wikitext: str) -> list[int]:
    return int8_client.tokenize(wikitext[:3000])[:512]


def test_the_server_runs_quantized_kernels(int8_client: ScoreClient):
    assert int8_client.info().quantization == "compressed-tensors"


def test_logprobs_agree_with_quantized_arithmetic_and_not_with_decompressed_weights(
    int8_client: ScoreClient, int8_random_model: Path, tokens: list[int]
):
    (score,) = int8_client.score(tokens)
    ours = np.array(score.logprobs[1:])
    (quantized,) = oracle.int8_logprobs(int8_random_model, [tokens], saturates=oracle.int8_products_saturate())
    (decompressed,) = oracle.decompressed_logprobs(int8_random_model, [tokens])
    to_quantized, to_decompressed = np.abs(ours - quantized), np.abs(ours - decompressed)
    # A quantized activation that lies on the edge between two integers may fall on either side of it, which float32
    # rounding decides: such a token is off by hundredths of a nat, between the kernel and the oracle as between the
    # oracle and itself on weights disturbed by 1e-6. All others agree to float32 rounding.
    assert np.median(to_quantized) < oracle.MEAN
    assert to_quantized.mean() < 0.2 * to_decompressed.mean()
    assert np.median(to_decompressed) > 1e-2
    assert to_decompressed.mean() > 0.02
