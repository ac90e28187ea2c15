"""Server-sent events: the stream of `POST /v1/perplexity`, read chunk by chunk as the network cuts it."""

import json
import re
from collections.abc import Callable, Iterator

from pydantic import ValidationError

from scoremode._failures import event_error, protocol_error
from scoremode.errors import ResponseError
from scoremode.protocol import PerplexityResponse, PerplexityWindow

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


class PerplexityReader:
    """Reads the events of a perplexity run: hands each window to `on_window`, and keeps the result."""

    def __init__(self, on_window: Callable[[PerplexityWindow], object] | None) -> None:
        self._parser = EventParser()
        self._on_window = on_window
        self._result: PerplexityResponse | None = None
        self.can_restart = True
        """Until a window was reported: a second run would report it again."""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the stream.

        Raises:
            APIStatusError: the server reports an error.
            ResponseError: an event that is none of the protocol's.
        """
        for data in self._parser.feed(chunk):
            if data != _DONE:
                self._take(data)

    def finish(self) -> PerplexityResponse:
        """The result, once the stream has ended.

        Raises:
            ResponseError: it ended too early.
        """
        if self._result is None:
            raise ResponseError("the server's stream ended without a result")
        return self._result

    def _take(self, data: bytes) -> None:
        event = _parse(data)
        if isinstance(event, PerplexityResponse):
            self._result = event
            return
        self.can_restart = False
        if self._on_window is not None:
            self._on_window(event)


def _parse(data: bytes) -> PerplexityWindow | PerplexityResponse:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if isinstance(event, dict) and "error" in event:
        raise event_error(event["error"])
    kind = event.get("object") if isinstance(event, dict) else None
    try:
        if kind == "perplexity.window":
            return PerplexityWindow.model_validate(event)
        if kind == "perplexity":
            return PerplexityResponse.model_validate(event)
    except ValidationError as error:
        raise protocol_error(error) from error
    raise ResponseError(f"unknown event in the server's stream: {data[:200].decode(errors='replace')}")
