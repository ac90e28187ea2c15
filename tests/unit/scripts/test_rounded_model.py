"""The 4-bit copy of a model: what is rounded, to which values, and what is left as it was."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rounded_model import GROUP, rounded_model


def written(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two groups of one output channel, one of them with round scales, and a tensor that is no linear layer's."""
    folder = tmp_path / "source"
    folder.mkdir()
    first = torch.tensor([7.0, -7.0, 2.4, 2.6, -0.5, 0.6] + [0.0] * (GROUP - 6))
    weight = torch.cat((first, torch.zeros(GROUP)))[None]
    tensors = {"q_proj.weight": weight.bfloat16(), "embed_tokens.weight": torch.full((2, GROUP), 0.3).bfloat16()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_weights_are_rounded_to_multiples_of_their_groups_scale(source: Path, tmp_path: Path):
    rounded = written(rounded_model(source, tmp_path / "copy"))["q_proj.weight"]
    # The scale is 7 / 7; halves go to the even neighbour, and a group of zeros stays one.
    assert rounded[0, :6].tolist() == [7, -7, 2, 3, 0, 1]
    assert rounded[0, 6:].count_nonzero() == 0


def test_a_group_has_fifteen_values(random_model: Path, tmp_path: Path):
    copy = written(rounded_model(random_model, tmp_path / "copy"))
    groups = copy["model.layers.0.mlp.down_proj.weight"].unflatten(1, (-1, GROUP)).flatten(0, 1)
    assert max(len(group.unique()) for group in groups) <= 15
    original = written(random_model)["model.layers.0.mlp.down_proj.weight"].unflatten(1, (-1, GROUP)).flatten(0, 1)
    largest_step = original.abs().amax(1, keepdim=True) / 7
    assert ((groups - original).abs() <= 0.501 * largest_step).all()


def test_all_else_is_kept_as_float32(source: Path, tmp_path: Path):
    copy = rounded_model(source, tmp_path / "copy")
    tensors = written(copy)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert torch.equal(tensors["embed_tokens.weight"], written(source)["embed_tokens.weight"].float())
    assert (copy / "config.json").read_text() == "{}"
