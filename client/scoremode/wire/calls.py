"""Describes requests of the API, and reads their answers: JSON or server-sent events, in chunks as the network cuts
them. This module sends nothing; the synchronous and the asynchronous client do that."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from pydantic import ValidationError
from pydantic_core import from_json

from scoremode._texts import excerpt, json_object, printable
from scoremode.errors import ResponseError
from scoremode.wire.failures import event_error, protocol_error

Event = TypeVar("Event")
Answer = TypeVar("Answer")

FIXED_BYTES = 1 << 20
"""Size limit of any answer that does not grow with its request: the description of a run or a server, or an error."""
BYTES_PER_BYTE = 512
"""Added to an answer's size limit for each byte of its request. A token takes at least one byte of a request. In the
answer it has an id, a logprob, a rank, a text, and a part of a window's event."""
REFERENCE_BYTES = 1 << 22
"""Size limit of a reference's description, whose noise floors have a number for each of up to 65,536 answers."""
LISTING_BYTES = 1 << 26
"""Size limit of a list of all references or models of a server."""

# A carriage return at the end of a chunk may be the first half of a line end. str.splitlines does not work here: it
# also cuts at characters that JSON may contain, such as U+2028.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[\s\S])")


class EventParser:
    """Collects chunks of a server-sent event stream into the `data` of its events."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that `chunk` completes."""
        # Search only the new chunk, and a carriage return before it.
        searched = max(0, len(self._rest) - 1)
        self._rest += chunk
        done = 0
        for match in [*_LINE_END.finditer(self._rest, searched)]:
            line, done = bytes(self._rest[done : match.start()]), match.end()
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
        del self._rest[:done]


class Reader(Generic[Answer]):
    """Reads an answer that is one JSON document; raises ResponseError if it does not follow the protocol."""

    can_restart = True
    """Whether the request may be sent again if the connection is lost now."""
    max_bytes = FIXED_BYTES
    """Size limit of the answer."""
    _num_bytes = 0

    def __init__(self, parse: Callable[[Any], Answer]) -> None:
        self._parse = parse
        self._chunks: list[bytes] = []

    def receive(self, chunk: bytes) -> None:
        """Read the next bytes. ResponseError if the answer exceeds its size limit."""
        self._num_bytes += len(chunk)
        if self._num_bytes > self.max_bytes:
            raise ResponseError(f"the server's answer is longer than the {self.max_bytes:,} bytes that it may have")
        self.feed(chunk)

    def feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)

    def finish(self) -> Answer:
        try:
            # Parsed without pydantic's validate_json, which needs 200 times the memory for a list of empty lists.
            return self._parse(from_json(b"".join(self._chunks)))
        except ValidationError as error:
            raise protocol_error(error) from error
        except (LookupError, TypeError, ValueError) as error:
            raise ResponseError(
                f"the server's answer is not what the protocol says: {printable(excerpt(repr(error)))}"
            ) from error


class BodyReader(Reader[bytes]):
    """Reads an answer of any format, such as a proxy's error."""

    def finish(self) -> bytes:
        return b"".join(self._chunks)


class BytesReader(Reader[None]):
    """Passes an answer's bytes to `write` as they arrive."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def feed(self, chunk: bytes) -> None:
        self.can_restart = False
        self._write(chunk)

    def finish(self) -> None:
        """Do nothing: all bytes are written."""


@dataclass(eq=False)
class EventReader(Reader[Answer], Generic[Event, Answer]):
    """Reads a stream of windows, which it passes to `on_window`, and a result. An event's `object` tells them apart."""

    kinds: tuple[str, str]
    """The values of `object` in a window and in the result."""
    read_window: Callable[[object], Event]
    read_result: Callable[[object], Answer]
    on_window: Callable[[Event], object] | None
    repeatable: bool = False
    """Whether the server, if a request is repeated, leaves out the windows that it has already reported."""
    _parser: EventParser = field(default_factory=EventParser)
    _result: Answer | None = None

    def feed(self, chunk: bytes) -> None:
        for data in self._parser.feed(chunk):
            if data != b"[DONE]":
                self._take(data)

    def finish(self) -> Answer:
        if self._result is None:
            raise ResponseError("the server's stream ended without a result")
        return self._result

    def _take(self, data: bytes) -> None:
        event = json_object(data) or {}
        if "error" in event:
            raise event_error(event["error"])
        kind = event.get("object")
        if kind not in self.kinds:
            shown = data[:200].decode(errors="replace")
            raise ResponseError(f"unknown event in the server's stream: {printable(shown)}")
        try:
            if kind == self.kinds[1]:
                self._result = self.read_result(event)
                return
            window = self.read_window(event)
        except ValidationError as error:
            raise protocol_error(error) from error
        # A repeated request would report this window again.
        self.can_restart = self.repeatable
        if self.on_window is not None:
            self.on_window(window)


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request, and the reader of its answer. Each attempt uses a new reader.

    The answer may have `fixed_bytes`, and `bytes_per_byte` more for each byte of the request.
    """

    method: str
    path: str
    new_reader: Callable[[], Reader[Answer]]
    body: dict[str, Any] | None = None
    fixed_bytes: int = FIXED_BYTES
    bytes_per_byte: int = BYTES_PER_BYTE

    def receiver(self, response: httpx.Response, reader: Reader[Answer]) -> Reader[Any]:
        """The reader of a response: `reader`, or another for the body of an error. ResponseError for a compressed
        response, because it could unpack to any length."""
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ResponseError(
                f"the server's answer is compressed ({printable(excerpt(encoding))}), which the request does not "
                "accept: turn compression off in the server, or in the proxy before it"
            )
        if not response.is_success:
            return BodyReader(bytes)
        reader.max_bytes = self.fixed_bytes + self.bytes_per_byte * len(response.request.content)
        return reader


def call(
    method: str,
    path: str,
    parse: Callable[[Any], Answer],
    *,
    fixed_bytes: int = FIXED_BYTES,
    bytes_per_byte: int = BYTES_PER_BYTE,
    **fields: object,
) -> Call[Answer]:
    """Make a request whose answer is one JSON document. Fields that are None are left out."""
    body = _without_none(fields) if fields else None
    return Call(method, path, lambda: Reader(parse), body, fixed_bytes, bytes_per_byte)


def stream(
    path: str,
    new_reader: Callable[[], Reader[Answer]],
    *,
    fixed_bytes: int = FIXED_BYTES,
    bytes_per_byte: int = BYTES_PER_BYTE,
    **fields: object,
) -> Call[Answer]:
    """Make a POST request whose answer is a stream of events. Fields that are None are left out."""
    return Call("POST", path, new_reader, _without_none({**fields, "stream": True}), fixed_bytes, bytes_per_byte)


def _without_none(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
