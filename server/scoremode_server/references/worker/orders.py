"""Messages about windows between API servers and engine workers, in requests and in orders, as msgspec sends them."""

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import msgspec

from scoremode_server.rows import Column, Columns

SINK = "references"
"""The name of the sinks of windows."""

MAX_UNWRITTEN_BYTES = 2 * 1024**3
"""Of windows of a reference that are computed and not on disk yet, unless one alone has more. API servers send no more
where windows have layers; others come only where the disk does not answer, and fail."""


def compared_columns(num_top: int) -> Columns:
    """The columns that comparing adds to a window's scores: the figures of `kl_divergence.compare`."""
    return (
        Column("kld"),
        Column("reverse_kld"),
        Column("acceptance"),
        Column("reference_token_ids", "int32", 1 + num_top),
        Column("reference_logprobs", "float32", 1 + num_top),
        Column("reference_ranks", "int32"),
    )


OVERDUE = "overdue"
"""The outcome of a file that is not read in time."""


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


class ReadHead(msgspec.Struct, tag=True):
    """Read the LM head of a window's reference, of format `head` (`HeadFormat`), to the host, and keep it."""

    mark: WindowMark
    ticket: str
    head: dict[str, Any]


class Forget(msgspec.Struct, tag=True):
    """Keep what was read for a ticket no longer."""

    ticket: str


Order = ReadWindow | ReadHead | Forget


class LeaseCall(msgspec.Struct):
    """An API server's side of an engine's lease, whole in every call, so that a lost call does no harm."""

    server: str
    now: float
    """Seconds of the monotonic clock, which API servers of one engine share."""
    wanted: dict[str, str]
    """References with windows that are not in the engine yet, by the key of the LM head: the ticket under which all
    ranks have read it, "" if they have not."""
    held: bool
    """Whether windows are in the engine, or may enter it before the answer comes."""
    used: bool
    """Whether windows are in the engine."""


class LeaseState(TypedDict):
    """The answer to a `LeaseCall`."""

    key: str
    """The LM head of the reference with the lease."""
    is_granted: bool
    """Whether the API server may send windows of it until its next call."""
    is_used: bool
    """Whether any API server may."""
    waiting: list[str]
    """The LM heads of references with waiting windows, in the order in which they get the lease."""
