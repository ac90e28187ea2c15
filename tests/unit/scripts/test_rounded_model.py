"""The 4-bit copy of a model: what is rounded, to which values, and what stays as it was."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rounded_model import GROUP, rounded_model


def test_linear_weights_are_rounded_to_multiples_of_their_groups_scale(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    group = torch.tensor([7.0, -7.0, 2.4, 2.6, -0.5, 0.6] + [0.0] * (GROUP - 6))
    weight = torch.cat((group, 10 * group, torch.zeros(GROUP)))[None]
    tensors = {"q_proj.weight": weight.bfloat16(), "embed_tokens.weight": torch.full((2, GROUP), 0.3).bfloat16()}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    copy = rounded_model(source, tmp_path / "copy")
    rounded = load_file(copy / "model.safetensors")
    # The scales are 7 / 7 and 70 / 7; halves are rounded to even, and a group of zeros stays one.
    expected = torch.zeros(3, GROUP)
    expected[0, :6] = torch.tensor([7.0, -7, 2, 3, 0, 1])
    expected[1] = 10 * expected[0]
    assert torch.equal(rounded["q_proj.weight"], expected.reshape(1, -1))
    assert torch.equal(rounded["embed_tokens.weight"], tensors["embed_tokens.weight"].float())
    assert rounded["q_proj.weight"].dtype == torch.float32
    assert (copy / "config.json").read_text() == "{}"
