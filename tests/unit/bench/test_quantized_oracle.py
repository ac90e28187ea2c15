"""The oracle of quantized arithmetic, against figures worked out by hand and against other implementations."""

from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_oracle import (
    FP8_ATTENTION,
    QuantizedLinear,
    dequantized_weight,
    fp8_rounded,
    fp8_tokens,
    int8_tokens,
    logprobs,
    oracle_model,
)

from tests import models, oracle


def test_int4_codes_lie_lowest_bits_first_with_8_added():
    codes = [-8, -1, 0, 1, 7, 3, -2, 5]
    packed = sum((code + 8) << (4 * place) for place, code in enumerate(codes))
    parts = {
        "weight_packed": torch.tensor([[packed - (1 << 32) if packed >> 31 else packed]], dtype=torch.int32),
        "weight_scale": torch.tensor([[0.5, 0.25]], dtype=torch.bfloat16),
    }
    expected = [[-4.0, -0.5, 0.0, 0.5, 1.75, 0.75, -0.5, 1.25]]
    assert dequantized_weight(parts).tolist() == expected


def test_fp4_codes_are_e2m1_divided_by_the_global_scale():
    # 1.0 and -6.0; 0.5 and -0.5: sign, two bits of exponent, one bit after the point.
    parts = {
        "weight_packed": torch.tensor([[0b1111_0010, 0b1001_0001]], dtype=torch.uint8),
        "weight_scale": torch.tensor([[448.0]]).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([896.0]),
    }
    assert dequantized_weight(parts).tolist() == [[0.5, -3.0, 0.25, -0.25]]


def test_int8_tokens_scale_each_token_by_its_largest():
    codes, scale = int8_tokens(torch.tensor([[1.0, -127.0, 2.5, 3.5], [0.0, 0.0, 0.0, 0.0], [0.1, 0.2, -0.4, 0.0]]))
    assert codes.tolist() == [[1, -127, 2, 4], [0, 0, 0, 0], [32, 64, -127, 0]]
    assert scale.flatten().tolist() == pytest.approx([1.0, 0.0, 0.4 / 127])


def test_fp8_tokens_scale_each_token_by_its_largest():
    codes, scale = fp8_tokens(torch.tensor([[448.0, -17.0, 1.06], [0.0, 0.0, 0.0]]))
    # Between 16 and 32 the step is 2, and 17 lies in the middle: to even. At 1 the step is 1/8.
    assert codes.tolist() == [[448, -16, 1], [0, 0, 0]]
    assert scale.flatten().tolist() == pytest.approx([1.0, 1 / (448 * 512)])


def test_fp8_saturates():
    assert fp8_rounded(torch.tensor([1e4, -1e4, 449.0])).tolist() == [448, -448, 448]


def test_quantized_products_are_exact():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (5, 4096), dtype=torch.int8, generator=generator)
    inputs = torch.randint(-127, 128, (3, 4096), generator=generator).float()
    inputs[:, 0] = 127.0
    layer = QuantizedLinear(weight, torch.full((5, 1), 2.0), int8_tokens)
    assert torch.equal(layer(inputs), 2.0 * (inputs.long() @ weight.long().T).float())


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    return np.random.default_rng(1).integers(2, 1024, (2, 64)).tolist()


def test_a_model_that_is_not_quantized_is_that_of_transformers(random_model: Path, windows: list[list[int]]):
    ours = logprobs(oracle_model(random_model), windows, rows=10)
    for one, expected in zip(ours, oracle.logprobs(random_model, windows), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5, rtol=0)


def test_int8_is_that_of_the_other_oracle(random_model: Path, tmp_path: Path, windows: list[list[int]]):
    folder = models.int8_model(random_model, tmp_path, last_blocks=1)
    ours = logprobs(oracle_model(folder), windows)
    for one, expected in zip(ours, oracle.int8_logprobs(folder, windows), strict=True):
        off = np.abs(one - expected)
        # A code on the edge between two integers may fall on either side.
        assert np.median(off) < 1e-4
        assert off.max() < 0.1


def test_fp8_attention_without_rounding_is_plain_attention(
    random_model: Path, windows: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    plain = logprobs(oracle_model(random_model), windows)
    rounded = {name: logprobs(oracle_model(random_model, attention=name), windows) for name in FP8_ATTENTION}
    monkeypatch.setattr("quantized_oracle.fp8_rounded", lambda values: values)
    for name in FP8_ATTENTION:
        exact = logprobs(oracle_model(random_model, attention=name), windows)
        for one, other, expected in zip(exact, rounded[name], plain, strict=True):
            np.testing.assert_allclose(one, expected, atol=1e-4, rtol=0)
            assert 1e-3 < np.abs(other - expected).mean() < 0.5
