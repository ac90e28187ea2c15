"""Arrays as the server sends them: little-endian numbers in base64."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.errors import ResponseError
from scoremode.wire.protocol import ROUNDING, ColumnArray, TopLogprobArrays


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The k most likely tokens of n positions, the most likely first: arrays of shape [n, k], log-probabilities in
    nats. The first position of a text has no context: its token ids are -1, its log-probabilities NaN."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.logprobs)


_RANGES = {
    **dict.fromkeys(("logprobs", "reference_logprobs"), (-np.inf, ROUNDING)),
    **dict.fromkeys(("kld", "reverse_kld"), (-ROUNDING, np.inf)),
    **dict.fromkeys(("acceptance", "reference_confidence"), (0, 1 + ROUNDING)),
    **dict.fromkeys(("ranks", "reference_ranks"), (1, np.inf)),
}
"""The least and the largest value that a position can have, by the names of `KldPositions`; token ids, and the numbers
of windows, are at least 0."""


def wrong_value(name: str, values: NDArray[Any]) -> str | None:
    """The first value of an array that is impossible, in words; None where there is none."""
    least, largest = _RANGES.get(name, (0, np.inf))
    wrong = values[~((values >= least) & (values <= largest))]
    if not len(wrong):
        return None
    return "NaN" if np.isnan(wrong[0]) else f"{wrong[0]} (not from {least:g} to {largest:g})"


def check_logprobs(name: str, logprobs: NDArray[np.float32]) -> None:
    """Check the logprobs of positions, of which only the first may have no context, and NaN."""
    later = logprobs[1:]
    num_right = int((later <= ROUNDING).sum())
    if num_right < later.size or (logprobs[:1] > ROUNDING).any():
        raise ResponseError(
            f"the server gave {num_right} {name} for the {later.size} after the first position; one is NaN or above 0"
        )


def decode_top_logprobs(sent: object) -> TopLogprobs:
    """The arrays of an answer, which are `TopLogprobArrays`."""
    top = TopLogprobs(*decode_arrays("top_logprobs", sent, token_ids="<i4", logprobs="<f4"))
    check_logprobs("top_logprobs", top.logprobs)
    return top


def decode_arrays(name: str, sent: object, **dtypes: str) -> list[NDArray[Any]]:
    """Arrays of one shape with two axes, by their names in a field of an answer."""
    match sent:
        case {"shape": [_, _] as shape, **arrays}:
            return [decode_array(name, arrays.get(part), dtype, shape) for part, dtype in dtypes.items()]
    raise ResponseError(f"the server's {name} are not in base64")


def encode_column(column: NDArray[Any]) -> ColumnArray:
    """A column of float32 or int32 as `decode_column` takes it."""
    dtype: Any = column.dtype.name
    return {"dtype": dtype, "shape": list(column.shape), "values": encode_array(column, column.dtype.str)}


def decode_column(name: str, sent: object) -> NDArray[Any]:
    """A column of an answer, which is a `ColumnArray`; `name` is its field."""
    match sent:
        case {"dtype": "float32" | "int32" as dtype, "shape": [_, *_] as shape, "values": values}:
            return decode_array(name, values, "<f4" if dtype == "float32" else "<i4", shape)
    raise ResponseError(f"the server's {name} are not in base64")


def encode_top_logprobs(token_ids: NDArray[Any], logprobs: NDArray[Any]) -> TopLogprobArrays:
    """The top tokens [n, k] at each position as `decode_top_logprobs` takes them."""
    ids, values = encode_array(token_ids, "<i4"), encode_array(logprobs, "<f4")
    return {"shape": list(token_ids.shape), "token_ids": ids, "logprobs": values}


def encode_array(array: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(array.astype(dtype).tobytes()).decode()


def decode_array(name: str, encoded: Any, dtype: str, shape: Sequence[int] = (-1,)) -> NDArray[Any]:
    """An array of an answer; `name` is its field."""
    try:
        values = np.frombuffer(base64.b64decode(encoded, validate=True), dtype)
    except (TypeError, ValueError) as error:
        raise ResponseError(f"the server's {name} are not {np.dtype(dtype).name} in base64: {error}") from error
    try:
        return values.reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise ResponseError(f"the server's {name} are not of shape {list(shape)}") from error
