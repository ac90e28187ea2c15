"""Runs that nobody measured: files as `ppl-client kld --output` writes them, of any length, from a seed.

Values look like those of quantized models, so that plots and reports of them do too. They say nothing of any model.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

NUM_PARAMETERS = 134_515_008
NOISE_FLOOR = 3e-6
_TIMES = "2026-11-22T12:00:00+00:00"
_WORDS = [
    *("the", "of", "and", "in", "to", "a", "was", "is", "for", "on", "as", "with", "by", "at", "from", "his", "that"),
    *("it", "were", "an", "are", "which", "this", "had", "be", "has", "also", "first", "their", "its", "one", "new"),
    *("who", "time", "two", "after", "other", "out", "year", "city", "war", "state", "game", "music", "film", "river"),
]


@dataclass(frozen=True, slots=True)
class MadeUpModel:
    """A model that is not there."""

    name: str
    bits: float
    """Bits per weight."""
    damage: float
    """Its mean KL divergence from the reference, nats, or nearly."""


MODELS = (
    MadeUpModel("BF16", 16.0, 0.0),
    MadeUpModel("W8A8-INT8", 8.1, 0.0021),
    MadeUpModel("Q6_K", 6.6, 0.0034),
    MadeUpModel("GPTQ-4bit-128g", 4.4, 0.043),
    MadeUpModel("AWQ-4bit", 4.25, 0.031),
    MadeUpModel("RTN-3bit", 3.5, 0.29),
)


def token_texts(vocab_size: int) -> dict[int, str]:
    """Words with a space before them, some of them numbered, and a line break."""
    texts = {index: f" {_WORDS[index % len(_WORDS)]}" + (str(index) if index >= len(_WORDS) else "") for index in
             range(vocab_size)}  # fmt: skip
    return {**texts, 7: "\n"}


def reference_arrays(num_tokens: int, vocab_size: int, seed: int) -> dict[str, NDArray[Any]]:
    """What all runs share: tokens, and what the reference says of them. Passages are easy or hard, as in a text."""
    random = np.random.default_rng(seed)
    ids = np.minimum(random.zipf(1.3, num_tokens), vocab_size) - 1
    hardness = np.repeat(random.gamma(4, 0.25, num_tokens // 64 + 1), 64)[:num_tokens]
    nll = random.exponential(2.6, num_tokens) * hardness
    likely = np.exp(-nll) > 0.5
    tops = np.where(likely, ids, random.integers(0, vocab_size, num_tokens))
    confidence = np.where(likely, np.exp(-nll), random.beta(1.2, 2.5, num_tokens))
    return {
        "token_ids": ids.astype(np.int32),
        "reference_logprobs": -nll.astype(np.float32),
        "reference_ranks": np.where(likely, 1, 2 + np.expm1(np.minimum(nll, 9)) * 3).astype(np.int32),
        "reference_top_token_ids": tops.astype(np.int32),
        "reference_confidence": confidence.astype(np.float32),
    }


def run_arrays(model: MadeUpModel, reference: dict[str, NDArray[Any]], vocab_size: int, seed: int) -> dict[str, Any]:
    """The arrays of a run of the model. One without damage has zeros, and noise as large as the floor."""
    random = np.random.default_rng(seed)
    num_tokens = len(reference["token_ids"])
    confidence, nll = reference["reference_confidence"], -reference["reference_logprobs"].astype(np.float64)
    damage = model.damage * (1.4 - confidence)
    kld = random.lognormal(-0.8, 1.25, num_tokens) * damage
    if not model.damage:
        kld = np.where(random.random(num_tokens) < 0.4, 0, random.lognormal(-0.5, 1, num_tokens) * NOISE_FLOOR)
    nll = np.abs(nll + random.normal(0, 1, num_tokens) * np.sqrt(kld) + 0.8 * kld)
    flips = random.random(num_tokens) < np.sqrt(kld) * (1 - confidence) / 2
    tops = reference["reference_top_token_ids"]
    return {
        **reference,
        "kld": kld.astype(np.float32),
        "reverse_kld": (kld * 1.1).astype(np.float32),
        "acceptance": np.exp(-np.sqrt(kld)).astype(np.float32),
        "logprobs": -nll.astype(np.float32),
        "ranks": np.where(np.exp(-nll) > 0.5, 1, 2 + np.expm1(np.minimum(nll, 9)) * 3).astype(np.int32),
        "top_token_ids": np.where(flips, random.integers(0, vocab_size, num_tokens), tops).astype(np.int32),
    }


def record(model: MadeUpModel, num_tokens: int, num_windows: int, context_length: int) -> dict[str, Any]:
    """The JSON of a run, without its statistics."""
    return {
        "kind": "kld",
        "version": 1,
        "client_version": "0.1.0",
        "finished": _TIMES,
        "urls": ["http://localhost:8000"],
        "model": model.name,
        "server": {
            "object": "score.info",
            "scoremode_version": "0.1.0",
            "vllm_version": "0.32.0",
            "model": model.name,
            "max_model_len": 2048,
            "vocab_size": 49152,
            "max_top_logprobs": 20,
            "bos_token_id": None,
            "eos_token_id": 2,
            "adds_bos": False,
            "dtype": "bfloat16",
            "quantization": None if model.bits == 16 else "compressed-tensors",
            "fingerprint": hashlib.sha256(model.name.encode()).hexdigest()[:32],
            "num_parameters": NUM_PARAMETERS,
            "weight_bytes": int(NUM_PARAMETERS * model.bits / 8),
        },
        "reference": {
            "object": "reference",
            "name": "base-made-up",
            "created": 1_795_346_504,
            "complete": True,
            "model": MODELS[0].name,
            "revision": None,
            "dtype": "bfloat16",
            "quantization": None,
            "scoremode_version": "0.1.0",
            "vllm_version": "0.32.0",
            "vocab_size": 49152,
            "fingerprint": "a2e09922ac81e5c7c69331d6c4bfad08",
            "text_fingerprint": "90a00a55b8f0bb8b57e296418f67518e",
            "method": "sliding",
            "context_length": context_length,
            "stride": context_length // 4,
            "num_tokens": num_tokens + 1,
            "num_windows": num_windows,
            "num_recorded": num_windows,
            "num_scored": num_tokens,
            "num_bytes": num_tokens * 4,
            "num_words": num_tokens,
            "disk_bytes": 1,
            "perplexity": 13.0,
            "perplexity_stderr": 0.2,
            "nll_mean": 2.6,
            "noise_floor": {
                "mean": NOISE_FLOOR,
                "p99": 8 * NOISE_FLOOR,
                "max": 50 * NOISE_FLOOR,
                "num_scored": num_tokens,
                "created": 1_795_346_521,
            },
        },
        "settings": {"concurrency": 8, "as_noise_floor": False},
        "statistics": {},
        "kld_over_noise_floor": None,
        "most_divergent": [],
        "seconds": 1.0,
        "positions_per_second": float(num_tokens),
    }


def write_runs(
    folder: Path, num_tokens: int, *, models: tuple[MadeUpModel, ...] = MODELS, vocab_size: int = 40_000,
    context_length: int = 2048, seed: int = 1,
) -> list[Path]:  # fmt: skip
    """Write a run of each model over the same tokens, and return the JSON files."""
    reference = reference_arrays(num_tokens, vocab_size, seed)
    stride = context_length // 4
    sizes = np.full(-(-num_tokens // stride), stride, np.int32)
    sizes[-1] -= sizes.sum() - num_tokens
    texts = token_texts(vocab_size)
    paths = []
    for index, model in enumerate(models):
        arrays = run_arrays(model, reference, vocab_size, seed + 1 + index)
        content = save({**arrays, "window_sizes": sizes})
        described = {"file": f"{model.name}.safetensors", "sha256": hashlib.sha256(content).hexdigest()}
        (folder / described["file"]).write_bytes(content)
        path = folder / f"{model.name}.json"
        used = np.unique(np.concatenate([arrays[name] for name in ("token_ids", "top_token_ids",
                                                                   "reference_top_token_ids")]))  # fmt: skip
        full = record(model, num_tokens, len(sizes), context_length) | {
            "arrays": described,
            "token_texts": {str(token): texts[int(token)] for token in used},
        }
        path.write_text(json.dumps(full))
        paths.append(path)
    return paths
