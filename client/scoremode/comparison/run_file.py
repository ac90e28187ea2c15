"""A run as `ppl-client` wrote it: the JSON, and the values of every token beside it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load

from scoremode._output import ARRAYS_SUFFIX
from scoremode._printable import printable
from scoremode.errors import RunError
from scoremode.kld import POSITION_DTYPES
from scoremode.protocol import LOWEST_LOGPROB, CorpusInfo, Reference, ServerInfo
from scoremode.report import RECORD_VERSION
from scoremode.windows import Method


class _Arrays(BaseModel):
    file: str
    sha256: str


class _Record(BaseModel):
    """What is read of every record."""

    model: str
    server: ServerInfo
    client_version: str
    finished: str | None = None
    arrays: _Arrays | None
    token_texts: dict[int, str] | None = None


class _Settings(BaseModel):
    method: Method
    context_length: int
    stride: int
    add_special_tokens: bool


class _Text(BaseModel):
    num_tokens: int
    num_bytes: int


class _PerplexityRecord(_Record, _Text):
    corpus: CorpusInfo
    settings: _Settings


class _KldSettings(BaseModel):
    as_noise_floor: bool


class _KldRecord(_Record):
    reference: Reference
    settings: _KldSettings


_SHAPES: dict[str, TypeAdapter[Any]] = {
    "perplexity": TypeAdapter(_PerplexityRecord),
    "kld": TypeAdapter(_KldRecord),
}

_LONGEST_INTEGER = 19
"""Digits, with a sign: of what 64 bits hold, and every float."""


@dataclass(frozen=True, slots=True, eq=False)
class RunFile:
    """One run. Arrays are over its n targets, in the order of windows."""

    path: Path
    label: str
    """What it is called in tables and plots; no two runs of a comparison share one."""
    kind: Literal["perplexity", "kld"]
    record: Mapping[str, Any]
    """The whole JSON, its texts as they are shown, but for those of tokens."""
    window_sizes: NDArray[np.int32]
    """[windows]; their sum is n."""
    token_ids: NDArray[np.int32]
    nlls: NDArray[np.float64]
    """[n], nats."""
    ranks: NDArray[np.int32] | None
    """[n], 1 for the likeliest."""
    kld: NDArray[np.float64] | None
    """[n], nats, from the reference; this and the next four are there for kind `kld` alone."""
    reference_nlls: NDArray[np.float64] | None
    top_token_ids: NDArray[np.int32] | None
    """[n], the likeliest token."""
    reference_top_token_ids: NDArray[np.int32] | None
    reference_confidence: NDArray[np.float64] | None
    """[n], the reference's probability of its likeliest token."""
    token_texts: Mapping[int, str]
    """The text of every token id that occurs in the arrays; empty for a run that has none."""

    @property
    def num_scored(self) -> int:
        """Targets of all windows: the n of the arrays."""
        return len(self.nlls)

    @property
    def num_windows(self) -> int:
        """Windows of the run."""
        return len(self.window_sizes)

    @property
    def model(self) -> str:
        """The name that it was served under."""
        name: str = self.record["model"]
        return name

    @property
    def server(self) -> ServerInfo:
        """As it was when the run began."""
        return ServerInfo.model_validate(self.record["server"])

    @property
    def reference(self) -> Reference | None:
        """What the run was compared with; None for kind `perplexity`."""
        return Reference.model_validate(self.record["reference"]) if self.kind == "kld" else None

    @property
    def reference_identity(self) -> tuple[str, str] | None:
        """Equal for runs against recordings of the same model over the same text, whatever their names."""
        reference = self.reference
        return None if reference is None else (reference.fingerprint, reference.text_fingerprint)

    @property
    def noise_floor(self) -> float | None:
        """Mean KL divergence of the reference's model from itself, nats; None where this run knew none."""
        reference = self.reference
        return None if reference is None or reference.noise_floor is None else reference.noise_floor.mean

    @property
    def as_noise_floor(self) -> bool:
        """Whether the run is the reference's own model beside itself."""
        return self.kind == "kld" and bool(self.record["settings"]["as_noise_floor"])

    @property
    def method(self) -> Method:
        """How the text was cut into windows."""
        return self._windows.method

    @property
    def context_length(self) -> int:
        """Tokens a window."""
        return self._windows.context_length

    @property
    def stride(self) -> int:
        """Tokens from one window to the next."""
        return self._windows.stride

    @property
    def num_tokens(self) -> int:
        """Tokens of the text used."""
        return self._text.num_tokens

    @property
    def num_bytes(self) -> int | None:
        """UTF-8 bytes of the text used; None where a reference was recorded from token ids."""
        return self._text.num_bytes

    @property
    def corpus(self) -> CorpusInfo | None:
        """None for kind `kld` where the reference does not say where its text is from."""
        reference = self.reference
        return CorpusInfo.model_validate(self.record["corpus"]) if reference is None else reference.corpus

    @property
    def corpus_name(self) -> str | None:
        """As `corpus` has it."""
        return None if self.corpus is None else self.corpus.name

    @property
    def text_identity(self) -> str:
        """Equal for runs of one kind on one text: the corpus' sha256, or the reference's of its tokens and windows."""
        reference = self.reference
        if reference is not None:
            return reference.text_fingerprint
        return CorpusInfo.model_validate(self.record["corpus"]).sha256

    @property
    def dtype(self) -> str:
        """As the server said it."""
        return self.server.dtype

    @property
    def quantization(self) -> str | None:
        """As the server said it; None for a model that is not quantized."""
        return self.server.quantization

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of the weight files; None where the server did not say."""
        size: int | None = self.record["server"].get("weight_bytes")
        return size

    @property
    def num_parameters(self) -> int | None:
        """None where the server did not say."""
        number: int | None = self.record["server"].get("num_parameters")
        return number

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the weight files for each parameter; None where the server did not say."""
        if self.weight_bytes is None or not self.num_parameters:
            return None
        return 8 * self.weight_bytes / self.num_parameters

    @property
    def finished(self) -> str | None:
        """When, in ISO 8601 and UTC; None where the record does not say."""
        finished: str | None = self.record.get("finished")
        return finished

    @property
    def versions(self) -> str:
        """Of the server, in words."""
        return f"scoremode {self.server.scoremode_version}, vLLM {self.server.vllm_version}"

    @property
    def same_top(self) -> NDArray[np.bool_] | None:
        """[n], whether the likeliest token is the reference's; None for kind `perplexity`."""
        if self.top_token_ids is None or self.reference_top_token_ids is None:
            return None
        return np.equal(self.top_token_ids, self.reference_top_token_ids)

    @property
    def delta_p(self) -> NDArray[np.float64] | None:
        """[n], the probability of the target less the reference's; None for kind `perplexity`."""
        return None if self.reference_nlls is None else np.exp(-self.nlls) - np.exp(-self.reference_nlls)

    @property
    def _windows(self) -> _Settings | Reference:
        return self.reference or _Settings.model_validate(self.record["settings"])

    @property
    def _text(self) -> _Text | Reference:
        return self.reference or _Text.model_validate(self.record)


