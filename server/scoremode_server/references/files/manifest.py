"""`manifest.json` of a reference: the fields of `Manifest`, and a `checksum` of them."""

import json
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from scoremode.windows import Method
from scoremode.wire.protocol import Figure, Lane, TextInWindows
from scoremode.wire.references import KeptWithReference, NoiseFloor
from scoremode_server.scoring.model_identity import ModelIdentity

FORMAT_VERSION = 2
"""Increased when an older server would misread a reference."""

_CHECKSUM = "checksum"

HeadDtype = Literal["float32", "float16", "bfloat16"]


class HeadFormat(BaseModel):
    """How hidden states become logits: scale * cap(hidden · weightᵀ + bias), where cap(x) = soft_cap * tanh(x /
    soft_cap)."""

    model_config = ConfigDict(frozen=True)

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    weight_dtype: HeadDtype
    """The dtype of weight, bias and hidden states."""
    head_dtype: HeadDtype
    """The dtype of logits."""
    has_bias: bool
    scale: float
    soft_cap: float | None


class TextPlan(TextInWindows):
    model_config = ConfigDict(frozen=True)

    fingerprint: str
    labels: list[str] = Field([])
    """Labels of the documents. `StoredText.origins` refers to labels and `roles` by index."""
    roles: list[str] = Field([])


class Result(BaseModel):
    """Perplexity over all windows; NLLs in nats."""

    perplexity: Figure
    perplexity_stderr: float | None
    nll_mean: float


class Manifest(KeptWithReference):
    """All fields of the file but its checksum. `identity` is also written into every safetensors file of the
    reference."""

    format_version: int = FORMAT_VERSION
    identity: str
    model: ModelIdentity
    head: HeadFormat
    """The format of the LM head, whose weights are on disk if there is a result."""
    text: TextPlan
    result: Result | None = None
    """None until all windows are on disk."""

    def noise_floor_changes(self, lane: Lane, floor: NoiseFloor) -> dict[str, Any]:
        """The fields that change when a lane's noise floor is stored."""
        lane_floors = {"lane_noise_floors": {**self.lane_noise_floors, lane: floor}}
        return {"noise_floor": floor} if lane == "prefill" else lane_floors

    def to_json(self) -> str:
        fields = self.model_dump(mode="json")
        return json.dumps({**fields, _CHECKSUM: _checksum(fields)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read what `to_json` wrote. ValueError if it was changed or has another version."""
        fields = from_json(text)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        version = fields.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"it has format version {version}, and this server reads {FORMAT_VERSION}")
        if fields.pop(_CHECKSUM, None) != _checksum(fields):
            raise ValueError("it was changed: its checksum does not match")
        return cls.model_validate(fields)


def _checksum(fields: dict[str, Any]) -> str:
    return blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def text_fingerprint(token_ids: np.ndarray, windows: np.ndarray, method: Method) -> str:
    """A digest of tokens [n] int32, windows [windows, 5] int32 and method."""
    fingerprint = blake2b(method.encode(), digest_size=16)
    for array in (token_ids, windows):
        fingerprint.update(f"{array.shape}".encode())
        fingerprint.update(array.tobytes())
    return fingerprint.hexdigest()
