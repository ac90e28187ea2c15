"""The INT8 oracle against cases worked out by hand, so that a test that leans on it leans on something checked."""

from pathlib import Path

import numpy as np
import torch
from quantized_oracle import QuantizedLinear, asymmetric_int8_tokens, int8_tokens, logprobs, oracle_model
from transformers import AutoModelForCausalLM, LlamaConfig

from tests import models


def test_quantization_by_hand():
    # Range 255, so the scale is 1; 0 lands on the zero points -128 - (-55) = -73 and 0. Halves are rounded to even.
    inputs = torch.tensor([[-55.0, 0.0, 200.0, 10.4], [-128.0, 0.5, 1.5, 127.0], [0.0, 0.0, 0.0, 0.0]])
    values, scale, zero_point = asymmetric_int8_tokens(inputs)
    assert scale[:, 0].tolist() == [1.0, 1.0, 0.0]
    assert zero_point[:, 0].tolist() == [-73.0, 0.0, 0.0]
    assert values.tolist() == [[-128, -73, 127, -63], [-128, 0, 2, 127], [0, 0, 0, 0]]


def test_int8_linear_by_hand():
    weight = torch.tensor([[2, -1, 1], [127, 127, -127]], dtype=torch.int8)
    weight_scale, bias = torch.tensor([[0.5], [0.25]]), torch.tensor([7.0, 0.5])
    linear = QuantizedLinear(weight, weight_scale, asymmetric_int8_tokens, saturates=False, bias=bias)
    # Scale 2, zero point -73; above it lie (-55, 200, 10): -110 - 200 + 10 and 127 * (-55 + 200 - 10).
    assert linear(torch.tensor([[-110.0, 400.0, 20.8]])).tolist() == [[-300 * 2 * 0.5 + 7, 17_145 * 2 * 0.25 + 0.5]]


def test_saturating_int8_linear_by_hand():
    weight, weight_scale = torch.tensor([[127, 127, 1, -1]], dtype=torch.int8), torch.tensor([[1.0]])
    # Scale 1. The unsigned pair 255 * 127 + 132 * 127 = 49,149 is cut to 32,767; the other is
    # 130 - 1 = 129; both were raised by 128 * (127 + 127).
    inputs = torch.tensor([[127.0, 4.0, 2.0, -127.0]])
    exact, saturated = (
        QuantizedLinear(weight, weight_scale, int8_tokens, saturates)(inputs).tolist() for saturates in (False, True)
    )
    assert exact == [[131 * 127 + 129]]
    assert saturated == [[32_767 + 129 - 128 * 254]]


def test_a_model_with_tied_embeddings_scores_as_in_transformers(tmp_path: Path):
    sizes = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True)
    folder = models.random_model_of(config, tmp_path)
    expected, actual = (
        logprobs(model, [[5, 6, 7, 8]])[0]
        for model in (AutoModelForCausalLM.from_pretrained(folder).eval(), oracle_model(folder))
    )
    np.testing.assert_array_equal(actual, expected)
