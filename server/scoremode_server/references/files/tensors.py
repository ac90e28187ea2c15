"""Files of tensors with a description and a checksum."""

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from xxhash import xxh3_128

DTYPES = {
    **{"U8": torch.uint8, "I16": torch.int16, "I32": torch.int32},
    **{"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
}
"""Dtypes that files may have, by their names in safetensors."""

_KEY = "scoremode"


class BrokenFileError(Exception):
    """A file is missing, cannot be read, or is not what was written; the message names it."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str | int]) -> None:
    """Write tensors and a description of them to a safetensors file, completely or not at all. Tensors must be on the
    CPU, contiguous, and of one of `DTYPES`."""
    with moving_into_place(path) as partial:
        try:
            save_file(dict(tensors), partial, {_KEY: _metadata(tensors, about)})
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error


@contextmanager
def moving_into_place(path: Path) -> Iterator[Path]:
    """Yield the path to write a file at, and move the file to `path` at the end. The first path is random, because
    writers on several hosts, or in containers, may have the same process id."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_tensors(path: Path, about: Mapping[str, str | int]) -> dict[str, torch.Tensor]:
    """Read the tensors of a file that `write_tensors` wrote. BrokenFileError if it is missing, cut short, changed, or
    has another description."""
    try:
        # Do not map the file into memory: if another host cut it short or removed it, this process would crash.
        with path.open("rb", buffering=0) as file:
            metadata, tensors = _parse(np.fromfile(file, np.uint8))
        actual = json.loads(metadata)["about"]
    except FileNotFoundError:
        raise BrokenFileError(f"{path} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise BrokenFileError(f"{path} is cut short or damaged: {error}") from None
    if actual != about:
        raise BrokenFileError(f"{path} belongs to something else: {actual}, not {about}")
    if metadata != _metadata(tensors, about):
        raise BrokenFileError(f"{path} was changed: its checksum does not match")
    return tensors


def _parse(content: np.ndarray) -> tuple[str, dict[str, torch.Tensor]]:
    """Split a safetensors file into our metadata and the tensors. Such a file has 8 bytes with the size of its header,
    the header (JSON and spaces), and the tensors."""
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    metadata, tensors = header.pop("__metadata__")[_KEY], {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        values = torch.from_numpy(content[start + first : start + end])
        tensors[name] = values.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return metadata, tensors


def _metadata(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str | int]) -> str:
    """Write the metadata as one text, because safetensors would write several texts in any order, and equal tensors
    must make equal files."""
    # The checksum detects damage, not forgery.
    checksum = xxh3_128(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        checksum.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return json.dumps({"about": dict(about), "checksum": checksum.hexdigest()}, sort_keys=True)
