"""The requests of the API and how their answers are read, apart from the sending, which is sync or async."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from scoremode._events import EventKind, EventReader
from scoremode._failures import protocol_error
from scoremode.errors import ResponseError
from scoremode.kld_result import KldResult, KldWindowValues, parse_result, result_of_event, window_of_event
from scoremode.protocol import (
    PerplexityResponse,
    PerplexityWindow,
    Reference,
    ReferenceDeleted,
    ReferenceList,
    ServerInfo,
)
from scoremode.score import Score, parse_scores

Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


class Reader(Protocol[Answer_co]):
    """Takes the bytes of an answer as they come; raises ResponseError when they are not what the protocol says."""

    can_restart: bool
    """Whether the request may be sent again if the connection is lost now."""

    def feed(self, chunk: bytes) -> None: ...
    def finish(self) -> Answer_co: ...


class WholeBody(Generic[Answer]):
    """Reads an answer that is one JSON document."""

    can_restart = True

    def __init__(self, parse: Callable[[bytes], Answer]) -> None:
        self._parse = parse
        self._chunks: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)

    def finish(self) -> Answer:
        try:
            return self._parse(b"".join(self._chunks))
        except ValidationError as error:
            raise protocol_error(error) from error


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request: where it goes, what it says, and how its answer is read. Each attempt takes a new reader."""

    method: str
    path: str
    new_reader: Callable[[], Reader[Answer]]
    body: dict[str, object] | None = None


_PERPLEXITY_WINDOW = EventKind("perplexity.window", PerplexityWindow.model_validate)


class _Tokens(BaseModel):
    tokens: list[int]


class _Prompt(BaseModel):
    prompt: str


class _TokenTexts(BaseModel):
    tokens: list[str]


def info(model: str | None) -> Call[ServerInfo]:
    """`GET /v1/score`, of the served model or an adapter."""
    query = "" if model is None else f"?model={quote(model, safe='')}"
    return Call("GET", f"/v1/score{query}", lambda: WholeBody(ServerInfo.model_validate_json))


def score(**fields: object) -> Call[list[Score]]:
    """`POST /v1/score`; `fields` are those of `protocol.ScoreRequest`."""
    body = _without_none({**fields, "encoding_format": "base64"})
    return Call("POST", "/v1/score", lambda: WholeBody(parse_scores), body)


def perplexity(on_window: Callable[[PerplexityWindow], object] | None, **fields: object) -> Call[PerplexityResponse]:
    """`POST /v1/perplexity`, streamed; `fields` are those of `protocol.PerplexityRequest`."""
    body = _without_none({**fields, "stream": True})
    result = EventKind("perplexity", PerplexityResponse.model_validate)
    return Call("POST", "/v1/perplexity", lambda: EventReader(_PERPLEXITY_WINDOW, result, on_window), body)


def record_reference(on_window: Callable[[PerplexityWindow], object] | None, **fields: object) -> Call[Reference]:
    """`POST /v1/references`, streamed; `fields` are those of `protocol.ReferenceRequest`."""
    body = _without_none({**fields, "stream": True})
    result = EventKind("reference", Reference.model_validate)
    # The server goes on where it was: sent again, it reports the windows that were missing.
    return Call(
        "POST", "/v1/references", lambda: EventReader(_PERPLEXITY_WINDOW, result, on_window, repeatable=True), body
    )


def references() -> Call[list[Reference]]:
    """`GET /v1/references`."""
    return Call("GET", "/v1/references", lambda: WholeBody(lambda data: ReferenceList.model_validate_json(data).data))


def reference(name: str) -> Call[Reference]:
    """`GET /v1/references/{name}`."""
    return Call("GET", _path_of(name), lambda: WholeBody(Reference.model_validate_json))


def delete_reference(name: str) -> Call[ReferenceDeleted]:
    """`DELETE /v1/references/{name}`."""
    return Call("DELETE", _path_of(name), lambda: WholeBody(ReferenceDeleted.model_validate_json))


def kld(on_window: Callable[[KldWindowValues], object] | None, *, stream: bool, **fields: object) -> Call[KldResult]:
    """`POST /v1/kld`; `fields` are those of `protocol.KldRequest`."""
    body = _without_none({**fields, "encoding_format": "base64", "stream": stream})
    if stream:
        return Call("POST", "/v1/kld", lambda: _KldReader(on_window), body)
    return Call("POST", "/v1/kld", lambda: WholeBody(parse_result), body)


class _KldReader(EventReader[KldWindowValues, KldResult]):
    """Puts the windows of the stream into the result."""

    def __init__(self, on_window: Callable[[KldWindowValues], object] | None) -> None:
        super().__init__(EventKind("kld.window", window_of_event), EventKind("kld", result_of_event), self._collect)
        self._windows: list[KldWindowValues] = []
        self._report = on_window

    def finish(self) -> KldResult:
        return replace(super().finish(), data=sorted(self._windows, key=lambda window: window.index))

    def _collect(self, window: KldWindowValues) -> None:
        self._windows.append(window)
        if self._report is not None:
            self._report(window)


def tokenize(text: str, add_special_tokens: bool, model: str | None) -> Call[list[int]]:
    """vLLM's `POST /tokenize`."""
    body = _without_none({"model": model, "prompt": text, "add_special_tokens": add_special_tokens})
    return Call("POST", "/tokenize", lambda: WholeBody(lambda data: _Tokens.model_validate_json(data).tokens), body)


def detokenize(token_ids: Sequence[int], model: str | None) -> Call[str]:
    """vLLM's `POST /detokenize`."""
    body = _without_none({"model": model, "tokens": list(token_ids)})
    return Call("POST", "/detokenize", lambda: WholeBody(lambda data: _Prompt.model_validate_json(data).prompt), body)


def token_texts(token_ids: Collection[int], model: str | None) -> Call[dict[int, str]]:
    """`POST /v1/tokens`."""
    wanted = sorted(set(token_ids))

    def parse(data: bytes) -> dict[int, str]:
        texts = _TokenTexts.model_validate_json(data).tokens
        if len(texts) != len(wanted):
            raise ResponseError(f"the server gave {len(texts)} texts for {len(wanted)} tokens")
        return dict(zip(wanted, texts, strict=True))

    return Call("POST", "/v1/tokens", lambda: WholeBody(parse), _without_none({"model": model, "token_ids": wanted}))


def _path_of(name: str) -> str:
    return f"/v1/references/{quote(name, safe='')}"


def _without_none(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
