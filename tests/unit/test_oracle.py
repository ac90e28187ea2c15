"""The oracles against cases worked out by hand, so that a test that leans on them leans on something checked."""

import torch

from tests import oracle


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
