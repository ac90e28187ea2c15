"""The identity of the served model: a fingerprint of its files and settings."""

import asyncio
import importlib.metadata
import re
from glob import escape
from hashlib import blake2b
from pathlib import Path
from typing import Any

import vllm
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.logger import init_logger

from scoremode_server.references.manifest import ModelIdentity
from scoremode_server.scoring.file_samples import digest_of
from scoremode_server.scoring.model_size import cached_snapshot, model_folder, safetensors_files

# vLLM prints what loggers below its own write.
logger = init_logger("vllm.scoremode.model_identity")

_CONFIG_FILES = (
    *("config.json", "params.json", "adapter_config.json"),
    *("hf_quant_config.json", "quant_config.json", "quantize_config.json", "quantization_config.json"),
)
"""Configurations of models, adapters and quantizations that vLLM reads."""
_OTHER_WEIGHTS = {"pt": ["*.pt"], "npcache": ["*.bin"]}
"""By `--load-format`, the files that replace safetensors."""
_ANY_WEIGHTS = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors"]
"""Of all other formats: the first pattern that has files."""
_NOT_NEEDED = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
"""Files of training that vLLM does not load."""


_adapters: dict[str, tuple[Any, str]] = {}
"""The request and the digest of each adapter, by its name."""


def model_identity(config: VllmConfig, tokenizer: Any) -> ModelIdentity:
    """The identity of a server's model, whose tokenizer may be None. Reads its files, which takes seconds."""
    model, load = config.model_config, config.load_config
    dtype = str(model.dtype).removeprefix("torch.")
    folder = model_folder(model, load)
    return ModelIdentity(
        model=model.model,
        revision=_commit(folder) or model.revision,
        dtype=dtype,
        quantization=model.quantization,
        scoremode_version=importlib.metadata.version("scoremode"),
        vllm_version=vllm.__version__,
        fingerprint=_fingerprint(model, load, dtype, folder),
        tokenizer_fingerprint=_digest(*_vocabulary(tokenizer)),
        old_fingerprint=_digest(model.model, model.revision, dtype, model.quantization, *_sizes(Path(model.model))),
    )


async def with_adapter(fingerprint: str, lora: Any) -> str:
    """The fingerprint of a model with an adapter, a `LoRARequest` or None, whose files a thread reads once."""
    if lora is None:
        return fingerprint
    known = _adapters.get(lora.lora_name)
    # An adapter that is loaded again has another request, which compares equal because it has the same name.
    if known is None or known[0] is not lora:
        known = _adapters[lora.lora_name] = lora, await asyncio.to_thread(_adapter_digest, lora.lora_path)
    return f"{fingerprint}+{known[1]}"


def _adapter_digest(path: str) -> str:
    """A digest of an adapter's files in a folder or in the hub's cache, or of its path if they cannot be read."""
    folder = Path(path).expanduser()
    found = folder if folder.is_dir() else cached_snapshot(path, None, None)
    try:
        files = [] if found is None else [*_config_files(found), *sorted(found.glob("adapter_model.*"))]
        return digest_of(files) if files else _digest(path)
    except OSError as error:
        logger.warning("The fingerprint of the adapter %s does not see its weights: %s", path, error)
        return _digest(path)


def _fingerprint(model: ModelConfig, load: LoadConfig, dtype: str, folder: Path | None) -> str:
    dummy = load.load_format == "dummy"
    weights = [] if dummy else _weight_files(Path(model.model), folder, str(load.load_format))
    config_folder = Path(model.hf_config_path) if model.hf_config_path else folder
    configs = [] if config_folder is None else _config_files(config_folder)
    settings = [dtype, model.quantization, repr(model.quantization_config), _overrides(model.hf_overrides)]
    try:
        contents = [digest_of(configs), digest_of(weights)]
    except OSError as error:
        logger.warning("The fingerprint of the model does not see its weights: %s", error)
        weights, contents = [], []
    if not weights and not dummy:
        # From elsewhere, such as an object store.
        settings += [model.model, model.model_weights, _commit(folder) or model.revision]
    return ("v2-dummy-" if dummy else "v2-") + _digest(*settings, *contents)


def _weight_files(path: Path, folder: Path | None, load_format: str) -> list[Path]:
    """The files that vLLM loads, by name: of a folder, or all parts of a GGUF file."""
    if path.is_file():
        parts = re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", path.name)
        return sorted(path.parent.glob(f"{escape(parts[1])}-*{parts[2]}")) if parts else [path]
    if folder is None:
        return []
    if files := safetensors_files(folder, load_format):
        return files
    for pattern in _OTHER_WEIGHTS.get(load_format, _ANY_WEIGHTS):
        if files := sorted(file for file in folder.glob(pattern) if file.name not in _NOT_NEEDED):
            return files
    return []


def _config_files(folder: Path) -> list[Path]:
    return [path for name in _CONFIG_FILES if (path := folder / name).is_file()]


def _overrides(overrides: Any) -> str:
    """`--hf-overrides`, or its name if it is a function."""
    return repr(overrides) if isinstance(overrides, dict) else str(getattr(overrides, "__qualname__", None))


def _commit(folder: Path | None) -> str | None:
    return folder.name if folder is not None and folder.parent.name == "snapshots" else None


def _sizes(folder: Path) -> list[Any]:
    """The names and sizes of a folder's files, which old fingerprints contain."""
    if not folder.is_dir():
        return []
    return sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))


def _vocabulary(tokenizer: Any) -> list[Any]:
    return [] if tokenizer is None else sorted(tokenizer.get_vocab().items())


def _digest(*values: Any) -> str:
    return blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
