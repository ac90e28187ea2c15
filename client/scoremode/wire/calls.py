"""Requests of the API, and how their answers are read, chunk by chunk as the network cuts them: JSON and streams of
server-sent events. They are sent by `client`, synchronously or not."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from scoremode.errors import ResponseError
from scoremode.wire.failures import event_error, protocol_error

Event = TypeVar("Event")
Answer = TypeVar("Answer")

# A carriage return at the end of a chunk may be half of a line end whose other half is still to come. Not
# str.splitlines: it would cut at U+2028 and its like, which JSON may hold.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[\s\S])")
_DONE = b"[DONE]"


class EventParser:
    """Collects chunks of a server-sent event stream into the `data` of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of each event that `chunk` completes."""
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


class Reader(Generic[Answer]):
    """Reads an answer that is one JSON document; raises ResponseError when it is not what the protocol says."""

    can_restart = True
    """Whether the request may be sent again if the connection is lost now."""

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


class BytesReader(Reader[None]):
    """Hands an answer's bytes on as they come."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def feed(self, chunk: bytes) -> None:
        self.can_restart = False
        self._write(chunk)

    def finish(self) -> None:
        """The answer has ended."""


@dataclass(eq=False)
class EventReader(Reader[Answer], Generic[Event, Answer]):
    """Reads a stream of windows, which are handed to `on_window`, and a result, each with the name of its kind in
    `object`. It is `repeatable` if a second request does not report the windows of the first again."""

    kinds: tuple[str, str]
    """The names of a window and of the result."""
    read_window: Callable[[object], Event]
    read_result: Callable[[object], Answer]
    on_window: Callable[[Event], object] | None
    repeatable: bool = False
    _parser: EventParser = field(default_factory=EventParser)
    _result: Answer | None = None

    def feed(self, chunk: bytes) -> None:
        for data in self._parser.feed(chunk):
            if data != _DONE:
                self._take(data)

    def finish(self) -> Answer:
        if self._result is None:
            raise ResponseError("the server's stream ended without a result")
        return self._result

    def _take(self, data: bytes) -> None:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        fields = event if isinstance(event, dict) else {}
        if "error" in fields:
            raise event_error(fields["error"])
        kind = fields.get("object")
        if kind not in self.kinds:
            raise ResponseError(f"unknown event in the server's stream: {data[:200].decode(errors='replace')}")
        try:
            if kind == self.kinds[1]:
                self._result = self.read_result(event)
                return
            window = self.read_window(event)
        except ValidationError as error:
            raise protocol_error(error) from error
        # A second run would report the window again.
        self.can_restart = self.repeatable
        if self.on_window is not None:
            self.on_window(window)


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request: method, path, body, and how its answer is read. Each attempt takes a new reader."""

    method: str
    path: str
    new_reader: Callable[[], Reader[Answer]]
    body: dict[str, Any] | None = None


def call(method: str, path: str, parse: Callable[[bytes], Answer], **fields: object) -> Call[Answer]:
    """A request whose answer is one JSON document. Fields that are None are left out."""
    return Call(method, path, lambda: Reader(parse), _without_none(fields) if fields else None)


def stream(path: str, new_reader: Callable[[], Reader[Answer]], **fields: object) -> Call[Answer]:
    """A POST that is answered by a stream of events. Fields that are None are left out."""
    return Call("POST", path, new_reader, _without_none({**fields, "stream": True}))


def _without_none(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
