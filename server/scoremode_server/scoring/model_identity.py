"""What tells one served model from another."""

import importlib.metadata
from hashlib import blake2b
from pathlib import Path
from typing import Any

import vllm
from vllm.config import ModelConfig

from scoremode_server.references.manifest import ModelIdentity


def model_identity(config: ModelConfig, tokenizer: Any) -> ModelIdentity:
    """The identity of the model of a server, whose tokenizer may be None."""
    dtype = str(config.dtype).removeprefix("torch.")
    return ModelIdentity(
        model=config.model,
        revision=config.revision,
        dtype=dtype,
        quantization=config.quantization,
        scoremode_version=importlib.metadata.version("scoremode"),
        vllm_version=vllm.__version__,
        fingerprint=_digest(config.model, config.revision, dtype, config.quantization, *_files(Path(config.model))),
        tokenizer_fingerprint=_digest(*_vocabulary(tokenizer)),
    )


def _files(folder: Path) -> list[Any]:
    """Of a model that is a folder, which may hold other weights another day: names and sizes."""
    if not folder.is_dir():
        return []
    return sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))


def _vocabulary(tokenizer: Any) -> list[Any]:
    return [] if tokenizer is None else sorted(tokenizer.get_vocab().items())


def _digest(*values: Any) -> str:
    return blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
