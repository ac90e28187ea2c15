"""Chooses the blocks of a quantized model that should stay in 16 bits: those that save the most nats per byte."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoremode._texts import json_object
from scoremode.errors import RunError, file_errors
from scoremode.runs.layers import Cost, LayersMeasurement, PartCost


@dataclass(frozen=True, slots=True)
class KeptBlock:
    block: PartCost
    modules: list[str]
    """Names of its modules in the original checkpoint."""
    extra_bytes: int
    """How many bytes larger the block is in the original checkpoint than in the quantized one."""


@dataclass(frozen=True, slots=True)
class Recipe:
    kept: list[KeptBlock]
    predicted: Cost
    """The predicted divergence."""
    scheme: dict[str, Any]
    """The quantized checkpoint's `quantization_config`; empty if it is not one of compressed-tensors."""

    @property
    def extra_bytes(self) -> int:
        return sum(choice.extra_bytes for choice in self.kept)

    @property
    def ignore(self) -> list[str]:
        """llm-compressor's `ignore`: the modules that the quantized checkpoint has not quantized, then the recipe's."""
        patterns = _patterns([module for choice in self.kept for module in choice.modules])
        return [*(self.scheme.get("ignore") or ["lm_head"]), *patterns]

    @property
    def modifier(self) -> str | None:
        """A YAML recipe for llm-compressor with the quantized checkpoint's scheme, which leaves the chosen blocks in 16
        bits; None if the scheme is unknown."""
        if not self.scheme:
            return None
        names = ("config_groups", "kv_cache_scheme")
        fields = {name: _without_nulls(self.scheme[name]) for name in names if self.scheme.get(name)}
        return "\n".join(
            [
                "quantization_stage:",
                "  quantization_modifiers:",
                "    QuantizationModifier:  # or GPTQModifier or AWQModifier, as the copy was made",
                "      ignore:",
                *(f"        - {json.dumps(name)}" for name in self.ignore),
                *(f"      {name}: {json.dumps(content)}" for name, content in fields.items()),
            ]
        )

    @property
    def quantization_config(self) -> str:
        """The value of vLLM's `--quantization-config`, with vLLM's names of modules."""
        return json.dumps({"ignore": _patterns([module for choice in self.kept for module in choice.block.modules])})


def _without_nulls(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _without_nulls(part) for name, part in content.items() if part is not None}
    return content


def _scheme(folder: Path) -> dict[str, Any]:
    try:
        config = json_object((folder / "config.json").read_bytes()) or {}
    except OSError:
        return {}
    scheme = config.get("quantization_config")
    return scheme if isinstance(scheme, dict) and isinstance(scheme.get("config_groups"), dict) else {}


def _patterns(modules: list[str]) -> list[str]:
    # Each pattern matches the module itself, if it is a linear layer, and the linear layers in it.
    return [rf"re:^{re.escape(module)}(\..*)?$" for module in modules]


def make_recipe(
    measurement: LayersMeasurement,
    base_weights: Path,
    weights: Path,
    *,
    num_blocks: int | None = None,
    extra_bytes: float | None = None,
) -> Recipe:
    """Choose blocks greedily by nats per byte, up to a number of blocks or bytes. Only blocks that cost more than their
    floor are chosen.

    Args:
        measurement: The costs.
        base_weights: The folder of the original checkpoint.
        weights: The folder of the quantized checkpoint.
        num_blocks: How many blocks to choose.
        extra_bytes: How many bytes larger the model may become.

    Raises:
        RunError: a checkpoint cannot be read, or does not have the blocks.
    """
    base, quantized = tensor_bytes(base_weights, in_16_bits=True), tensor_bytes(weights)
    candidates = []
    for block in measurement.blocks:
        if not block.is_above_floor:
            continue
        modules = [_checkpoint_module(module, base, base_weights) for module in block.modules]
        sizes = [
            sum(_bytes_of(module, tensors, folder) for module in modules)
            for tensors, folder in ((base, base_weights), (quantized, weights))
        ]
        # Leave out blocks that are not quantized: their cost comes from earlier blocks, which changed their input.
        if sizes[0] > sizes[1]:
            candidates.append(KeptBlock(block, modules, sizes[0] - sizes[1]))
    if not candidates:
        raise RunError(f"no block costs more than its floor and is smaller in {weights} than in {base_weights}")
    kept: list[KeptBlock] = []
    for choice in sorted(candidates, key=lambda choice: -choice.block.cost / choice.extra_bytes):
        num_bytes = sum(other.extra_bytes for other in kept) + choice.extra_bytes
        if len(kept) != num_blocks and (extra_bytes is None or num_bytes <= extra_bytes):
            kept.append(choice)
    return Recipe(kept, measurement.without([choice.block for choice in kept]), _scheme(weights))


def tensor_bytes(folder: Path, *, in_16_bits: bool = False) -> dict[str, int]:
    """Read the size of each tensor in a checkpoint, by name, from the headers of its safetensors files. `in_16_bits`
    counts larger types as 16 bits. RunError if there are no such files, or one cannot be read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RunError(f"{folder} has no safetensors files")
    sizes: dict[str, int] = {}
    for path in files:
        with file_errors(RunError, f"read {path}"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            content = file.read(size) if size <= 1 << 28 else b""
        try:
            header = json.loads(content)
            header.pop("__metadata__", None)
            for name, entry in header.items():
                size = entry["data_offsets"][1] - entry["data_offsets"][0]
                sizes[name] = min(size, 2 * math.prod(entry["shape"])) if in_16_bits else size
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RunError(f"{path} is not a safetensors file, or is cut short") from None
    return sizes


def _checkpoint_module(module: str, sizes: dict[str, int], folder: Path) -> str:
    """The checkpoint's name for a vLLM module, perhaps with another prefix. RunError unless exactly one module fits."""
    if any(name.startswith(f"{module}.") for name in sizes):
        return module
    # Compare from the list of layers on, as in `layers.11.mlp`.
    tail = re.search(r"[^.]+\.\d+\..*$", module)
    pattern = re.compile(rf"(?:.*\.)?{re.escape(tail[0] if tail else module)}(?=\.)")
    names = {match[0] for name in sizes if (match := pattern.match(name))}
    if len(names) != 1:
        raise RunError(f"{folder} has {len(names)} modules that could be {module}, so a recipe cannot name it")
    return names.pop()


def _bytes_of(module: str, sizes: dict[str, int], folder: Path) -> int:
    tensor_sizes = [size for name, size in sizes.items() if name.startswith(f"{module}.")]
    if not tensor_sizes:
        raise RunError(f"{folder} has no tensors of {module}")
    return sum(tensor_sizes)
