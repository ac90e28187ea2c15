"""Messages between API servers and engine workers about windows and leases, encoded by msgspec."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import msgspec

from scoremode_server.rows import Column, Columns

SINK = "references"
"""The name by which requests use the sinks of references' windows."""

MAX_UNWRITTEN_BYTES = 2 * 1024**3
"""Limit on a reference's computed windows that are not on disk yet; one larger window is allowed if it is alone. API
servers keep to it for windows with layers. Without layers, it is only reached if the disk does not answer, and then
windows fail."""


OVERDUE = "overdue"
"""The outcome of a file that was not read in time."""


@dataclass(frozen=True, slots=True)
class WindowMark:
    """A window of a reference, and what engine workers do with its rows."""

    action: Literal["record", "compare", "export"]
    """Exporting returns the reference's distributions in llama.cpp's format; the served model's rows are not used."""
    reference: str
    identity: str
    index: int
    """The window's index in the reference."""
    num_scored: int
    """The number of targets."""
    ticket: str = ""
    """API servers use it to look up whether a worker has read or written the window."""
    head: str = ""
    """The key of the reference's LM head, if the action needs the head."""
    num_fed: int = 0
    """The number of tokens fed to the engine; used if the window has boundaries."""
    boundaries: tuple[int, ...] = ()
    """Boundaries of decoder layers. Recording stores the residual stream at each boundary. Comparing takes at most one
    boundary, and replaces the stream there with the reference's."""
    statistics: tuple[str, ...] = ()
    """Names of `Statistics` that comparing adds for the reference."""
    recorded: tuple[int, ...] = ()
    """The reference's own numbers of `boundaries`; empty if they are the same."""
    num_routed_layers: int = 0
    """The number of mixture-of-experts layers, if their experts are recorded or compared."""
    forces_routes: bool = False
    """Whether every token takes the reference's experts."""


def compared_columns(num_top: int, statistics: Iterable[str] = (), num_routed_layers: int = 0) -> Columns:
    """The columns that comparing adds to a window's scores: the figures of `kl_divergence.compare`, and an int32 for
    each layer of experts that holds two int16: the number of experts that both models chose, and 1 if the same one has
    the largest weight."""
    routes = (Column("expert_agreement", "int32", num_routed_layers),) if num_routed_layers else ()
    return (
        Column("kld"),
        Column("reverse_kld"),
        Column("acceptance"),
        Column("reference_token_ids", "int32", 1 + num_top),
        Column("reference_logprobs", "float32", 1 + num_top),
        Column("reference_ranks", "int32"),
        *(Column(f"reference_{name}") for name in statistics),
        *routes,
    )


def exported_columns(vocab_size: int) -> Columns:
    """The columns that exporting adds: those of `llama_cpp.quantized`, in the order of llama.cpp's file."""
    return Column("step"), Column("lowest"), Column("quantized", "int32", -(-vocab_size // 2))


def sink_columns(mark: WindowMark, num_top: int, vocab_size: int) -> Columns:
    """The columns that a window's sinks add to its scores."""
    match mark.action:
        case "record":
            return ()
        case "compare":
            columns = compared_columns(num_top, mark.statistics, mark.num_routed_layers)
            return columns + tuple(map(Column, mark.statistics))
        case "export":
            return exported_columns(vocab_size)


class ReadWindow(msgspec.Struct, tag=True):
    """Read a window's hidden states to the host, and keep them."""

    mark: WindowMark


class ReadHead(msgspec.Struct, tag=True):
    """Read the LM head of a window's reference, of format `head` (`HeadFormat`), to the host, and keep it."""

    mark: WindowMark
    ticket: str
    head: dict[str, Any]


class Forget(msgspec.Struct, tag=True):
    """Drop what was read for a ticket."""

    ticket: str


Order = ReadWindow | ReadHead | Forget


class LeaseCall(msgspec.Struct):
    """An API server's side of an engine's lease. Every call repeats all of this, so a lost call does no harm."""

    server: str
    now: float
    """Seconds of the monotonic clock, which API servers of one engine share."""
    wanted: dict[str, str]
    """References with windows that are not in the engine yet: the LM head's key, and the ticket under which all ranks
    have read the head, "" if they have not."""
    held: bool
    """Whether windows are in the engine, or may enter it before the answer comes."""
    used: bool
    """Whether windows are in the engine."""


class LeaseState(TypedDict):
    """The answer to a `LeaseCall`."""

    key: str
    """The LM head of the reference with the lease."""
    is_granted: bool
    """Whether the API server may send windows of that reference until its next call."""
    is_used: bool
    """Whether any API server may send windows of that reference."""
    waiting: list[str]
    """The LM heads of references with waiting windows, in the order in which they get the lease."""
