"""The scores that a compressed-tensors checkpoint should give: its quantized arithmetic, written out in torch.

Nothing of compressed-tensors, vLLM or scoremode runs here; transformers runs the architecture around the quantized
layers. Weights of weight-only formats are dequantized. W8A8 formats quantize each linear layer's input per token, and
products of codes are summed in float64, which is exact for int8 and nearly so for FP8; where this CPU saturates int8,
so do they. An FP8 KV cache is a setting of attention, for any weights.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST_INT8 = 127
LARGEST_FP8 = 448.0
SMALLEST_FP8_SCALE = 1 / (LARGEST_FP8 * 512)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 by its low three bits; the fourth is the sign."""

QuantizeTokens = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""[..., in] -> codes [..., in], as float64; scales and zero points [..., 1], float32."""

WEIGHT_PARTS = ("weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_shape")


def oracle_model(
    folder: Path,
    *,
    quantized_activations: bool = True,
    attention: str = "sdpa",
    weights_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PreTrainedModel:
    """A checkpoint of one safetensors file as a transformers model, ready to score.

    Args:
        folder: The model folder; the checkpoint may be quantized or not.
        quantized_activations: Quantize them where the checkpoint says so. Without, this is the decompressed model.
        attention: An implementation that transformers knows, `fp8_cache` or `fp8_attention`.
        weights_dtype: Round all weights to it first, as loading them with that dtype does.
        dtype: Of the arithmetic outside the quantized products.
        device: As torch names it.
    """
    config = AutoConfig.from_pretrained(folder)
    scheme = getattr(config, "quantization_config", None)
    if scheme is not None:
        del config.quantization_config
    tensors = {name: tensor.to(device) for name, tensor in load_file(folder / "model.safetensors").items()}
    if weights_dtype is not None:
        tensors = {name: tensor.to(weights_dtype) for name, tensor in tensors.items()}
    # Drawing random weights takes six times as long as loading the real ones.
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).to(device)
    # transformers only ties weights that it initializes.
    model.tie_weights()
    quantize = _token_quantizer(folder, scheme) if quantized_activations and scheme is not None else None
    layers: dict[str, torch.nn.Module] = {}
    for name in [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]:
        parts = {part: tensors.pop(f"{name}.{part}") for part in WEIGHT_PARTS if f"{name}.{part}" in tensors}
        tensors[f"{name}.weight"] = dequantized_weight(parts)
        if quantize is not None:
            saturates = device == "cpu" and parts["weight"].dtype == torch.int8 and int8_products_saturate()
            layers[name] = QuantizedLinear(
                parts["weight"], parts["weight_scale"], quantize, saturates, tensors.get(f"{name}.bias")
            )
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - set(model.all_tied_weights_keys):
        raise ValueError(f"{folder}: {missing=} {unexpected=}")
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    return model.eval()


@torch.inference_mode()
def logprobs(model: PreTrainedModel, windows: Sequence[Sequence[int]], rows: int = 4096) -> list[np.ndarray]:
    """Logprob of each token but the first of every window, in nats: for n tokens [n - 1], float32.

    The vocabulary's logits are made for `rows` positions at a time.
    """
    results = []
    for window in windows:
        tokens = torch.tensor([list(window)], device=model.device)
        hidden = model.get_decoder()(tokens, use_cache=False).last_hidden_state[0, :-1]
        targets = tokens[0, 1:].unsqueeze(1)
        pieces = [
            model.get_output_embeddings()(piece).float().log_softmax(dim=-1).gather(1, actual).squeeze(1)
            for piece, actual in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        results.append(torch.cat(pieces).cpu().numpy())
    return results


def distributions(
    base: PreTrainedModel, other: PreTrainedModel, windows: Sequence[Sequence[int]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the logprobs of every token by both models at each token but the first of a window: [n - 1, vocabulary]
    float64, nats."""
    for window in windows:
        token_ids = torch.tensor([list(window)], device=base.device)
        log_p, log_q = (
            model(token_ids, use_cache=False).logits[0, :-1].double().log_softmax(-1) for model in (base, other)
        )
        yield log_p, log_q


@torch.inference_mode()
def divergences(base: PreTrainedModel, other: PreTrainedModel, windows: Sequence[Sequence[int]]) -> np.ndarray:
    """KL(base||other) and KL(other||base) at each token but the first of each window: [positions, 2] float64, nats."""
    parts = []
    for log_p, log_q in distributions(base, other, windows):
        ratio = log_p - log_q
        parts.append(torch.stack(((log_p.exp() * ratio).sum(-1), -(log_q.exp() * ratio).sum(-1)), 1).cpu().numpy())
    return np.concatenate(parts)


