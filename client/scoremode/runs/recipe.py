"""Choose the blocks of a quantized model to keep in 16 bits, for the most nats per byte."""

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
    """As the original's checkpoint names them."""
    extra_bytes: int
    """That the block takes in the original, in addition to what it takes in the quantized checkpoint."""


@dataclass(frozen=True, slots=True)
class Recipe:
    kept: list[KeptBlock]
    predicted: Cost
    """The divergence to expect."""
    scheme: dict[str, Any]
    """The `quantization_config` of the quantized checkpoint, if it is one of compressed-tensors; else empty."""

    @property
    def extra_bytes(self) -> int:
        return sum(each.extra_bytes for each in self.kept)

    @property
    def ignore(self) -> list[str]:
        """The kept modules, as llm-compressor's `ignore` takes them, after those that the copy has kept already."""
        kept = _patterns([module for each in self.kept for module in each.modules])
        return [*(self.scheme.get("ignore") or ["lm_head"]), *kept]

    @property
    def modifier(self) -> str | None:
        """A recipe of llm-compressor that quantizes as the copy is quantized, and keeps the blocks; None if its scheme
        is not known. JSON is YAML too."""
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
        """For vLLM's `--quantization-config`, which goes by its own names."""
        return json.dumps({"ignore": _patterns([module for each in self.kept for module in each.block.modules])})


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
    # A module that is a linear layer itself, or has some.
    return [rf"re:^{re.escape(module)}(\..*)?$" for module in modules]


def make_recipe(
    measurement: LayersMeasurement,
    base_weights: Path,
    weights: Path,
    *,
    num_blocks: int | None = None,
    extra_bytes: float | None = None,
) -> Recipe:
    """Choose blocks greedily by nats per byte: a number of them, or as many as take so many bytes more. None that costs
    no more than its floor is kept.

    Args:
        measurement: The costs.
        base_weights: The folder of the original's checkpoint.
        weights: That of the quantized one.
        num_blocks: How many to keep.
        extra_bytes: How much larger the model may be.

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
            sum(_bytes_of(module, each, at) for module in modules)
            for each, at in ((base, base_weights), (quantized, weights))
        ]
        # A block that the checkpoint has not quantized costs what those before it made of its input.
        if sizes[0] > sizes[1]:
            candidates.append(KeptBlock(block, modules, sizes[0] - sizes[1]))
    if not candidates:
        raise RunError(f"no block costs more than its floor and is smaller in {weights} than in {base_weights}")
    kept: list[KeptBlock] = []
    for each in sorted(candidates, key=lambda each: -each.block.cost / each.extra_bytes):
        taken = sum(other.extra_bytes for other in kept)
        if len(kept) != num_blocks and (extra_bytes is None or taken + each.extra_bytes <= extra_bytes):
            kept.append(each)
    return Recipe(kept, measurement.without([each.block for each in kept]), _scheme(weights))


def tensor_bytes(folder: Path, *, in_16_bits: bool = False) -> dict[str, int]:
    """The size of each tensor of a checkpoint, by its name, from the headers of its safetensors files; at most that in
    16 bits if asked for. RunError if there are none, or one cannot be read."""
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
    """The name that a checkpoint has for a module of vLLM, which may have another prefix. RunError if there is none, or
    there are several."""
    if any(name.startswith(f"{module}.") for name in sizes):
        return module
    # The list of layers, the index and the rest.
    tail = re.search(r"[^.]+\.\d+\..*$", module)
    pattern = re.compile(rf"(?:.*\.)?{re.escape(tail[0] if tail else module)}(?=\.)")
    found = {match[0] for name in sizes if (match := pattern.match(name))}
    if len(found) != 1:
        raise RunError(f"{folder} has {len(found)} modules that could be {module}, so a recipe cannot name it")
    return found.pop()


def _bytes_of(module: str, sizes: dict[str, int], folder: Path) -> int:
    """The bytes of a module's tensors."""
    found = [size for name, size in sizes.items() if name.startswith(f"{module}.")]
    if not found:
        raise RunError(f"{folder} has no tensors of {module}")
    return sum(found)