def load_run(path: str | Path, label: str | None = None) -> RunFile:
    """Read what `ppl-client --output` or `ppl-client kld --output` wrote.

    Args:
        path: The JSON; the arrays are in the file beside it that it names, or that has its own name.
        label: What the run is called; the model's name when left out.

    Raises:
        RunError: it cannot be read, is no such file or of another version, or its arrays are missing, of another run
            or do not fit.
    """
    path = Path(path)
    record = _read_record(path)
    arrays = _read_arrays(path, record)
    kind: Literal["perplexity", "kld"] = record["kind"]
    _check_arrays(path, kind, arrays)
    of_reference = arrays if kind == "kld" else {}
    return RunFile(
        path=path,
        label=record["model"] if label is None else printable(label),
        kind=kind,
        record=record,
        window_sizes=arrays["window_sizes"],
        token_ids=arrays["token_ids"],
        nlls=_nlls(arrays["logprobs"]),
        ranks=arrays.get("ranks"),
        kld=_as_float64(of_reference.get("kld")),
        reference_nlls=None if kind == "perplexity" else _nlls(arrays["reference_logprobs"]),
        top_token_ids=of_reference.get("top_token_ids"),
        reference_top_token_ids=of_reference.get("reference_top_token_ids"),
        reference_confidence=_as_float64(of_reference.get("reference_confidence")),
        token_texts=record["token_texts"],
    )


