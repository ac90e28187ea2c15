"""The oracles against cases worked out by hand, so that a test that leans on them leans on something checked."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import models, oracle


class PositionScorer:
    """A stand-in for a model: token t's logprob is -t; keeps the windows that it was given."""

    def __init__(self):
        self.windows = []

    def __call__(self, tokens):
        self.windows.append(list(tokens))
        return -np.array(tokens[1:], dtype=np.float64)


@pytest.mark.parametrize(
    ("method", "num_tokens", "length", "stride", "windows", "scored"),
    [
        ("sliding", 10, 4, 2, ["0123", "2345", "4567", "6789"], "123456789"),
        ("sliding", 9, 4, 2, ["0123", "2345", "4567", "678"], "12345678"),
        ("sliding", 3, 4, 2, ["012"], "12"),
        # No context is left for the first token of a window where windows do not overlap.
        ("sliding", 8, 4, 4, ["0123", "4567"], "123567"),
        ("sliding", 5, 4, 4, ["0123", "4"], "123"),
        ("overlapping", 9, 4, 2, ["0123", "2345", "4567"], "123345567"),
        # A row that would end with the text is left out: starts are below N - L, as in ExLlamaV3.
        ("overlapping", 8, 4, 2, ["0123", "2345"], "123345"),
        ("disjoint", 9, 4, None, ["0123", "4567"], "123567"),
        ("rolling", 10, 4, None, ["00123", "34567", "56789"], "0123456789"),
        ("rolling", 8, 4, None, ["00123", "34567"], "01234567"),
        ("rolling", 3, 4, None, ["0012"], "012"),
        # Half of 4 is 2: the logits from position 2 on are used, and predict position 3.
        ("llama.cpp", 9, 4, None, ["0123", "4567"], "37"),
        ("llama.cpp", 10, 5, None, ["01234", "56789"], "3489"),
    ],
)
def test_windows_counted_by_hand(method, num_tokens, length, stride, windows, scored):
    score = PositionScorer()
    result = oracle.perplexity_of(score, range(num_tokens), method, length, stride, prefix=0)
    assert ["".join(map(str, window)) for window in score.windows] == windows
    assert result.nlls.tolist() == [int(token) for token in scored]
    assert result.num_scored == len(scored)
    assert result.perplexity == pytest.approx(math.exp(sum(result.nlls) / len(scored)), rel=1e-12)


def test_llama_cpp_puts_bos_in_the_place_of_the_first_token():
    score = PositionScorer()
    oracle.perplexity_of(score, range(8), "llama.cpp", 4, bos=99)
    assert score.windows == [[99, 1, 2, 3], [99, 5, 6, 7]]


def test_overlapping_count_of_the_design():
    num_tokens = 72 * 512 + 2048 + 1
    result = oracle.perplexity_of(lambda window: np.zeros(len(window) - 1), range(num_tokens), "overlapping", 2048, 512)
    assert result.num_scored == 149_431


def test_symmetric_quantization_by_hand():
    # max|x| = 127, so the scale is 1 and the halves show how they are rounded: to even.
    inputs = torch.tensor([[-127.0, 0.5, 1.5, 2.5], [0.0, 0.0, 0.0, 0.0], [2.54, -1.27, 0.6, 0.0]])
    values, scale, zero_point = oracle.quantize_tokens(inputs, symmetric=True)
    assert values.tolist() == [[-127, 0, 2, 2], [0, 0, 0, 0], [127, -64, 30, 0]]
    torch.testing.assert_close(scale.squeeze(1), torch.tensor([1.0, 0.0, 0.02]))
    assert not zero_point.any()


def test_asymmetric_quantization_by_hand():
    # Range 255, so the scale is 1; 0 lands on the zero point -128 - (-55) = -73.
    values, scale, zero_point = oracle.quantize_tokens(torch.tensor([[-55.0, 0.0, 200.0, 10.4]]), symmetric=False)
    assert (scale.item(), zero_point.item()) == (1.0, -73.0)
    assert values.tolist() == [[-128, -73, 127, -63]]


def test_int8_linear_by_hand():
    weight = torch.tensor([[1, -2, 3], [127, 127, -127]], dtype=torch.int8)
    weight_scale = torch.tensor([[0.5], [0.25]])
    linear = oracle.Int8Linear(weight, weight_scale, symmetric=True, saturates=False)
    # Scale 254 / 127 = 2, integers (127, -1, 3): 127 + 2 + 9 = 138 and 127 * (127 - 1 - 3) = 15621.
    assert linear(torch.tensor([[254.0, -2.5, 6.9]])).tolist() == [[138 * 2 * 0.5, 15_621 * 2 * 0.25]]


