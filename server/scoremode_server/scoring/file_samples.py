"""A digest of large files in seconds: of sizes, headers and sample blocks. docs/guide.md lists what it cannot see."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xxhash import xxh3_128

BLOCK_BYTES = 4096
WHOLE_BYTES = 1 << 20
"""Files up to this size are read whole."""
MIN_BLOCKS = 64
MAX_SPACING = 64 << 20
"""Blocks are evenly spaced, at least `MIN_BLOCKS` per file, and at most this many bytes apart."""
MAX_TENSORS = 4096
"""The most tensors of a safetensors file of which a block is read, evenly chosen."""
_MAX_HEADER_BYTES = 100_000_000
"""The bound of the safetensors format."""
_NUM_THREADS = 16
"""Files that are read at once, because storage can be slow per block."""


def digest_of(files: Sequence[Path]) -> str:
    """A digest of the contents of files in this order, except for what lies between samples."""
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return xxh3_128(b"".join(threads.map(_digest, files))).hexdigest()


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        digest = xxh3_128(size.to_bytes(8))
        if size <= WHOLE_BYTES:
            digest.update(file.read())
            return digest.digest()
        header = _header(descriptor, size)
        digest.update(header)
        for position in sorted({*_evenly_spaced(size), *_of_tensors(header)}):
            digest.update(os.pread(descriptor, BLOCK_BYTES, position))
    return digest.digest()


def _evenly_spaced(size: int) -> Iterator[int]:
    """Positions of blocks, including the first and the last of a file."""
    num_blocks = max(MIN_BLOCKS, size // MAX_SPACING)
    return ((size - BLOCK_BYTES) * number // (num_blocks - 1) for number in range(num_blocks))


def _header(descriptor: int, size: int) -> bytes:
    """The header of a safetensors file with the eight bytes of its length; of other formats the beginning."""
    num_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    is_possible = num_bytes <= min(_MAX_HEADER_BYTES, size - 8)
    return os.pread(descriptor, 8 + num_bytes if is_possible else WHOLE_BYTES, 0)


def _of_tensors(header: bytes) -> Iterator[int]:
    """The middle of each tensor: an embedding begins with tokens that training does not change."""
    try:
        tensors = json.loads(header[8:])
        offsets = sorted(tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__")
        for begin, end in offsets[:: 1 + len(offsets) // (MAX_TENSORS + 1)]:
            yield len(header) + max(begin, (begin + end - BLOCK_BYTES) // 2)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # Another format.
        return
