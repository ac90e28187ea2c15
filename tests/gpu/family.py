"""A random small model of a family, scored by vLLM in process and by transformers; prints one line of JSON.

    python -m tests.gpu.family NAME [--eager] [--dtype float32]

vLLM computes in the given type. The yardstick is how far transformers is from itself in float32 when it computes in
bfloat16: a wrong row, mask or scale is tenths of a nat away, where rounding is hundredths.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig
from vllm import LLM

from scoremode_server import score
from tests import models, oracle
from tests.gpu.lanes import distances, engine_of

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    # The usual 0.02 makes all tokens about equally likely.
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 1024,
    "truncate": False,
}
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 64, "sliding_window": 128, "tie_word_embeddings": True}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "Llama": lambda: transformers.LlamaConfig(**SIZES),
    "Gemma 2 (soft-capped logits)": lambda: transformers.Gemma2Config(**SIZES | GEMMA),
    "Gemma 3 (262,144 tokens, sliding windows)": lambda: transformers.Gemma3TextConfig(
        **SIZES | GEMMA | {"vocab_size": 262_144}
    ),
    "Mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "DeepSeek-V2 (MLA)": lambda: transformers.DeepseekV2Config(
        **SIZES
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
        | {"kv_lora_rank": 512, "q_lora_rank": None, "first_k_dense_replace": 1, "n_routed_experts": 8}
        | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    ),
    "Qwen3-Next (linear attention)": lambda: transformers.Qwen3NextConfig(
        **SIZES
        | {"head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | EXPERTS
        | {"shared_expert_intermediate_size": 256}
    ),
    "Falcon-H1 (Mamba hybrid)": lambda: transformers.FalconH1Config(
        **SIZES, mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=64
    ),
    "gpt-oss (attention sinks)": lambda: transformers.GptOssConfig(
        **SIZES
        | {"num_attention_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}
        | {"rope_parameters": YARN}
    ),
}

LENGTHS = (2, 3, 15, 16, 17, 33, 127, 128, 129, 200, 512, 700)


def sequences(vocab_size: int) -> list[list[int]]:
    """Some that begin alike, in and after a block of keys and values, and some of their own."""
    random = np.random.default_rng(5)
    common = random.integers(3, vocab_size, max(LENGTHS)).tolist()
    own = [random.integers(3, vocab_size, length).tolist() for length in LENGTHS]
    return [*own, *(common[: length - 1] + tokens[-1:] for length, tokens in zip(LENGTHS, own, strict=True))]


def by_transformers(path: Path, dtype: torch.dtype, prompts: Sequence[list[int]]) -> np.ndarray:
    """Logprobs of every token but each first, float64 from logits in `dtype`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Fused attention knows neither soft caps nor sinks.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").to(device).eval()
    with torch.device(device):
        return np.concatenate(oracle.logprobs(model, prompts))


def family_engine(family: str, path: Path, **settings: Any) -> LLM:
    """An engine of a model of a family."""
    backend = {"gdn_prefill_backend": "triton"} if "linear attention" in family else {}
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 2**30}
    return engine_of(path, **sizes, **backend, **settings)


def by_vllm(path: Path, options: argparse.Namespace, prompts: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The same by the engine: all prompts at once, then one at a time with what the prefix cache holds by then."""
    engine = family_engine(options.family, path, dtype=options.dtype, enforce_eager=options.eager)
    together = score(engine, prompts)
    alone = [score(engine, [tokens])[0] for tokens in prompts]
    return tuple(np.concatenate([one.logprobs[1:] for one in scores]) for scores in (together, alone))


def main() -> None:
    """Make the model, score it in every way, print the distances."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = models.random_model_of(FAMILIES[options.family](), Path(folder))
        prompts = sequences(4096)
        exact = by_transformers(path, torch.float32, prompts)
        own = by_transformers(path, torch.bfloat16, prompts)
        together, alone = by_vllm(path, options, prompts)
    found = {"own": own, "together": together, "alone": alone}
    print(json.dumps({name: distances(each, exact) for name, each in found.items()}))


if __name__ == "__main__":
    main()
