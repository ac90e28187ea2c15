"""References that the transformers library records: next to its logits in float64, to what a server stores, and to
recordings of the same model that was interrupted, or is on disk."""

import sys
from dataclasses import asdict
from pathlib import Path
from subprocess import run
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GraniteConfig, LlamaConfig, Olmo2Config

from scoremode.windows import WindowError
from scoremode.wire.references import ReferenceRequest
from scoremode_server.errors import ConflictError, RequestError
from scoremode_server.references.files.directory import ReferenceDirectory, StoredReference
from scoremode_server.references.from_transformers import identity_of, record
from tests import oracle
from tests.models import random_model_of
from tests.texts import WIKITEXT
from tests.unit.server.references.reference_engine import BODY
from tests.unit.server.references.reference_engine import record as record_on_server

SIZES: dict[str, Any] = {
    **{"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.1},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
}
FAMILIES = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "scaled": GraniteConfig(**SIZES, logits_scaling=3.0, residual_multiplier=0.5, embedding_multiplier=2.0),
    "capped": Gemma2Config(**SIZES, head_dim=64, final_logit_softcapping=2.0, sliding_window=32),
    # Its norms come after attention and MLP, so the stream shows only between layers.
    "norms after": Olmo2Config(**SIZES),
}
SCALES = {"scaled": (pytest.approx(1 / 3), None), "capped": (1.0, 2.0)}
CUT: dict[str, Any] = {"method": "disjoint", "context_length": 64, "max_tokens": 3 * 64 + 1, "layers": True}
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: random_model_of(config, folder / name) for name, config in FAMILIES.items()}


def load(path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Any]:
    # Other attentions leave out Gemma 2's soft cap.
    settings = {"attn_implementation": "eager", **settings}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **settings), AutoTokenizer.from_pretrained(path)


def recorded(model: Any, tokenizer: Any, root: Path, name: str = "base", **settings: Any) -> StoredReference:
    fields = {"prompt": WIKITEXT.read_text()[:2000], **CUT}
    own = {key: settings.pop(key) for key in [*settings] if key in ReferenceRequest.model_fields}
    return record(model, tokenizer, root, ReferenceRequest(name=name, **{**fields, **own}), **settings)


def tensors(reference: StoredReference) -> list[torch.Tensor]:
    windows = range(reference.manifest.text.num_windows)
    streams = (reference.read_stream(index, boundary) for index in windows for boundary in reference.boundaries)
    return [reference.read_head()[0], *(part for index in windows for part in reference.read_shard(index)), *streams]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_head_are_the_models_logits(checkpoints, tmp_path, family, dtype):
    model, tokenizer = load(checkpoints[family], dtype)
    reference = recorded(model, tokenizer, tmp_path)
    head, weight = reference.manifest.head, reference.read_head()[0].double()
    assert (head.scale, head.soft_cap, head.weight_dtype) == (*SCALES.get(family, (1.0, None)), "float32")
    own, nlls = load(checkpoints[family], torch.float64)[0], []
    for index in range(3):
        tokens, first = reference.text.window(index)
        expected = oracle.logits(own, tokens).log_softmax(-1)[first - 1 :]
        hidden_states, logprobs = reference.read_shard(index)
        logits = hidden_states.double() @ weight.T
        logits = logits if head.soft_cap is None else head.soft_cap * (logits / head.soft_cap).tanh()
        found = (head.scale * logits).log_softmax(-1)
        assert (found - expected).abs().max() < TOLERANCES[dtype]
        oracle.assert_close(logprobs.numpy(), oracle.logprobs(own, [tokens])[0][first - 1 :])
        nlls.append(-oracle.logprobs(own, [tokens])[0][first - 1 :])
    assert reference.manifest.result.perplexity == pytest.approx(np.exp(np.concatenate(nlls).mean()), rel=1e-5)
    computed_by = reference.manifest.model.computed_by
    assert computed_by.implementation.startswith("transformers 5")
    assert (computed_by.device, reference.manifest.model.dtype) == ("cpu", str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_are_what_layers_get_and_give(checkpoints, tmp_path, family):
    model, tokenizer = load(checkpoints[family])
    reference = recorded(model, tokenizer, tmp_path)
    parts, step = [[f"model.layers.{index}.{name}" for name in ("self_attn", "mlp")] for index in (0, 1)], 2
    if family == "norms after":
        parts, step = [[" + ".join(pair)] for pair in parts], 1
    assert [block.name for block in reference.manifest.layers.blocks] == [*parts[0], *parts[1]]
    assert reference.manifest.layers.floor == [0.0] * len(reference.boundaries)
    states = []
    with model.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0][0])):
        tokens = torch.tensor([reference.text.window(1)[0][:-1]])
        layers = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    for boundary, expected in zip(reference.boundaries[::step], [layers[0][0], layers[1][0], states[0]], strict=True):
        assert torch.equal(reference.read_stream(1, boundary), expected)


@pytest.mark.parametrize("method", ["sliding", "overlapping", "disjoint"])
async def test_windows_are_those_that_a_server_cuts(client, engine, checkpoints, tmp_path, method):
    cut = {"method": method, "stride": None if method == "disjoint" else 8}
    await record_on_server(client, **cut)
    model, tokenizer = load(checkpoints["tied"])
    reference = recorded(model, tokenizer, tmp_path / "other", **{**BODY, "max_tokens": None, **cut})
    theirs = engine.directory.open("base")
    for name, array in asdict(theirs.text).items():
        assert np.array_equal(array, getattr(reference.text, name))
    assert reference.manifest.text == theirs.manifest.text


