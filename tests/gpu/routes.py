"""An engine in process that records a random mixture's experts, and is forced to take its own and others.

    python -m tests.gpu.routes FAMILY [--dtype float32]

prints how far the engine is from itself with its own experts, and from transformers in float64 with others.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from scoremode_server.references.files.directory import StoredReference
from scoremode_server.settings import REFERENCE_VARIABLE, WORKER_EXTENSION
from tests import models, oracle
from tests.gpu.family import EXPERTS, FAMILIES, SIZES, family_engine
from tests.gpu.layers import LayeredEngine

GROUPS: dict[str, Any] = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
ROUTED: dict[str, Any] = {
    **{name: FAMILIES[name] for name in ("Mixtral", "Qwen3-MoE", "Qwen3-Next (linear attention)")},
    "gpt-oss (attention sinks)": FAMILIES["gpt-oss (attention sinks)"],
    "Qwen3-MoE (not normalized)": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=False),
    "DeepSeek-V2 (MLA, groups)": lambda: transformers.DeepseekV2Config(
        **SIZES
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None}
        | {"first_k_dense_replace": 1, "n_shared_experts": 1, "moe_intermediate_size": 256, "norm_topk_prob": False}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}
        | GROUPS
    ),
    "GLM-4.5 (sigmoid, groups)": lambda: transformers.Glm4MoeConfig(
        **SIZES
        | {"first_k_dense_replace": 1, "n_shared_experts": 1, "moe_intermediate_size": 256, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.0}
        | GROUPS
    ),
}
NUM_TEXTS = 4


def exact(family: str, model: PreTrainedModel, text: list[int], experts: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Logits [n - 1, vocabulary] with these experts [n - 1, routers, k], and what each router would have chosen."""
    is_normalized = getattr(model.config, "norm_topk_prob", True)
    scale = getattr(model.config, "routed_scaling_factor", 1.0)

    def weigh(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        weights = (logits.sigmoid() if "sigmoid" in family else logits.softmax(-1)).gather(1, chosen)
        return scale * (weights / weights.sum(1, keepdim=True) if is_normalized else weights)

    with torch.device(model.device), oracle.choosing_experts(model, experts.to(model.device), weigh) as chosen:
        logits = oracle.logits(model, text)
    return logits.cpu(), torch.stack(chosen, 1).cpu()


def same_sets(one: torch.Tensor, other: torch.Tensor) -> float:
    """The share of tokens and layers with the same set of experts."""
    return float((one.sort(-1).values == other.sort(-1).values).all(-1).double().mean())


def planted(reference: StoredReference, num_experts: int) -> list[torch.Tensor]:
    """Replace the reference's experts by random ones, for half of the tokens and layers."""
    generator, replaced = torch.Generator().manual_seed(7), []
    for index in range(NUM_TEXTS):
        own = reference.read_experts(index)
        other = torch.rand((*own.shape[:2], num_experts), generator=generator).argsort(-1)[..., : own.shape[2]]
        is_kept = torch.rand((*own.shape[:2], 1), generator=generator) < 0.5
        replaced.append(torch.where(is_kept, own, other.to(own.dtype)).contiguous())
        reference.write_experts(index, replaced[-1])
    return replaced


def result_of(family: str, path: Path, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    os.environ[REFERENCE_VARIABLE] = str(root)
    settings = {"dtype": options.dtype, "enforce_eager": True, "worker_extension_cls": WORKER_EXTENSION}
    layered = LayeredEngine(family_engine(family, path, **settings), root)
    if isinstance(described := layered.call("scoremode_describe_routes"), str):
        return {"refusal": described}
    routes = layered.routes()
    texts = np.random.default_rng(5).integers(3, 4000, (NUM_TEXTS, options.length)).tolist()
    reference = layered.record("own", texts, routes)
    plain = layered.kld(reference, [(index, None) for index in range(NUM_TEXTS)])
    own, forced = layered.routed(reference, forced=False), layered.routed(reference, forced=True)
    recorded = [reference.read_experts(index) for index in range(NUM_TEXTS)]
    replaced = planted(reference, routes.num_experts)
    others = layered.routed(reference, forced=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Grouped and fused kernels do not compute in float64.
    settings = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **settings).to(device).eval()
    same, errors, divergences = [], [], []
    for text, base_experts, experts, rows in zip(texts, recorded, replaced, others, strict=True):
        base_logits, chosen = exact(family, model, text, base_experts)
        other_logits, _ = exact(family, model, text, experts)
        divergence = oracle.divergence(base_logits, other_logits, text)
        same.append(same_sets(base_experts.long(), chosen))
        errors.append(np.abs(rows.column("kld") - divergence.kld).mean())
        divergences.append(divergence.kld.mean())
    return {
        "routes": [len(routes.layers), routes.num_experts, routes.top_k],
        "same as transformers": float(np.mean(same)),
        "own": max(float(np.abs(rows.column("kld") - kld).max()) for rows, kld in zip(own, plain, strict=True)),
        "forced": max(float(np.abs(rows.column("kld") - kld).max()) for rows, kld in zip(forced, plain, strict=True)),
        "others": float(np.mean(divergences)),
        "error": float(np.mean(errors)),
    }


def main() -> None:
    """Make a random model of a family, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("family", choices=ROUTED)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=257)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = models.random_model_of(ROUTED[options.family](), Path(folder) / "model")
        print(json.dumps(result_of(options.family, path, Path(folder) / "references", options)), flush=True)


if __name__ == "__main__":
    main()
