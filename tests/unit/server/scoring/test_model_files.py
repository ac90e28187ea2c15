"""Fingerprints of a model's files depend on contents, but not on where files are or when they were written. Sizes are
those of the loaded files."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch
from transformers import AutoConfig, Gemma2Config, LlamaConfig
from vllm.config import LoadConfig, ModelConfig
from vllm.lora.request import LoRARequest

from scoremode_server.scoring.model_files import (
    BLOCK_BYTES,
    MAX_TENSORS,
    WHOLE_BYTES,
    digest_of,
    model_folder,
    model_identity,
    num_parameters,
    weight_files,
    with_adapter,
)
from scoremode_server.scoring.model_identity import ModelIdentity
from tests.models import int8_model, random_llama, random_model_of

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def identity(path: Path | str, load: LoadConfig | None = None, *in_chats: Any, **changes: Any) -> ModelIdentity:
    fields = {
        "model": str(path),
        "revision": None,
        "dtype": "bfloat16",
        "quantization": None,
        "quantization_config": None,
        "hf_overrides": {},
        "hf_config_path": None,
        "model_weights": "",
        "hf_config": None,
        "hf_text_config": None,
        "trust_remote_code": False,
        **changes,
    }
    config = SimpleNamespace(model_config=SimpleNamespace(**fields), load_config=load or LoadConfig())
    return model_identity(config, None, None, *in_chats)


def test_a_model_tells_where_its_answers_end_and_how_chats_are_rendered(tmp_path: Path):
    plain, same, other = (identity(tmp_path, None, [1, 5], each) for each in (None, ["a", "b"], ["a", "c"]))
    assert plain.stop_token_ids == [1, 5]
    assert plain.chat_template_fingerprint is None
    assert same.chat_template_fingerprint != other.chat_template_fingerprint
    assert same.fingerprint == other.fingerprint


def fingerprint(path: Path | str, load: LoadConfig | None = None, **changes: Any) -> str:
    return identity(path, load, **changes).fingerprint


def random_tensors(seed: int, num_tensors: int = 12) -> dict[str, np.ndarray]:
    """12 of 300 kB, so that most blocks at even distances are in none of a given one's."""
    random = np.random.default_rng(seed)
    return {f"layers.{number}": random.integers(0, 256, 300_000, np.uint8) for number in range(num_tensors)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for seed, name in enumerate(SHARDS):
        save_file(random_tensors(seed), folder / name)
    return folder


def test_the_same_files_elsewhere_and_later_are_the_same_model(folder: Path, tmp_path: Path):
    copied = tmp_path / "another" / "place"
    shutil.copytree(folder, copied)
    for file in copied.iterdir():
        os.utime(file, (0, 0))
    (copied / "README.md").write_text("of a copy")
    (copied / "training_args.bin").write_bytes(b"not a weight")
    assert fingerprint(copied) == fingerprint(folder)
    assert fingerprint(folder).startswith("v2-")


def test_one_tensor_quantized_again_with_the_same_size_makes_another_model(folder: Path):
    known = {fingerprint(folder)}
    size = (folder / SHARDS[1]).stat().st_size
    for tensor in ("layers.0", "layers.5", "layers.11"):
        save_file(random_tensors(1) | {tensor: random_tensors(99)[tensor]}, folder / SHARDS[1])
        known.add(fingerprint(folder))
    assert len(known) == 4
    assert (folder / SHARDS[1]).stat().st_size == size


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "model.gguf"])
def test_weights_of_other_formats_are_sampled(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text("{}")
    weights = np.random.default_rng(0).integers(0, 256, 3 * WHOLE_BYTES, np.uint8).tobytes()
    found = set()
    for content in (weights, weights[:-1] + b"\0", bytes(len(weights) // 2) + weights[len(weights) // 2 :]):
        (tmp_path / name).write_bytes(content)
        found.add(fingerprint(tmp_path))
    assert len(found) == 3


def test_all_parts_of_a_gguf_file_count(tmp_path: Path):
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF first")
    before = fingerprint(parts[0])
    parts[1].write_bytes(b"GGUF other")
    assert fingerprint(parts[0]) != before


def test_of_more_tensors_than_are_sampled_every_second_is_seen(tmp_path: Path):
    """Each has the size of a block, and the three that change lie between the blocks at even distances."""
    places = range(0, 2 * MAX_TENSORS * BLOCK_BYTES, BLOCK_BYTES)
    header = json.dumps({str(place): {"data_offsets": [place, place + BLOCK_BYTES]} for place in places}).encode()
    path, found = tmp_path / "model.safetensors", set()
    for place, value in ((1000, 0), (1000, 1), (1002, 1), (1004, 1)):
        with path.open("wb") as file:
            weights = file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(weights + places.stop)
            file.seek(weights + places[place])
            file.write(bytes([value]))
        found.add(digest_of([path]))
    assert len(found) == 4


def test_a_header_that_is_not_one_is_read_as_weights(tmp_path: Path):
    path, found = tmp_path / "model.safetensors", set()
    for header in (b"{", b"[" * 100_000, b'{"a": {"data_offsets": [1]}}', b'{"a": 3}'):
        content = len(header).to_bytes(8, "little") + header
        path.write_bytes(content + bytes(WHOLE_BYTES + 9 - len(content)))
        found.add(digest_of([path]))
    assert len(found) == 4


def test_configuration_and_flags_decide(folder: Path):
    flags = [
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 1}},
        {"hf_overrides": str.lower},
    ]
    found = {fingerprint(folder), *(fingerprint(folder, **changes) for changes in flags)}
    for name in ("config.json", "quantize_config.json"):
        (folder / name).write_text('{"num_bits": 3}')
        found.add(fingerprint(folder))
    found.add(dummy := fingerprint(folder, LoadConfig(load_format="dummy")))
    assert dummy.startswith("v2-dummy-")
    assert len(found) == 1 + len(flags) + 3


def test_a_name_on_the_hub_is_its_commit_and_a_copy_of_it_is_the_same_model(folder: Path, tmp_path: Path):
    repository = tmp_path / "cache" / "models--an--example"
    (repository / "refs").mkdir(parents=True)
    load, found = LoadConfig(download_dir=str(tmp_path / "cache")), []
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(folder, repository / "snapshots" / commit)
        (repository / "refs" / "main").write_text(commit)
        found.append(identity("an/example", load))
        assert found[-1] == identity("an/example", load, revision="main")
    first, second = found
    offline = identity(repository / "snapshots" / ("a" * 40))
    assert (first.revision, second.revision, offline.revision) == ("a" * 40, "b" * 40, "a" * 40)
    assert first.fingerprint == second.fingerprint == fingerprint(folder)
    assert first.may_continue(offline)
    assert first.may_continue(identity(folder))
    assert not second.may_continue(first), "what differs may lie between samples"


async def test_an_adapter_counts_and_is_read_again_when_it_is_loaded_again(tmp_path: Path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(b"first")
    request = LoRARequest("tuned", 1, str(adapter))
    first = await with_adapter("v2-base", request)
    assert first.startswith("v2-base+")
    assert await with_adapter("v2-base", None) == "v2-base"
    weights.write_bytes(b"again")
    assert await with_adapter("v2-base", request) == first, "it is not loaded yet"
    again = await with_adapter("v2-base", LoRARequest("tuned", 1, str(adapter), load_inplace=True))
    assert again != first
    copied = shutil.copytree(adapter, tmp_path / "copied")
    assert await with_adapter("v2-base", LoRARequest("copied", 2, str(copied))) == again
    assert await with_adapter("v2-base", LoRARequest("gone", 3, str(tmp_path / "gone"))) != again


def num_elements(path: Path) -> int:
    """The number of elements of all tensors in a model's file."""
    return sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())


def test_a_quantized_copy_has_as_many_weights_and_tied_ones_count_once(tmp_path: Path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1024}
    gemma = random_model_of(Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1), tmp_path / "gemma")
    assert num_parameters(AutoConfig.from_pretrained(gemma), False) == num_elements(gemma)
    llama = random_llama(tmp_path / "llama", vocab_size=300)
    copy = int8_model(llama, tmp_path / "int8")
    for path in (llama, copy):
        model = ModelConfig(model=str(path))
        assert num_parameters(model.hf_config, False) == num_elements(llama)
        assert size_of(path) == (path / "model.safetensors").stat().st_size
    assert model.hf_config.quantization_config, "the served config stays as it is"
    assert num_elements(llama) < num_elements(copy), "the copy's file has scales next to the weights"


