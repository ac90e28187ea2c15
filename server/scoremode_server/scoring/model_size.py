"""The size of the served model: bytes of its weight files, and the number of weights. Downloads and reads no
weights."""

import copy
import json
import logging
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from vllm.config import LoadConfig, ModelConfig

_log = logging.getLogger(__name__)

_OF_ALL_FILES = "*.safetensors"
_OF_MISTRAL = "consolidated*.safetensors"
"""By default vLLM reads these if a repository has its weights twice."""
_PATTERNS = {
    "hf": _OF_ALL_FILES,
    "safetensors": _OF_ALL_FILES,
    "fastsafetensors": _OF_ALL_FILES,
    "instanttensor": _OF_ALL_FILES,
    "bitsandbytes": _OF_ALL_FILES,
    "mistral": _OF_MISTRAL,
}
"""By `--load-format`, the files that are read; `auto` is one of the two."""
_INDEX_FILES = {_OF_ALL_FILES: "model.safetensors.index.json", _OF_MISTRAL: "consolidated.safetensors.index.json"}


def weight_bytes(model: ModelConfig, load: LoadConfig) -> int | None:
    """Bytes of the files that vLLM loads: safetensors, or one GGUF file; None for other formats and remote storage."""
    path = Path(model.model)
    if path.is_file():
        return path.stat().st_size if path.suffix == ".gguf" else None
    folder = model_folder(model, load)
    if folder is None:
        return None
    return sum(file.stat().st_size for file in safetensors_files(folder, str(load.load_format))) or None


def model_folder(model: ModelConfig, load: LoadConfig) -> Path | None:
    """The folder of a model, its own or in the hub's cache, if there is one."""
    path = Path(model.model)
    return path if path.is_dir() else cached_snapshot(model.model, model.revision, load.download_dir)


def cached_snapshot(name: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder of a hub's model in a cache; the folder's name is the commit."""
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (OSError, ValueError):
        # Not a model of the hub, or its weights come from elsewhere.
        return None


def safetensors_files(folder: Path, load_format: str) -> list[Path]:
    """The files that vLLM loads, by name; empty if it loads other formats."""
    names = {path.name for path in folder.glob(_OF_ALL_FILES)}
    if load_format == "auto":
        load_format = "mistral" if any(fnmatch(name, _OF_MISTRAL) for name in names) else "hf"
    pattern = _PATTERNS.get(load_format)
    if pattern is None:
        return []
    names = {name for name in names if fnmatch(name, pattern)}
    index = folder / _INDEX_FILES[pattern]
    if index.is_file():
        names &= set(json.loads(index.read_text())["weight_map"].values())
    return [folder / name for name in sorted(names)]


def num_parameters(config: Any, trust_remote_code: bool) -> int | None:
    """The number of weights of the model that transformers makes of a config, without memory for them; None if
    transformers has no such model. Runs a repository's code only if it is trusted."""
    try:
        config = copy.deepcopy(config)
        # A quantized checkpoint has the weights of the model that it was made from.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        architecture = (config.architectures or ["no architecture"])[0]
        make: Any = getattr(transformers, architecture, None)
        with torch.device("meta"):
            if make is not None:
                model = make(config)
            elif trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
                model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
            else:
                raise ValueError(f"transformers has no {architecture}")
        return sum(int(parameter.numel()) for parameter in model.parameters())
    # Transformers may raise anything, and a server must start without this number.
    except Exception as error:
        _log.info("the number of weights is not known: %s", error)
        return None
