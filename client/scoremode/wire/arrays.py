"""Arrays as the server sends them: little-endian numbers in base64."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.errors import ResponseError
from scoremode.wire.protocol import TopLogprobArrays


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The k most likely tokens of n positions, the most likely first: arrays of shape [n, k], log-probabilities in
    nats. The first position of a text has no context: its token ids are -1, its log-probabilities NaN."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


def decode_top_logprobs(sent: object) -> TopLogprobs | None:
    """The arrays of an answer, which are `TopLogprobArrays`; None where there are none."""
    return None if sent is None else TopLogprobs(*decode_arrays("top_logprobs", sent, token_ids="<i4", logprobs="<f4"))


def decode_arrays(name: str, sent: object, **dtypes: str) -> list[NDArray[Any]]:
    """Arrays of one shape, by their names in a field of an answer."""
    match sent:
        case {"shape": list(shape), **arrays}:
            return [decode_array(name, arrays.get(part), dtype, shape) for part, dtype in dtypes.items()]
    raise ResponseError(f"the server's {name} are not in base64")


def encode_top_logprobs(token_ids: NDArray[Any], logprobs: NDArray[Any]) -> TopLogprobArrays:
    """The top tokens [n, k] at each position as `decode_top_logprobs` takes them."""
    ids, values = encode_array(token_ids, "<i4"), encode_array(logprobs, "<f4")
    return {"shape": list(token_ids.shape), "token_ids": ids, "logprobs": values}


def encode_array(array: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(array.astype(dtype).tobytes()).decode()


def decode_array(name: str, encoded: object, dtype: str, shape: Sequence[int] | None = None) -> NDArray[Any]:
    """An array of an answer; `name` is its field."""
    if not isinstance(encoded, str):
        raise ResponseError(f"the server's {name} are not in base64")
    try:
        values = np.frombuffer(base64.b64decode(encoded, validate=True), dtype)
    except (binascii.Error, ValueError) as error:
        raise ResponseError(f"the server's {name} are not {np.dtype(dtype).name} in base64: {error}") from error
    if shape is None:
        return values
    try:
        return values.reshape(shape)
    except (TypeError, ValueError) as error:
        raise ResponseError(f"the server's {name} are not of shape {list(shape)}") from error