@pytest.fixture
def sized(tmp_path: Path) -> Path:
    """A model's folder with two files of 10 and 20 bytes that an index names, and no other weights."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, size in zip(names, (10, 20), strict=True):
        (tmp_path / name).write_bytes(bytes(size))
    index = {"weight_map": {"a": names[0], "b": names[0], "c": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def size_of(
    model: Path | str, load_format: str = "auto", revision: str | None = None, cache: Path | None = None
) -> int:
    folder = model_folder(str(model), revision, cache and str(cache))
    return sum(file.stat().st_size for file in weight_files(Path(model), folder, load_format))


def test_code_of_a_repository_is_not_run_unless_it_is_trusted(tmp_path: Path):
    ran = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    config = LlamaConfig(architectures=["Own"], auto_map={"AutoModelForCausalLM": "modeling.Own"})
    config._name_or_path = str(tmp_path)
    assert num_parameters(config, False) is None
    assert not ran.exists()
    assert num_parameters(config, True) is None, "the code has no such class, and the config no other"
    assert ran.exists()


def test_only_files_that_are_loaded_count(sized: Path):
    (sized / "of-another-run.safetensors").write_bytes(bytes(5))
    (sized / "original").mkdir()
    (sized / "original" / "model.safetensors").write_bytes(bytes(7))
    assert size_of(sized) == 30
    (sized / "consolidated.safetensors").write_bytes(bytes(99))
    formats = ("auto", "mistral", "hf", "safetensors")
    assert [size_of(sized, load_format) for load_format in formats] == [99, 99, 30, 30]


def test_other_formats_have_sizes_too_and_dummy_weights_none(sized: Path):
    assert identity(sized, LoadConfig(load_format="dummy")).weight_bytes is None
    for file in sized.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    (sized / "model.gguf").write_bytes(bytes(12))
    assert (size_of(sized), size_of(sized / "model.gguf")) == (30, 12)


def test_a_name_on_the_hub_has_the_size_of_its_cached_files(sized: Path, tmp_path_factory: pytest.TempPathFactory):
    cache = tmp_path_factory.mktemp("cache")
    repository, revision = cache / "models--an--example", "a" * 40
    shutil.copytree(sized, repository / "snapshots" / revision)
    names = (("an/example", revision), ("an/example", "b" * 40), ("s3://bucket/model", None))
    assert [size_of(name, revision=commit, cache=cache) for name, commit in names] == [30, 0, 0]


def test_the_stored_dtype_is_that_of_most_weights(tmp_path: Path):
    """A configuration may name the dtype from before a conversion; of packed integers it says more than the file."""
    text_config = SimpleNamespace(dtype=torch.bfloat16)
    weights = {"norm": torch.ones(9, dtype=torch.float16), "linear": torch.ones(4, 4)}
    save_torch(weights, tmp_path / SHARDS[0])
    assert identity(tmp_path, hf_text_config=text_config).stored_dtype == "float32"
    save_torch({"packed": torch.ones(99, dtype=torch.int32)}, tmp_path / SHARDS[1])
    assert identity(tmp_path, hf_text_config=text_config).stored_dtype == "bfloat16"
