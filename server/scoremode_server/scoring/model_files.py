"""Finds facts about the served model in its files: a fingerprint of their contents, their size, the number of weights.
Large files are sampled, which takes seconds; docs/http-api.md lists what samples cannot see. No file is downloaded."""

import asyncio
import copy
import importlib.metadata
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import escape
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from xxhash import xxh3_128

from scoremode.wire.protocol import ComputedBy
from scoremode_server.scoring.model_identity import ModelIdentity

# vLLM prints the messages of loggers below `vllm`.
logger = logging.getLogger("vllm.scoremode.model_files")

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes by their names in safetensors files."""
BLOCK_BYTES = 4096
WHOLE_BYTES = 1 << 20
"""Files up to this size are read whole."""
MIN_BLOCKS = 64
MAX_SPACING = 64 << 20
"""Larger files are sampled in evenly spaced blocks of `BLOCK_BYTES`: at least `MIN_BLOCKS` per file, and at least one
per this many bytes."""
MAX_TENSORS = 4096
"""Limit on a safetensors file's tensors whose middle block is read too. They are evenly chosen."""
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's limit on a file's header."""

_CONFIG_FILES = (
    *("config.json", "params.json", "adapter_config.json"),
    *("hf_quant_config.json", "quant_config.json", "quantize_config.json", "quantization_config.json"),
)
"""Configurations of models, adapters and quantizations that vLLM reads."""
_WEIGHTS = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors"]
"""A model's weights are the files that match the first pattern with any match. For some values of `--load-format`,
`_OTHER_WEIGHTS` has other patterns."""
_OTHER_WEIGHTS = {"mistral": ["consolidated*.safetensors"], "pt": ["*.pt"], "npcache": ["*.bin"], "dummy": []}
_NOT_NEEDED = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
"""Files from training, which vLLM does not load."""

_adapters: dict[str, tuple[Any, str]] = {}
"""The `LoRARequest` and the digest of the files of each adapter, by the adapter's name."""


def model_identity(
    config: Any,
    tokenizer: Any,
    computed_by: ComputedBy | None = None,
    stop_token_ids: list[int] | None = None,
    templates: list[Any] | None = None,
    vllm_version: str = "",
) -> ModelIdentity:
    """Make the identity of a model, given vLLM's `VllmConfig` of it, or the same fields. Reads the model's files, which
    takes seconds. `tokenizer` may be None."""
    model, load = config.model_config, config.load_config
    dtype = str(model.dtype).removeprefix("torch.")
    folder = model_folder(model.model, model.revision, load.download_dir)
    weights = weight_files(Path(model.model), folder, str(load.load_format))
    vocabulary = [] if tokenizer is None else sorted(tokenizer.get_vocab().items())
    return ModelIdentity(
        model=model.model,
        revision=_commit(folder) or model.revision,
        dtype=dtype,
        quantization=model.quantization,
        scoremode_version=importlib.metadata.version("scoremode"),
        vllm_version=vllm_version,
        fingerprint=_fingerprint(model, load, dtype, folder, weights),
        tokenizer_fingerprint=_digest(*vocabulary),
        computed_by=computed_by,
        stored_dtype=_stored_dtype(model, weights),
        weight_bytes=sum(file.stat().st_size for file in weights) or None,
        num_parameters=num_parameters(model.hf_config, model.trust_remote_code),
        stop_token_ids=stop_token_ids,
        chat_template_fingerprint=None if templates is None else _digest(*templates),
    )


async def with_adapter(fingerprint: str, lora: Any) -> str:
    """Make the fingerprint of a model with the adapter `lora`, a `LoRARequest` or None. A thread reads the adapter's
    files once."""
    if lora is None:
        return fingerprint
    cached = _adapters.get(lora.lora_name)
    # An adapter that is loaded again has another `LoRARequest`, which compares equal because it has the same name.
    if cached is None or cached[0] is not lora:
        cached = _adapters[lora.lora_name] = lora, await asyncio.to_thread(_adapter_digest, lora.lora_path)
    return f"{fingerprint}+{cached[1]}"


def _stored_dtype(model: Any, files: Sequence[Path]) -> str | None:
    """Find the dtype of most weights in safetensors files. For other files or dtypes it is the config's, which tools
    that convert weights do not update."""
    sizes = Counter[str]()
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    weight = tensors.get_slice(name)
                    sizes[weight.get_dtype()] += math.prod(weight.get_shape())
    configured = getattr(model.hf_text_config, "dtype", None)
    largest = max(sizes, key=lambda dtype: sizes[dtype], default="")
    return _DTYPES.get(largest, None if configured is None else str(configured).removeprefix("torch."))


