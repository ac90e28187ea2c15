"""A model rounded to 4 bits and written as floats again: a quantization that every machine computes alike.

python scripts/rounded_model.py MODEL COPY
"""

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BITS = 4
GROUP = 32
"""Neighboring inputs of an output channel that share a scale."""


def rounded_model(source: Path, path: Path) -> Path:
    """Writes a Llama-like `source` with the weights of every linear layer but lm_head rounded to nearest.

    Symmetric integers of 4 bits, a scale for each group of 32 along the input, max|w| / 7. All tensors are float32, so
    that `--dtype float32` runs what was rounded; the rest of the configuration is the source's.
    """
    # Imported here because it takes seconds, and the copy is nearly always there already.
    from safetensors.torch import load_file, save_file

    copy_all_but_weights(source, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2))
    for file in source.glob("*.safetensors"):
        tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
        rounded = {name: _round(tensor) for name, tensor in tensors.items() if name.endswith("_proj.weight")}
        save_file(tensors | rounded, path / file.name, metadata={"format": "pt"})
    return path


def copy_all_but_weights(source: Path, path: Path) -> None:
    """Make the folder of a model of which only the weights differ."""
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, path)


def _round(weight: "torch.Tensor") -> "torch.Tensor":
    """[out, in] float32 to the values that 4 bits can have."""
    groups = weight.unflatten(1, (-1, GROUP))
    largest = 2 ** (BITS - 1) - 1
    # Where a group is zero, any scale keeps it so.
    scale = (groups.abs().amax(dim=-1, keepdim=True) / largest).clamp(min=1e-30)
    return ((groups / scale).round() * scale).flatten(1)


if __name__ == "__main__":
    print(rounded_model(Path(sys.argv[1]), Path(sys.argv[2])))
