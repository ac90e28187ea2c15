"""Full-size models with nothing in them: a config.json and a filled-up tokenizer, for `--load-format dummy`.

Shapes are those of Qwen3 0.6B, Llama 3.2 1B, Llama 3.1 8B, Llama 3.1 70B and Qwen3 30B-A3B (`moe30b`).
"""

import json
import shutil
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # To try a benchmark out where there is no GPU.
    "tiny": {
        **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
    },
    "0.6b": {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "rms_norm_eps": 1e-6},
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
        **{"head_dim": 128, "tie_word_embeddings": True},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "1b": {
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "tie_word_embeddings": True},
    },
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "moe30b": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936},
        **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6},
        **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}

FORMATS: dict[str, dict[str, Any]] = {
    "w4a16": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": 128,
                    },
                }
            },
        }
    },
    # An LM head in FP8 alone.
    "fp8head": {
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["re:lm_head"],
                    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
                    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                }
            },
        },
    },
}
NAMES = [*SHAPES, *(f"{shape}-{quantized}" for quantized in FORMATS for shape in SHAPES)]


def write_shape(name: str, tokenizer: Path, folder: Path, **changes: Any) -> Path:
    """A model folder of the shape `name`, such as `8b`, `8b-w4a16` or `8b-fp8head`, with the tokenizer of another
    model, which gets as many tokens as the shape has."""
    size, _, quantized = name.partition("-")
    config = {**COMMON, **SHAPES[size], **(FORMATS[quantized] if quantized else {}), **changes}
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    model = folder / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copy(tokenizer / "tokenizer_config.json", model)
    filled = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = filled["model"]["vocab"]
    end = 1 + max([*vocabulary.values(), *(token["id"] for token in filled["added_tokens"])])
    # Tokens without a text would be alike, and alike tokens take answers more time.
    vocabulary |= {f"filler{token_id}": token_id for token_id in range(end, config["vocab_size"])}
    (model / "tokenizer.json").write_text(json.dumps(filled))
    return model
