"""Messages about windows from API servers to engine workers, in requests and in orders, as msgspec sends them."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

SINK = "references"
"""The name of the sinks of windows."""

MAX_UNWRITTEN_BYTES = 2 * 1024**3
"""Of windows of a reference that are computed and not on disk yet, unless one alone has more. API servers send no more
where windows have layers; others come only where the disk does not answer, and fail."""

IN_USE = "another reference is in use"
"""The outcome of `HoldReference` where another API server holds another reference."""


@dataclass(frozen=True, slots=True)
class WindowMark:
    """A window of a reference, and what engine workers do with its rows."""

    action: Literal["record", "compare", "export"]
    """To export is to return the reference's distributions, as llama.cpp keeps them; the rows are not used."""
    reference: str
    identity: str
    index: int
    """Of the window."""
    num_scored: int
    """Targets."""
    ticket: str = ""
    """Names what is read for the window or written of it, for API servers."""
    head: str = ""
    """The key of the reference's LM head, if it is needed."""
    num_fed: int = 0
    """Tokens that the engine is fed, if the residual stream is needed."""
    boundaries: tuple[int, ...] = ()
    """Of decoder layers: to record, those at which the stream is kept; to compare, the one at which it is replaced by
    the reference's, if any."""


class ReadWindow(msgspec.Struct, tag=True):
    """Read a window's hidden states to the host, and keep them."""

    mark: WindowMark


class ForgetWindow(msgspec.Struct, tag=True):
    """Keep a window's hidden states no longer."""

    ticket: str


class HoldReference(msgspec.Struct, tag=True):
    """Compare with a window's reference, whose LM head has the format `head` (`HeadFormat`), until `holder` releases
    it."""

    mark: WindowMark
    holder: str
    head: dict[str, Any]


class ReleaseReference(msgspec.Struct, tag=True):
    """Let engines compare with other references than that of the LM head `key`, as far as `holder` is concerned."""

    key: str
    holder: str


Order = ReadWindow | ForgetWindow | HoldReference | ReleaseReference
