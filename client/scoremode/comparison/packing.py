"""Arrays as JSON: base64 of 16 bits a value where those say as much as anybody reads, of 32 where not."""

import base64
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

_KLD_SCALE = 512
"""Takes KL divergences from 1e-7 to 127 nats to where float16 has all of its 11 bits."""
_LARGEST_HALF = 65_504
_INFINITE = 65_535
"""Of fixed-point values."""


class Packed(TypedDict):
    """Little-endian values in base64. They stand for `values * scale`; in `uint16` with a scale, 65,535 is infinity."""

    type: str
    scale: float | None
    data: str


def pack_integers(values: NDArray[Any]) -> Packed:
    """Exactly, in 16 bits where all values fit: none of them is negative."""
    dtype = "uint16" if len(values) == 0 or values.max() < 2**16 else "int32"
    return _packed(values, dtype, None)


def pack_fixed(values: NDArray[np.float64], largest: float) -> Packed:
    """NLLs or probabilities to a 65,534th of the largest, which series have in common whose differences are shown."""
    finite = np.isfinite(values)
    scale = largest / (_INFINITE - 1) or 1.0
    return _packed(np.where(finite, np.rint(np.where(finite, values, 0) / scale), _INFINITE), "uint16", scale)


def pack_klds(values: NDArray[np.float64]) -> Packed:
    """KL divergences to 11 bits each, because their sizes differ by many powers of ten."""
    scaled = np.where(np.isfinite(values), np.minimum(values * _KLD_SCALE, _LARGEST_HALF), np.inf)
    return _packed(scaled, "float16", 1 / _KLD_SCALE)


def pack_floats(values: NDArray[np.float64]) -> Packed:
    """To the 24 bits of float32."""
    return _packed(values, "float32", None)


def packed_bytes(packed: Packed) -> float:
    """What each value takes in a file."""
    return np.dtype(packed["type"]).itemsize * 4 / 3


def _packed(values: NDArray[Any], dtype: str, scale: float | None) -> Packed:
    content = np.ascontiguousarray(values.astype(np.dtype(dtype).newbyteorder("<"))).tobytes()
    return {"type": dtype, "scale": scale, "data": base64.b64encode(content).decode("ascii")}
