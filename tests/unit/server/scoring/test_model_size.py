"""The size of a served model, beside what its files hold."""

import json
import shutil
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from transformers import Gemma2ForCausalLM, LlamaConfig
from vllm.config import LoadConfig, ModelConfig

from scoremode_server.scoring.model_size import num_parameters, weight_bytes
from tests.models import int8_model, random_gemma, random_llama


def elements(path: Path) -> int:
    """Of all tensors in a model's file, by their shapes."""
    with safe_open(path / "model.safetensors", "pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def file_bytes(*files: Path) -> int:
    return sum(file.stat().st_size for file in files)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("models") / "llama", vocab_size=300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with two files of 10 and 20 bytes that an index names, and no other weights."""
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(10))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(20))
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": names[0], "b": names[0], "c": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def of_folder(folder: Path, load_format: str = "auto") -> int | None:
    config = SimpleNamespace(model=str(folder), revision=None)
    return weight_bytes(config, LoadConfig(load_format=load_format))


def test_a_served_model_has_the_weights_and_the_bytes_of_its_file(llama: Path):
    model = ModelConfig(model=str(llama))
    assert num_parameters(model.hf_config, False) == elements(llama)
    assert weight_bytes(model, LoadConfig()) == file_bytes(llama / "model.safetensors")


def test_a_quantized_copy_has_as_many_weights_in_fewer_bytes(llama: Path, tmp_path: Path):
    copy = int8_model(llama, tmp_path / "int8")
    model = ModelConfig(model=str(copy))
    num_weights = num_parameters(model.hf_config, False)
    assert num_weights == elements(llama) < elements(copy), "the copy's file has scales beside the weights"
    num_bytes = weight_bytes(model, LoadConfig())
    assert num_bytes == file_bytes(copy / "model.safetensors") < file_bytes(llama / "model.safetensors")


def test_tied_weights_count_once(tmp_path: Path):
    gemma = random_gemma(tmp_path / "gemma", vocab_size=1000)
    config = Gemma2ForCausalLM.from_pretrained(gemma).config
    assert config.tie_word_embeddings
    assert num_parameters(config, False) == elements(gemma)


def test_the_served_config_stays_as_it_is(llama: Path, tmp_path: Path):
    config = ModelConfig(model=str(int8_model(llama, tmp_path / "int8"))).hf_config
    num_parameters(config, False)
    assert config.quantization_config


@pytest.mark.parametrize("architectures", [None, [], ["AModelThatNobodyKnows"]])
def test_what_transformers_cannot_make_has_no_known_number(architectures: list[str] | None):
    assert num_parameters(LlamaConfig(architectures=architectures), False) is None


def test_a_config_that_makes_no_model_has_no_known_number():
    broken = LlamaConfig(architectures=["LlamaForCausalLM"], vocab_size=-5)
    assert num_parameters(broken, False) is None


def test_code_of_a_repository_is_not_run_unless_it_is_trusted(tmp_path: Path):
    ran = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    config = LlamaConfig(architectures=["Own"], auto_map={"AutoModelForCausalLM": "modeling.Own"})
    config._name_or_path = str(tmp_path)
    assert num_parameters(config, False) is None
    assert not ran.exists()
    assert num_parameters(config, True) is None, "the code has no such class"
    assert ran.exists()


def test_all_files_of_the_index_count_and_no_other(folder: Path):
    assert of_folder(folder) == 30
    (folder / "of-another-run.safetensors").write_bytes(bytes(5))
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(bytes(7))
    assert of_folder(folder) == 30


def test_of_weights_that_are_there_twice_those_count_that_are_loaded(folder: Path):
    (folder / "consolidated.safetensors").write_bytes(bytes(99))
    assert of_folder(folder, "auto") == of_folder(folder, "mistral") == 99
    assert of_folder(folder, "hf") == of_folder(folder, "safetensors") == 30


def test_other_formats_have_no_known_size(folder: Path):
    assert of_folder(folder, "dummy") is None
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(bytes(40))
    assert of_folder(folder) is None


def test_a_gguf_file_has_its_own_size(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(12))
    assert of_folder(file) == 12


def test_a_name_on_the_hub_has_the_size_of_its_cached_files(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    cache = tmp_path_factory.mktemp("cache")
    repository = cache / "models--an--example"
    shutil.copytree(folder, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    cached = LoadConfig(download_dir=str(cache))
    assert weight_bytes(SimpleNamespace(model="an/example", revision=None), cached) == 30
    assert weight_bytes(SimpleNamespace(model="an/example", revision="b" * 40), cached) is None
    assert weight_bytes(SimpleNamespace(model="s3://bucket/model", revision=None), cached) is None
