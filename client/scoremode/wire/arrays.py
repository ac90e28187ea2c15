"""Encodes and decodes arrays as the server sends them: little-endian numbers in base64."""

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
    """The k most likely tokens of n positions, the top token first: arrays of shape [n, k], log-probabilities in nats.
    A text's first position has no context: its token ids are -1, its log-probabilities NaN."""

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
"""The smallest and largest valid values of an array, by its field name in `KldPositions`. Arrays that are not listed
have token ids, sizes or indices, all at least 0."""


def wrong_value(name: str, values: NDArray[Any]) -> str | None:
    """Describe the first invalid value of an array; None if all are valid."""
    least, largest = _RANGES.get(name, (0, np.inf))
    wrong = values[~((values >= least) & (values <= largest))]
    if not len(wrong):
        return None
    return "NaN" if np.isnan(wrong[0]) else f"{wrong[0]} (not from {least:g} to {largest:g})"


def check_logprobs(name: str, logprobs: NDArray[np.float32]) -> None:
    """Raise ResponseError if a logprob exceeds 0 by more than rounding, or is NaN. The first position may have NaN."""
    later = logprobs[1:]
    num_right = int((later <= ROUNDING).sum())
    if num_right < later.size or (logprobs[:1] > ROUNDING).any():
        raise ResponseError(
            f"one of the server's {name} is above 0, or NaN after the first position: {num_right} of the {later.size} "
            "there are valid"
        )


def decode_top_logprobs(sent: object) -> TopLogprobs:
    """Decode an answer's `TopLogprobArrays`."""
    top = TopLogprobs(*decode_arrays("top_logprobs", sent, token_ids="<i4", logprobs="<f4"))
    check_logprobs("top_logprobs", top.logprobs)
    return top


def decode_arrays(name: str, sent: object, **dtypes: str) -> list[NDArray[Any]]:
    """Decode two-dimensional arrays of one shape from the field `name` of an answer. `dtypes` maps the arrays' names in
    this field to their types."""
    match sent:
        case {"shape": [_, _] as shape, **arrays}:
            return [decode_array(name, arrays.get(part), dtype, shape) for part, dtype in dtypes.items()]
    raise ResponseError(f"the server's {name} are not in base64")


def encode_column(column: NDArray[Any]) -> ColumnArray:
    """Encode a column of float32 or int32 for `decode_column`."""
    dtype: Any = column.dtype.name
    return {"dtype": dtype, "shape": list(column.shape), "values": encode_array(column, column.dtype.str)}


def decode_column(name: str, sent: object) -> NDArray[Any]:
    """Decode an answer's `ColumnArray`; errors call it `name`."""
    match sent:
        case {"dtype": "float32" | "int32" as dtype, "shape": [_, *_] as shape, "values": values}:
            return decode_array(name, values, "<f4" if dtype == "float32" else "<i4", shape)
    raise ResponseError(f"the server's {name} are not in base64")


def encode_top_logprobs(token_ids: NDArray[Any], logprobs: NDArray[Any]) -> TopLogprobArrays:
    """Encode the top tokens [n, k] for `decode_top_logprobs`."""
    ids, values = encode_array(token_ids, "<i4"), encode_array(logprobs, "<f4")
    return {"shape": list(token_ids.shape), "token_ids": ids, "logprobs": values}


def encode_array(array: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(array.astype(dtype).tobytes()).decode()


def decode_array(name: str, encoded: Any, dtype: str, shape: Sequence[int] = (-1,)) -> NDArray[Any]:
    """Decode an array of an answer; errors call it `name`."""
    try:
        values = np.frombuffer(base64.b64decode(encoded, validate=True), dtype)
    except (TypeError, ValueError) as error:
        raise ResponseError(f"the server's {name} are not {np.dtype(dtype).name} in base64: {error}") from error
    try:
        return values.reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise ResponseError(f"the server's {name} are not of shape {list(shape)}") from error
