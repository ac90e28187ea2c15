"""What a request of the API is, and how its answer is read, apart from the sending, which is sync or async."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from pydantic import ValidationError

from scoremode._events import EventKind, EventReader
from scoremode._failures import protocol_error
from scoremode.kld_result import KldResult, KldWindowValues, result_of_event, window_of_event

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


class KldReader(EventReader[KldWindowValues, KldResult]):
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


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request: where it goes, what it says, and how its answer is read. Each attempt takes a new reader."""

    method: str
    path: str
    new_reader: Callable[[], Reader[Answer]]
    body: dict[str, object] | None = None


def call(method: str, path: str, parse: Callable[[bytes], Answer], **fields: object) -> Call[Answer]:
    """A request whose answer is one JSON document. Fields that are None are left out."""
    return Call(method, path, lambda: WholeBody(parse), _without_none(fields) if fields else None)


def stream(path: str, new_reader: Callable[[], Reader[Answer]], **fields: object) -> Call[Answer]:
    """A POST that is answered by a stream of events. Fields that are None are left out."""
    return Call("POST", path, new_reader, _without_none({**fields, "stream": True}))


def _without_none(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