def _read_record(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_bytes(), parse_int=_integer)
        record: dict[str, Any] = _shown(content)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is no JSON: {error}") from error
    except RecursionError as error:
        raise RunError(f"{path} is nested too deeply for a result of ppl-client") from error
    kind, version = (record.get("kind"), record.get("version")) if isinstance(record, dict) else (None, None)
    if not isinstance(kind, str) or kind not in _SHAPES:
        raise RunError(f"{path} is no result of `ppl-client --output` or `ppl-client kld --output`")
    if version != RECORD_VERSION:
        raise RunError(f"{path} is of version {version}; this ppl-client reads version {RECORD_VERSION}")
    record["token_texts"] = content.get("token_texts")
    try:
        record["token_texts"] = _SHAPES[kind].validate_python(record).token_texts or {}
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return record


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _shown(value: Any) -> Any:
    """JSON whose texts a terminal, XML and UTF-8 can have."""
    if isinstance(value, dict):
        return {printable(name): _shown(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_shown(part) for part in value]
    return printable(value) if isinstance(value, str) else value


def _read_arrays(path: Path, record: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The arrays whose checksum the record has, also where both files were renamed together."""
    described = record["arrays"]
    if described is None:
        raise RunError(f"{path} has no values of single tokens: an earlier version measured it with --server-side")
    for candidate in (path.parent / Path(described["file"]).name, path.with_suffix(ARRAYS_SUFFIX)):
        try:
            content = candidate.read_bytes()
        except OSError:
            continue
        if hashlib.sha256(content).hexdigest() == described["sha256"]:
            try:
                return load(content)
            except (SafetensorError, KeyError, ValueError) as error:
                raise RunError(f"cannot read {candidate}: {type(error).__name__}: {error}") from error
    raise RunError(f"{path}: the values of its tokens, {described['file']}, are missing beside it or of another run")


def _check_arrays(path: Path, kind: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    needed = POSITION_DTYPES if kind == "kld" else ("token_ids", "logprobs")
    if missing := [name for name in (*needed, "window_sizes") if name not in arrays]:
        raise RunError(f"{path}: its arrays lack {', '.join(missing)}")
    for name, dtype in {**POSITION_DTYPES, "window_sizes": "<i4"}.items():
        if name in arrays and arrays[name].dtype.kind != np.dtype(dtype).kind:
            raise RunError(f"{path}: {name} has values of type {arrays[name].dtype}")
    if arrays["window_sizes"].ndim != 1 or (arrays["window_sizes"] < 0).any():
        raise RunError(f"{path}: its window_sizes are not a list of sizes")
    num_scored = int(arrays["window_sizes"].sum())
    for name, array in sorted(arrays.items()):
        if name != "window_sizes" and array.shape != (num_scored,):
            raise RunError(f"{path}: its windows have {num_scored} tokens, and {name} is of shape {array.shape}")
        if np.isnan(array).any():
            raise RunError(f"{path}: {name} has NaN")
    if not num_scored:
        raise RunError(f"{path} has no scored token")


def _nlls(logprobs: NDArray[Any]) -> NDArray[np.float64]:
    """Infinite in both kinds of run where a token is impossible: JSON, which those of perplexity went through, has a
    lowest logprob for that."""
    nlls: NDArray[np.float64] = np.where(logprobs <= LOWEST_LOGPROB, np.inf, -logprobs.astype(np.float64))
    return nlls


def _as_float64(array: NDArray[Any] | None) -> NDArray[np.float64] | None:
    return None if array is None else array.astype(np.float64)