def dequantized_weight(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensors of one layer of a checkpoint -> weight [out, in], float32."""
    if "weight_global_scale" in parts:
        codes = _fp4_values(parts["weight_packed"])
        scale = parts["weight_scale"].float() / parts["weight_global_scale"].float()
    elif "weight_packed" in parts:
        codes, scale = _int4_values(parts["weight_packed"]), parts["weight_scale"].float()
    else:
        codes, scale = parts["weight"].float(), parts["weight_scale"].float()
    groups = codes.unflatten(1, (scale.shape[1], -1))
    return (groups * scale.unsqueeze(-1)).flatten(1)


class QuantizedLinear(torch.nn.Module):
    """A linear layer whose input is quantized per token, and whose products are summed in float64.

    Its weight [out, in] is codes, int8 or float8_e4m3fn; its scale [out, 1] is float32. `saturates` sums products as
    `saturating_products` does.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        quantize: QuantizeTokens,
        saturates: bool,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.codes = weight.double().T
        self.scale = weight_scale.double().T
        self.bias = 0 if bias is None else bias.double()
        self.quantize = quantize
        self.multiply = saturating_products if saturates else torch.matmul

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] of the same dtype."""
        codes, scale, zero_point = self.quantize(inputs.float())
        products = self.multiply(codes, self.codes) - zero_point.double() * self.codes.sum(dim=0)
        return (products * scale.double() * self.scale + self.bias).to(inputs.dtype)


def int8_products_saturate() -> bool:
    """Whether this CPU lacks VNNI: oneDNN, vLLM's INT8 kernel on CPUs, then sums as `saturating_products` does.

    oneDNN's documentation tells so under "Nuances of int8 Computations".
    """
    capabilities = torch.cpu.get_capabilities()
    return capabilities["architecture"] == "x86_64" and not (capabilities["avx512_vnni"] or capabilities["avx_vnni"])


def saturating_products(activations: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., in] @ [in, out], int8 values as float64, as the instruction vpmaddubsw makes a kernel do it.

    It multiplies unsigned activations (128 more, taken off again in the end) and adds two neighbors' products in 16
    bits: a sum beyond them is cut off. `in` is even.
    """
    unsigned = activations + 128
    total = -128 * weight.sum(dim=0)
    for even in range(0, len(weight), 2):
        pair = slice(even, even + 2)
        total = total + (unsigned[..., pair] @ weight[pair]).clamp(-(2**15), 2**15 - 1)
    return total


def int8_tokens(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest value of a token becomes 127; halves are rounded to even."""
    scale = inputs.abs().amax(dim=-1, keepdim=True) / LARGEST_INT8
    # A token of zeros has scale 0.
    codes = (inputs / scale).nan_to_num().round().clamp(-128, LARGEST_INT8)
    return codes.double(), scale, torch.zeros_like(scale)


def asymmetric_int8_tokens(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The range of a token becomes that of int8.

    This is vLLM's csrc/cpu/dnnl_kernels.cpp, dynamic_scaled_int8_quant: it multiplies by the float32 reciprocal of the
    scale, rounds halves to even, and adds the zero point before rounding. A token of zeros has scale 0.
    """
    low, high = inputs.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 255
    zero_point = (-128 - low / scale).round()
    reciprocal = (1 / scale.double()).float()
    codes = (inputs * reciprocal + zero_point).clamp(-128, LARGEST_INT8).round()
    return codes.nan_to_num().double(), scale, zero_point.nan_to_num()


def fp8_tokens(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest value of a token becomes 448, the largest of e4m3; vLLM clamps scales that are too small."""
    scale = (inputs.abs().amax(dim=-1, keepdim=True) / LARGEST_FP8).clamp(min=SMALLEST_FP8_SCALE)
    return fp8_rounded(inputs / scale).double(), scale, torch.zeros_like(scale)


def fp8_rounded(values: torch.Tensor) -> torch.Tensor:
    """Rounded to float8_e4m3fn with scale 1, too large ones to 448 (torch alone would make them NaN)."""
    return values.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).to(values.dtype)


def _token_quantizer(folder: Path, scheme: dict[str, Any]) -> QuantizeTokens | None:
    activations = scheme["config_groups"]["group_0"].get("input_activations")
    if activations is None:
        return None
    if not activations["dynamic"] or activations["strategy"] != "token":
        raise ValueError(f"{folder}: this oracle knows activations with one scale per token, not {activations}")
    if activations["type"] == "float":
        return fp8_tokens
    return int8_tokens if activations["symmetric"] else asymmetric_int8_tokens


def _int4_values(packed: torch.Tensor) -> torch.Tensor:
    """[out, in / 8] int32, eight codes each, the lowest bits first, 8 added -> [out, in] float32."""
    nibbles = packed.unsqueeze(-1) >> torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    return ((nibbles & 0xF) - 8).flatten(1).float()


def _fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """[out, in / 2] uint8, two E2M1 codes each, the lower bits first -> [out, in] float32."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=packed.device)
    return table[torch.stack([packed & 0xF, packed >> 4], dim=-1).long()].flatten(1)


def fp8_attention(multiplies_fp8: bool) -> Callable[..., tuple[torch.Tensor, None]]:
    """Causal attention over keys and values kept in FP8, as a function that transformers calls.

    `multiplies_fp8` makes products of FP8 too, as FlashAttention 3 does: queries are rounded, and so are the
    exponentials of the scores, shifted so that the largest becomes 2**8 (hopper/softmax.h). Its maximum is a running
    one, this the row's own; that moves only where the rounding falls.
    """

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Queries, keys and values [1, heads, tokens, head] -> [1, tokens, heads, head], and no weights."""
        key, value = (
            fp8_rounded(each).float().repeat_interleave(module.num_key_value_groups, dim=1) for each in (key, value)
        )
        if multiplies_fp8:
            query = fp8_rounded(query)
        scores = query.float() @ key.transpose(2, 3) * scaling
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        multiplied = fp8_rounded(weights * 256) / 256 if multiplies_fp8 else weights
        output = multiplied @ value / weights.sum(dim=-1, keepdim=True)
        return output.transpose(1, 2).contiguous().to(query.dtype), None

    return attention


AttentionInterface.register("fp8_cache", fp8_attention(multiplies_fp8=False))
AttentionInterface.register("fp8_attention", fp8_attention(multiplies_fp8=True))