def num_parameters(config: Any, trust_remote_code: bool) -> int | None:
    """Count the weights of the model that transformers makes from a config, without memory for them. None if
    transformers has no such model. Runs the repository's code only if it is trusted."""
    try:
        config = copy.deepcopy(config)
        # A quantized checkpoint has as many weights as the model that it was made from.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        architecture = config.architectures[0]
        is_trusted = trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
        with torch.device("meta"):
            if is_trusted and not hasattr(transformers, architecture):
                model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
            else:
                model = getattr(transformers, architecture)(config)
        return sum(int(parameter.numel()) for parameter in model.parameters())
    # Transformers may raise anything, and a server must start without this number.
    except Exception as error:
        logger.info("The number of weights is not known: %s", error)
        return None


def digest_of(files: Sequence[Path]) -> str:
    """Make a digest of the contents of files in this order, except for bytes between samples."""
    # Threads help if storage is slow for each block.
    with ThreadPoolExecutor(16) as threads:
        return xxh3_128(b"".join(threads.map(_file_digest, files))).hexdigest()


def _fingerprint(model: Any, load: Any, dtype: str, folder: Path | None, weights: Sequence[Path]) -> str:
    dummy = load.load_format == "dummy"
    configs = _config_files(Path(model.hf_config_path) if model.hf_config_path else folder)
    overrides: Any = model.hf_overrides
    # `hf_overrides` may be a function, which is identified by its name.
    overrides = repr(overrides) if isinstance(overrides, dict) else str(getattr(overrides, "__qualname__", None))
    settings = [dtype, model.quantization, repr(model.quantization_config), overrides]
    try:
        contents = [digest_of(configs), digest_of(weights)]
    except OSError as error:
        logger.warning("The fingerprint of the model does not cover its weights: %s", error)
        weights, contents = [], []
    if not weights and not dummy:
        # The weights are not in readable files: they may come from an object store.
        settings += [model.model, model.model_weights, _commit(folder) or model.revision]
    return ("v2-dummy-" if dummy else "v2-") + _digest(*settings, *contents)


def _adapter_digest(path: str) -> str:
    """Make a digest of an adapter's files in a folder or in the hub's cache, or of its path if there are no files."""
    folder = model_folder(path, None, None)
    files = [] if folder is None else [*_config_files(folder), *sorted(folder.glob("adapter_model.*"))]
    return digest_of(files) if files else _digest(path)


def model_folder(name: str, revision: str | None, cache: str | None) -> Path | None:
    """Find the folder of a model or an adapter: `name` itself, or the folder in the hub's cache, whose name is the
    commit."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (OSError, ValueError):
        # The hub's cache does not have it.
        return None


def weight_files(path: Path, folder: Path | None, load_format: str) -> list[Path]:
    """List the weight files that vLLM loads, sorted by name: files in a folder, or all parts of a GGUF file."""
    if path.is_file():
        parts = re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", path.name)
        return sorted(path.parent.glob(f"{escape(parts[1])}-*{parts[2]}")) if parts else [path]
    if folder is None:
        return []
    # If a repository has its weights twice, vLLM reads the consolidated files by default.
    if load_format == "auto" and any(folder.glob("consolidated*.safetensors")):
        load_format = "mistral"
    matches = (sorted(folder.glob(pattern)) for pattern in _OTHER_WEIGHTS.get(load_format, _WEIGHTS))
    files = next(filter(None, matches), [])
    index = folder / f"{'consolidated' if load_format == 'mistral' else 'model'}.safetensors.index.json"
    if index.is_file() and files and files[0].suffix == ".safetensors":
        named = set(json.loads(index.read_text())["weight_map"].values())
        return [file for file in files if file.name in named]
    return [file for file in files if file.name not in _NOT_NEEDED]


def _config_files(folder: Path | None) -> list[Path]:
    return [] if folder is None else [path for name in _CONFIG_FILES if (path := folder / name).is_file()]


def _commit(folder: Path | None) -> str | None:
    return folder.name if folder is not None and folder.parent.name == "snapshots" else None


def _digest(*values: Any) -> str:
    return blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        digest = xxh3_128(size.to_bytes(8))
        if size <= WHOLE_BYTES:
            digest.update(file.read())
            return digest.digest()
        # A safetensors file begins with the length of its header. Other formats most likely have a large number there.
        header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header = os.pread(descriptor, 8 + header_bytes if header_bytes <= _MAX_HEADER_BYTES else WHOLE_BYTES, 0)
        digest.update(header)
        num_blocks = max(MIN_BLOCKS, size // MAX_SPACING)
        evenly_spaced = ((size - BLOCK_BYTES) * number // (num_blocks - 1) for number in range(num_blocks))
        for position in sorted({*evenly_spaced, *_tensor_middles(header)}):
            digest.update(os.pread(descriptor, BLOCK_BYTES, position))
    return digest.digest()


def _tensor_middles(header: bytes) -> Iterator[int]:
    """Yield the positions of blocks in the middle of tensors: an embedding begins with tokens that training does not
    change."""
    try:
        tensors = json.loads(header[8:])
        offsets = sorted(tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__")
        for begin, end in offsets[:: 1 + len(offsets) // (MAX_TENSORS + 1)]:
            yield len(header) + max(begin, (begin + end - BLOCK_BYTES) // 2)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # The file has another format.
        return
