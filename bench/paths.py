"""Writes what bench/paths.sh measures.

    python bench/paths.py faults FOLDER
    python bench/paths.py mixtral|wide FOLDER
    python bench/paths.py scales MODEL COPY TEXT FOLDER
    python bench/paths.py lengths MODEL TEXT FOLDER [any vllm serve flag]
    python bench/paths.py suffixes MODEL TEXT FOLDER [any vllm serve flag]

faults    the package of tests/planted_fault.py, for PYTHONPATH
mixtral   a random Mixtral
wide      a random Llama with a hidden size of 4,096: up to 2,048, RMSNorm's blocks are the same for all steps
scales    MODEL's copy with scales of an FP8 KV cache: a layer's largest key and value in TEXT, before positions are
          embedded, over the largest FP8 number
lengths   a plan of paths for MODEL, and its text: documents of `LENGTHS` tokens
suffixes  a table: how far the logprobs of the last tokens of such documents are from those of the whole document in one
          step, if the first `CACHED` tokens come from the prefix cache; FOLDER gets the server's log
"""

import json
import sys
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from checkpoints import save_checkpoint
from quantized_oracle import DEVICE, LARGEST_FP8
from safetensors.torch import load_file
from servers import Server, starting
from tables import table
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig

sys.path.append(str(Path(__file__).parents[1]))

from scoremode import ScoreClient
from tests import models, planted_fault

LENGTHS = (200, 255, 256, 300)
EACH = range(0, 8 * 300, 300)
"""Where the documents of each length begin, in tokens."""
CACHED = 160


SIZES = {"vocab_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 2048}
RANDOM_MODELS = {
    "mixtral": MixtralConfig(
        **SIZES,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        # The usual 0.02 makes all tokens about equally likely.
        initializer_range=0.1,
    ),
    "wide": LlamaConfig(
        **SIZES, hidden_size=4096, intermediate_size=1024, num_attention_heads=32, num_key_value_heads=8
    ),
}


def write_random_model(name: str, folder: str) -> None:
    models.random_model_of(RANDOM_MODELS[name], Path(folder))


@torch.inference_mode()
def write_with_scales(model: str, copy: str, text: str, folder: str) -> None:
    tensors = load_file(Path(copy, "model.safetensors"))
    tokens = AutoTokenizer.from_pretrained(model)(Path(text).read_text()[:10_000], return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(DEVICE)
    outputs: dict[str, torch.Tensor] = {}
    for name, module in base.named_modules():
        if name.endswith((".k_proj", ".v_proj")):
            module.register_forward_hook(lambda _, __, output, name=name: outputs.__setitem__(name, output))
    base(tokens.to(DEVICE))
    for name, output in outputs.items():
        tensors[f"{name.removesuffix('_proj')}_scale"] = output.abs().amax().float().cpu()[None] / LARGEST_FP8
    config = json.loads(Path(copy, "config.json").read_text())["quantization_config"]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    Path(folder).mkdir(parents=True)
    save_checkpoint(Path(copy), Path(folder), tensors, {"quantization_config": config | {"kv_cache_scheme": scheme}})


def write_lengths(model: str, text: str, folder: str, *flags: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(Path(text).read_text()[:50_000])["input_ids"]
    rows = [
        {"text": document, "tokens": str(length)}
        for length in LENGTHS
        for start in EACH
        # A word that is cut may be tokenized in another way.
        if len(tokenizer(document := tokenizer.decode(tokens[start : start + length]))["input_ids"]) == length
    ]
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = {
        "output": "runs",
        "text": {"dataset": "./lengths.jsonl", "by": "tokens", "max_tokens": 8192},
        "windows": {"method": "sliding", "context_length": 512},
        "serve": flags,
        "models": [{"name": "model", "model": model}],
        "vary": {"flags": {"max-num-seqs": ["1"]}},
    }
    Path(folder, "plan.yaml").write_text(json.dumps(plan))


def compare_suffixes(model: str, text: str, folder: str, *flags: str) -> None:
    tokens = AutoTokenizer.from_pretrained(model)(Path(text).read_text()[:50_000])["input_ids"]
    Path(folder).mkdir(parents=True, exist_ok=True)
    servers, rows = {"suffixes": Server(Path(model), flags)}, []
    with starting(servers, Path(folder)) as futures, ScoreClient(futures["suffixes"].result().url) as client:
        for index, length in enumerate(LENGTHS):
            distances = list[float]()
            for start in EACH:
                # Documents that begin at the same token would find each other's blocks.
                document = tokens[start + index : start + index + length]
                [whole] = client.score([document], use_cache=False)
                client.score([document[: CACHED + 1]])
                [suffix] = client.score([document], logprobs_from=CACHED + 1)
                pair = np.array([whole.logprobs[CACHED + 1 :], suffix.logprobs], float)
                distances += np.abs(pair[0] - pair[1]).tolist()
            rows.append((str(length), str(len(distances)), f"{fmean(distances):.5f}", f"{max(distances):.4f}"))
    print(table(("tokens", "compared", "mean absolute", "largest"), rows))


if __name__ == "__main__":
    writers = {
        "faults": lambda folder: planted_fault.install(Path(folder)),
        **{name: partial(write_random_model, name) for name in RANDOM_MODELS},
        "scales": write_with_scales,
        "lengths": write_lengths,
        "suffixes": compare_suffixes,
    }
    writers[sys.argv[1]](*sys.argv[2:])