def test_asymmetric_int8_linear_by_hand():
    weight, weight_scale = torch.tensor([[2, -1, 1]], dtype=torch.int8), torch.tensor([[0.5]])
    linear = oracle.Int8Linear(weight, weight_scale, symmetric=False, saturates=False)
    # Scale 1, zero point -73; above it lie (-55, 200, 10): -110 - 200 + 10.
    assert linear(torch.tensor([[-55.0, 200.0, 10.4]])).tolist() == [[-300 * 0.5]]


def test_saturating_int8_linear_by_hand():
    weight, weight_scale = torch.tensor([[127, 127, 1, -1]], dtype=torch.int8), torch.tensor([[1.0]])
    # Scale 1, integers (127, 4, 2, 1). The unsigned pair 255 * 127 + 132 * 127 = 49,149 is cut to 32,767; the other is
    # 130 - 129 = 1; both were raised by 128 * (127 + 127).
    inputs = torch.tensor([[[127.0, 4.0, 2.0, 1.0]]])
    exact, saturated = (
        oracle.Int8Linear(weight, weight_scale, symmetric=True, saturates=saturates)(inputs).tolist()
        for saturates in (False, True)
    )
    assert exact == [[[131 * 127 + 1]]]
    assert saturated == [[[32_767 + 1 - 128 * 254]]]


def test_saturating_products_are_exact_where_16_bits_hold_every_pair():
    generator = torch.Generator().manual_seed(0)
    activations = torch.randint(-128, 128, (5, 96), generator=generator).double()
    weight = torch.randint(-64, 64, (96, 7), generator=generator).double()
    assert torch.equal(oracle.saturating_products(activations, weight), activations @ weight)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return models.random_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def int8_llama(llama, tmp_path_factory):
    return models.int8_model(llama, tmp_path_factory.mktemp("int8"))


def test_logprobs_have_the_mean_that_transformers_calls_loss(llama):
    tokens = [5, 700, 13, 13, 2, 999]
    model = AutoModelForCausalLM.from_pretrained(llama)
    ids = torch.tensor([tokens])
    [logprobs] = oracle.logprobs(llama, [tokens])
    assert logprobs.shape == (5,)
    assert -logprobs.mean() == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-6)


def test_ranks_and_top_logprobs_agree_with_sorting(llama):
    tokens = [5, 700, 13, 2]
    [(ids, values)] = oracle.top_logprobs(llama, [tokens], 1024)
    assert np.exp(values.astype(np.float64)).sum(axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    places = [row.tolist().index(token) for row, token in zip(ids, tokens[1:], strict=True)]
    assert oracle.ranks(llama, [tokens])[0].tolist() == [place + 1 for place in places]
    assert values[range(3), places].tolist() == oracle.logprobs(llama, [tokens])[0].tolist()


def test_a_single_token_has_nothing_to_score(llama):
    assert oracle.logprobs(llama, [[7]])[0].shape == (0,)


def test_int8_weights_are_rounded_to_nearest(llama, int8_llama):
    name = "model.layers.1.mlp.up_proj.weight"
    exact, tensors = load_file(llama / "model.safetensors")[name], load_file(int8_llama / "model.safetensors")
    quantized, scale = tensors[name], tensors[f"{name}_scale"]
    assert (quantized.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (exact.shape[0], 1))
    assert quantized.abs().amax(dim=1).eq(127).all()
    assert ((quantized * scale - exact).abs() <= scale * 0.5001).all()
    assert tensors["lm_head.weight"].dtype == torch.float32


def test_decompressed_logprobs_quantize_no_activations(llama, int8_llama):
    tokens = list(range(100, 150))
    model = AutoModelForCausalLM.from_pretrained(llama)
    tensors = load_file(int8_llama / "model.safetensors")
    for name, parameter in model.named_parameters():
        if f"{name}_scale" in tensors:
            parameter.data = tensors[name] * tensors[f"{name}_scale"]
    ids = torch.tensor([tokens])
    by_hand = model(ids).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[0, 1:, None]).squeeze(1).detach().numpy()
    [decompressed] = oracle.decompressed_logprobs(int8_llama, [tokens])
    [int8] = oracle.int8_logprobs(int8_llama, [tokens])
    assert np.abs(decompressed - by_hand).max() < 1e-5
    assert 1e-3 < np.abs(int8 - decompressed).mean() < 0.5


def test_last_blocks_leaves_the_others_alone(llama, tmp_path):
    tensors = load_file(models.int8_model(llama, tmp_path, last_blocks=1) / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == torch.int8
    tokens = list(range(100, 150))
    int8, decompressed = (
        oracle.int8_logprobs(tmp_path, [tokens])[0],
        oracle.decompressed_logprobs(tmp_path, [tokens])[0],
    )
    assert np.abs(int8 - decompressed).max() > 1e-3


@pytest.mark.parametrize("add_bos", [False, True])
def test_tokenizer_round_trip_and_bos(add_bos, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(models.random_llama(tmp_path, add_bos=add_bos))
    text = "def naïve(): return '你好'\n\n"
    ids = tokenizer(text).input_ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 1024)
    assert (ids[0] == 0) is add_bos
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
