"""The servers of a sweep that run at once, and the part of the GPU's memory that each gets."""

import json
from pathlib import Path

import pytest

from scoremode.sweep.memory import ALONE, Device, Needs, model_folder, needs, plan_groups, weight_bytes
from scoremode.sweep.plan import flag_value

GIB = 1024**3
CONFIG = {"num_hidden_layers": 28, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2}
CONFIG["max_position_embeddings"] = 32_768
CACHE = 2 * 28 * 2 * 128 * 2 * 32_768
"""Keys and values of 32,768 tokens: 28 layers, 2 heads of 128 numbers, 2 bytes each."""
DEVICE = Device(80 * GIB, 100 * GIB)
"""Servers may take 72 GiB together."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of 10 GiB in two files, which take no space."""
    for name in ("model-1.safetensors", "model-2.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(5 * GIB)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--max-model-len", "4096"], 4096),
        (["--max_model_len=4K", "--dtype", "float32"], 4096),
        (["--max-model-len", "4096", "--max-model-len=2k"], 2000),
        (["--max-model-len", "auto"], None),
        (["--no-max-model-len", "1"], None),
    ],
)
def test_a_flag_is_read_as_vllm_reads_it(flags, value):
    assert flag_value(flags, "max-model-len") == value


def test_a_server_needs_its_weights_a_cache_and_working_memory(model):
    assert needs(model, [], DEVICE) == Needs(11 * GIB + 6 * GIB + CACHE, CACHE)
    assert needs(model, ["--max-model-len", "65536"], DEVICE).cache == 2 * CACHE
    assert needs(model, ["--dtype=float32"], DEVICE) == Needs(22 * GIB + 6 * GIB + 2 * CACHE, 2 * CACHE)
    assert needs(model, ["--dtype", "float16"], DEVICE).cache == CACHE
    (model / "config.json").write_text(json.dumps({"text_config": {**CONFIG, "head_dim": 256}}))
    assert needs(model, [], DEVICE).cache == 2 * CACHE


def test_memory_that_a_servers_own_flags_set_is_its_share(model):
    assert needs(model, ["--gpu-memory-utilization=0.4"], DEVICE) == Needs(40 * GIB, 23 * GIB, is_fixed=True)
    assert needs(model, ["--kv-cache-memory-bytes", "8G"], DEVICE) == Needs(25 * GIB, 8 * GIB, is_fixed=True)
    both = ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", "8G"]
    assert needs(model, both, DEVICE) == Needs(25 * GIB, 8 * GIB, is_fixed=True)


@pytest.mark.parametrize("config", ["{}", "[]", "", None, json.dumps({**CONFIG, "num_attention_heads": 0})])
def test_a_model_of_unknown_needs_runs_alone(model, config, tmp_path):
    assert needs(tmp_path / "on/hub", [], DEVICE) == ALONE
    assert needs(model, ["--gpu-memory-utilization", "0.1"], DEVICE) == ALONE, "the weights do not fit"
    assert needs(model, ["--gpu-memory-utilization", "0.5.1"], DEVICE) == ALONE, "its server refuses the flag"
    (model / "config.json").unlink()
    if config is not None:
        (model / "config.json").write_text(config)
    assert needs(model, [], DEVICE) == ALONE


def test_a_hub_name_is_looked_up_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert model_folder("org/name", tmp_path) == tmp_path / "org/name"
    (snapshot := tmp_path / "hub/models--org--name/snapshots/abc").mkdir(parents=True)
    assert model_folder("org/name", tmp_path) == snapshot
    (snapshot / "model-1.safetensors").write_bytes(b"weights")
    assert weight_bytes(snapshot) == 7
    (snapshot / "model-2.safetensors").symlink_to("deleted")
    assert weight_bytes(snapshot) == 0, "not known, since a server downloads it again"


def test_as_many_servers_run_at_once_as_fit_the_device():
    sizes = {"base": 30, "int8": 20, "int4": 15, "other": 10, "large": 90}
    groups = plan_groups({name: Needs(size * GIB, GIB) for name, size in sizes.items()}, DEVICE, 8)
    assert [[*group] for group in groups] == [["base", "int8", "int4"], ["other"], ["large"]]
    # 7 GiB are left over: each of the first three has a third more, half of it in its cache.
    first = {name: dict(zip(words[::2], map(float, words[1::2]), strict=True)) for name, words in groups[0].items()}
    assert first["base"]["--gpu-memory-utilization"] == pytest.approx((30 + 7 / 3) / 100, abs=1e-4)
    assert first["int4"]["--kv-cache-memory-bytes"] == pytest.approx((1 + 7 / 6) * GIB, abs=1)
    assert sum(flags["--gpu-memory-utilization"] for flags in first.values()) == pytest.approx(0.72, abs=2e-4)
    assert [*groups[1].values(), *groups[2].values()] == [(), ()], "vLLM measures the memory of a server alone"


def test_a_server_whose_own_flags_set_its_memory_gets_no_more():
    models = {"free": Needs(9 * GIB, GIB), "fixed": Needs(45 * GIB, 3 * GIB, is_fixed=True)}
    [flags] = plan_groups(models, DEVICE, 3)
    assert flags == {
        "free": ("--gpu-memory-utilization", "0.2700", "--kv-cache-memory-bytes", str(10 * GIB)),
        "fixed": ("--gpu-memory-utilization", "0.4500", "--kv-cache-memory-bytes", str(3 * GIB)),
    }


def test_without_a_device_only_the_number_counts():
    models = {"url": ALONE, "a": Needs(), "b": Needs(), "c": Needs()}
    assert plan_groups(models, None, 2) == [{"url": ()}, {"a": (), "b": ()}, {"c": ()}]
    assert plan_groups(models, None, None) == [{name: ()} for name in models]
