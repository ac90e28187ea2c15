"""The size of a served model, compared with what its files hold."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig
from vllm.config import LoadConfig, ModelConfig

from scoremode_server.scoring.model_files import num_parameters, weight_bytes
from tests.models import int8_model, random_gemma, random_llama


def num_elements(path: Path) -> int:
    """Of all tensors in a model's file."""
    return sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with two files of 10 and 20 bytes that an index names, and no other weights."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, size in zip(names, (10, 20), strict=True):
        (tmp_path / name).write_bytes(bytes(size))
    index = {"weight_map": {"a": names[0], "b": names[0], "c": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def size_of(folder: Path, load_format: str = "auto") -> int | None:
    config = SimpleNamespace(model=str(folder), revision=None)
    return weight_bytes(config, LoadConfig(load_format=load_format))


def test_a_quantized_copy_has_as_many_weights_and_tied_ones_count_once(tmp_path: Path):
    gemma = random_gemma(tmp_path / "gemma", vocab_size=1000)
    assert num_parameters(AutoConfig.from_pretrained(gemma), False) == num_elements(gemma)
    llama = random_llama(tmp_path / "llama", vocab_size=300)
    copy = int8_model(llama, tmp_path / "int8")
    for path in (llama, copy):
        model = ModelConfig(model=str(path))
        assert num_parameters(model.hf_config, False) == num_elements(llama)
        assert weight_bytes(model, LoadConfig()) == (path / "model.safetensors").stat().st_size
    assert model.hf_config.quantization_config, "the served config stays as it is"
    assert num_elements(llama) < num_elements(copy), "the copy's file has scales next to the weights"


@pytest.mark.parametrize(
    ("architectures", "vocab_size"), [(None, 9), ([], 9), (["NobodyKnowsThis"], 9), (["LlamaForCausalLM"], -5)]
)
def test_what_transformers_cannot_make_has_no_known_number(architectures, vocab_size):
    assert num_parameters(LlamaConfig(architectures=architectures, vocab_size=vocab_size), False) is None


def test_code_of_a_repository_is_not_run_unless_it_is_trusted(tmp_path: Path):
    ran = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    config = LlamaConfig(architectures=["Own"], auto_map={"AutoModelForCausalLM": "modeling.Own"})
    config._name_or_path = str(tmp_path)
    assert num_parameters(config, False) is None
    assert not ran.exists()
    assert num_parameters(config, True) is None, "the code has no such class"
    assert ran.exists()


def test_only_files_that_are_loaded_count(folder: Path):
    (folder / "of-another-run.safetensors").write_bytes(bytes(5))
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(bytes(7))
    assert size_of(folder) == 30
    (folder / "consolidated.safetensors").write_bytes(bytes(99))
    assert size_of(folder, "auto") == size_of(folder, "mistral") == 99
    assert size_of(folder, "hf") == size_of(folder, "safetensors") == 30


def test_of_other_formats_only_gguf_has_a_known_size(folder: Path):
    assert size_of(folder, "dummy") is None
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    (folder / "model.gguf").write_bytes(bytes(12))
    assert (size_of(folder), size_of(folder / "model.gguf")) == (None, 12)


def test_a_name_on_the_hub_has_the_size_of_its_cached_files(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    cache = tmp_path_factory.mktemp("cache")
    repository, revision = cache / "models--an--example", "a" * 40
    shutil.copytree(folder, repository / "snapshots" / revision)
    load = LoadConfig(download_dir=str(cache))
    assert weight_bytes(SimpleNamespace(model="an/example", revision=revision), load) == 30
    assert weight_bytes(SimpleNamespace(model="an/example", revision="b" * 40), load) is None
    assert weight_bytes(SimpleNamespace(model="s3://bucket/model", revision=None), load) is None