def test_an_interrupted_recording_is_resumed(checkpoints, tmp_path):
    model, tokenizer = load(checkpoints["tied"])
    whole = recorded(model, tokenizer, tmp_path, "whole")
    lengths: list[int] = []

    def forward(token_ids: torch.Tensor) -> torch.Tensor:
        lengths.append(token_ids.numel())
        return model(token_ids).logits

    def interrupt(window: Any) -> None:
        if window.index == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorded(model, tokenizer, tmp_path, forward=forward, on_window=interrupt)
    begun = ReferenceDirectory(tmp_path).open("base")
    assert (begun.recorded_windows(), begun.manifest.result) == ({0, 1}, None)
    begun.stream(0, 1).unlink()
    windows, lengths[:] = [], []
    resumed = recorded(model, tokenizer, tmp_path, forward=forward, on_window=windows.append)
    # The first window, its beginning, and 7 sequences of that as checks; then the damaged window and the missing one.
    assert lengths == [63, 16, 7 * 16, 63, 63]
    assert [window.num_scored for window in windows] == [63] * 3
    assert resumed.manifest.result == whole.manifest.result
    assert all(map(torch.equal, tensors(resumed), tensors(whole)))


def test_a_model_that_accelerate_puts_on_disk_gives_the_same_reference(checkpoints, tmp_path):
    places = {"model.embed_tokens": "disk", "lm_head": "disk", "model.layers.0": "disk"}
    places |= dict.fromkeys(("model.layers.1", "model.norm", "model.rotary_emb"), "cpu")
    settings = {"device_map": places, "offload_folder": tmp_path / "offloaded"}
    in_memory, on_disk = (
        recorded(*load(checkpoints["tied"], **each), tmp_path, name)
        for name, each in (("memory", {}), ("disk", settings))
    )
    assert all(map(torch.equal, tensors(in_memory), tensors(on_disk)))
    assert in_memory.manifest.model.fingerprint == on_disk.manifest.model.fingerprint


def test_a_trainers_object_is_known_by_its_tensors(checkpoints, tmp_path):
    model, tokenizer = load(checkpoints["tied"])
    model.train()
    reference = recorded(model, tokenizer, tmp_path)
    assert model.training
    of_files = identity_of(model, tokenizer, str(checkpoints["tied"]))
    assert reference.manifest.model.fingerprint != of_files.fingerprint
    assert reference.manifest.model.tokenizer_fingerprint == of_files.tokenizer_fingerprint
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1e-3
    with pytest.raises(ConflictError, match="there is a reference 'base' already, of another model"):
        recorded(model, tokenizer, tmp_path)


def test_a_scaling_that_no_config_names_is_the_heads(checkpoints, tmp_path):
    model, tokenizer = load(checkpoints["tied"])
    reference = recorded(model, tokenizer, tmp_path, forward=lambda token_ids: -0.37 * model(token_ids).logits)
    assert reference.manifest.head.scale == pytest.approx(-0.37, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"context_length": 257}, WindowError, "windows of 257 tokens with method 'disjoint', but the model takes at"),
        ({"prompt": [5, 1024]}, RequestError, "token id 1024, outside the vocabulary of 1024"),
        ({"prompt": None, "messages": [{"role": "user", "content": "a"}]}, RequestError, "are recorded on a server"),
        (
            {"change": lambda logits: logits + logits**2},
            RequestError,
            "LlamaForCausalLM: its logits are not its LM head",
        ),
        (
            {"change": lambda logits: logits * torch.nan},
            RequestError,
            "LlamaForCausalLM: its logits are not its LM head",
        ),
        ({"change": lambda logits: logits[:, 1:]}, RequestError, "LM head is not called once, with one row per token"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_written(checkpoints, tmp_path, settings, error, message):
    model, tokenizer = load(checkpoints["tied"])
    if change := settings.pop("change", None):
        settings["forward"] = lambda token_ids: change(model(token_ids).logits)
    with pytest.raises(error, match=message):
        recorded(model, tokenizer, tmp_path, **settings)
    assert not [*tmp_path.iterdir()]


def test_an_attention_that_leaves_out_a_soft_cap_is_refused(checkpoints, tmp_path):
    with pytest.raises(RequestError, match="Gemma2ForCausalLM: the sdpa attention of transformers leaves"):
        recorded(*load(checkpoints["capped"], attn_implementation="sdpa"), tmp_path)


@pytest.mark.processes
def test_the_command_needs_no_vllm(checkpoints, tmp_path):
    code = "import sys; sys.modules['vllm'] = None; from scoremode_server.cli import main; main()"
    command = (sys.executable, "-c", code, "record-transformers", str(checkpoints["scaled"]), "--reference", "base")
    text = ("--reference-dir", str(tmp_path), "--text-file", str(WIKITEXT), "--context-length", "64")
    settings = ("--layers", "--max-tokens", "193", "--dtype", "float64", "--quiet")
    done = run([*command, *text, *settings], capture_output=True, text=True, check=True)
    assert "not quantized, float64 (stored in float32), computed by transformers 5" in done.stdout
    reference = ReferenceDirectory(tmp_path).open("base")
    assert reference.manifest.model.fingerprint.startswith("v2-")
    assert reference.manifest.corpus.name == "wikitext.txt"
    again = run([*command, *text, "--method", "sliding"], capture_output=True, text=True)
    assert (again.returncode, again.stderr.splitlines()[-1]) == (
        1,
        "scoremode: error: there is a reference 'base' already, of another model",
    )
