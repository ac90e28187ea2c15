"""Plans which servers of a sweep run at once: those that fit the GPU together.

Each gets its share of the memory in flags. If a flag sets the size of the KV cache, vLLM measures no memory, so it does
not count other servers' memory as its own. Shares add up to less than what is free, so each server finds its share free
when it checks. Therefore all phases of the starts may overlap.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from scoremode.sweep.plan import flag_value

_WORKING_BYTES = 6 * 1024**3
"""Memory of a server in addition to weights and KV cache: the CUDA context, activations, CUDA graphs, logits, and the
reference's LM head."""
_LOADED = 1.1
"""Bytes of loaded weights per byte of the files: kernels pad and repack weights."""
_CACHED_TOKENS = 32_768
"""A smaller KV cache slows scoring down."""
_LEFT_FREE = 0.08
"""The share of all memory that no server gets; vLLM's default leaves as much."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU's memory in bytes, as CUDA counts it."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Needs:
    """The least memory of a server, in bytes."""

    share: float = 0.0
    """All of it; infinite for a server that runs alone."""
    cache: float = 0.0
    """The KV cache, a part of it."""
    is_fixed: bool = False
    """Whether the server's own flags set one of these. It then gets no more than its needs."""


ALONE = Needs(inf)


def weight_bytes(model: Path) -> int:
    """The size of a checkpoint's weights on disk; 0 if it is not a folder with safetensors, or one of them is a link to
    a file that is missing."""
    files = [*model.glob("*.safetensors")]
    return sum(file.stat().st_size for file in files) if all(file.exists() for file in files) else 0


def model_folder(model: str, folder: Path) -> Path:
    """The folder of a model that is a name in the cache of Hugging Face's hub, or a path relative to `folder`."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    snapshots = hub.glob(f"models--{model.replace('/', '--')}/snapshots/*")
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=folder / model)


def needs(model: Path, flags: Sequence[str], device: Device | None) -> Needs:
    """Estimate the needs of a server with these flags: none without a device, and `ALONE` if a flag or a file of the
    model cannot be read."""
    if device is None:
        return Needs()
    weights = weight_bytes(model)
    # On a GPU, vLLM's default is 16 bits, whatever the files have.
    value_bytes = 4 if re.search(r"(?<!\S)--dtype[ =]float(32)?(?!\S)", " ".join(flags)) else 2
    other = weights * _LOADED * value_bytes / 2 + _WORKING_BYTES
    try:
        utilization = flag_value(flags, "gpu-memory-utilization")
        own_cache = flag_value(flags, "kv-cache-memory(?:-bytes)?")
        cache = own_cache or (
            utilization * device.total - other if utilization else _least_cache(model, flags, value_bytes)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return ALONE
    share = max(other + cache, (utilization or 0.0) * device.total)
    return Needs(share, cache, bool(utilization or own_cache)) if weights and cache > 0 else ALONE


def _least_cache(model: Path, flags: Sequence[str], value_bytes: int) -> float:
    """The KV cache of one whole context, or of `_CACHED_TOKENS` if that is more. KeyError if config.json does not say
    how large a token is."""
    config = json.loads((model / "config.json").read_text())
    config |= config.get("text_config", {})
    num_heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // num_heads
    per_token = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or num_heads) * size
    context = flag_value(flags, "max-model-len") or config["max_position_embeddings"]
    return float(max(context, _CACHED_TOKENS) * per_token * value_bytes)


def plan_groups(
    models: Mapping[str, Needs], device: Device | None, at_once: int | None
) -> list[dict[str, Sequence[str]]]:
    """Divide servers into groups that run at once, in order: at most `at_once`, and as many as fit the device. The
    default is one server per two cores, and 1 without a device. For each server in a group, gives the flags that set
    its memory."""
    # A start keeps more than one core busy.
    limit = at_once or (1 if device is None else max(2, len(os.sched_getaffinity(0)) // 2))
    budget = 2.0**62 if device is None else device.free - _LEFT_FREE * device.total
    groups: list[dict[str, Needs]] = []
    for name, each in models.items():
        joined = {**groups[-1], name: each} if groups else {}
        if joined and len(joined) <= limit and sum(member.share for member in joined.values()) <= budget:
            groups[-1] = joined
        else:
            groups.append({name: each})
    return [
        dict.fromkeys(group, ()) if device is None or len(group) == 1 else _memory_flags(group, budget, device.total)
        for group in groups
    ]


def _memory_flags(group: Mapping[str, Needs], budget: float, total: int) -> dict[str, Sequence[str]]:
    """Set the memory of each server. Half of what is left over is for KV caches, half for what servers need beyond the
    estimate."""
    num_growing = sum(not each.is_fixed for each in group.values())
    left_over, flags = budget - sum(each.share for each in group.values()), dict[str, Sequence[str]]()
    for name, each in group.items():
        more = 0.0 if each.is_fixed else left_over / num_growing
        share, cache = (each.share + more) / total, int(each.cache + more / 2)
        flags[name] = ("--gpu-memory-utilization", f"{share:.4f}", "--kv-cache-memory-bytes", str(cache))
    return flags
