"""What `/v1/kld` answers, as arrays, and how it is read from the wire."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from scoremode._arrays import TopLogprobs, decode_array, decode_top_logprobs
from scoremode.errors import ResponseError
from scoremode.kld import POSITION_DTYPES, KldPositions
from scoremode.protocol import KldResponse, KldStatistics, KldWindow

_WINDOW = TypeAdapter(KldWindow)
_RESPONSE = TypeAdapter(KldResponse)


@dataclass(frozen=True, slots=True, eq=False)
class KldWindowValues:
    """One window of a reference beside the served model."""

    index: int
    """Of the window in the reference, from 0."""
    positions: KldPositions
    top_logprobs: TopLogprobs | None = None
    """The served model's; when asked for."""
    reference_top_logprobs: TopLogprobs | None = None

    @property
    def num_scored(self) -> int:
        """Number of positions."""
        return len(self.positions)


@dataclass(frozen=True, slots=True, eq=False)
class KldResult:
    """Some windows of a reference beside the served model."""

    model: str
    reference: str
    fingerprint: str
    """Of the served model, as a reference has its own."""
    windows: tuple[int, int]
    """The first window, and the one after the last."""
    num_scored: int
    statistics: KldStatistics
    """Of the positions of these windows, by the server; `scoremode.kld.statistics` gives the same."""
    data: list[KldWindowValues]
    """In the order of windows."""


def parse_result(body: bytes) -> KldResult:
    """Read the body of a `POST /v1/kld` answer."""
    return _result(_RESPONSE.validate_json(body))


def result_of_event(event: object) -> KldResult:
    """Read the last event of a stream, which has no windows. Raises as `parse_result`."""
    return _result(_RESPONSE.validate_python(event))


def window_of_event(event: object) -> KldWindowValues:
    """Read the event of a window. Raises as `parse_result`."""
    return _window(_WINDOW.validate_python(event))


def decode_positions(fields: Mapping[str, Any]) -> KldPositions:
    """Arrays in base64, by the names of `KldPositions`, to arrays."""
    arrays = {name: decode_array(name, fields.get(name), dtype) for name, dtype in POSITION_DTYPES.items()}
    for name, array in arrays.items():
        if np.isnan(array).any():
            raise ResponseError(f"NaN in the server's {name}")
    try:
        return KldPositions(**arrays)
    except ValueError as error:
        raise ResponseError(f"the server's answer has {error}") from error


def encode_positions(positions: KldPositions) -> dict[str, str]:
    """The arrays in base64, as `decode_positions` takes them."""
    return {
        name: base64.b64encode(getattr(positions, name).astype(dtype).tobytes()).decode("ascii")
        for name, dtype in POSITION_DTYPES.items()
    }


def _result(response: KldResponse) -> KldResult:
    first, last = response["windows"]
    return KldResult(
        model=response["model"],
        reference=response["reference"],
        fingerprint=response["fingerprint"],
        windows=(first, last),
        num_scored=response["num_scored"],
        statistics=response["statistics"],
        data=[_window(window) for window in response.get("data", [])],
    )


def _window(window: KldWindow) -> KldWindowValues:
    positions = decode_positions(window)
    if len(positions) != window["num_scored"]:
        raise ResponseError(
            f"the server gave {len(positions)} positions for the {window['num_scored']} of window {window['index']}"
        )
    return KldWindowValues(
        window["index"],
        positions,
        decode_top_logprobs(window.get("top_logprobs")),
        decode_top_logprobs(window.get("reference_top_logprobs")),
    )
