"""What API servers order of engine workers, as msgspec sends it: see `WorkerWindows.exchange`."""

from typing import Any

import msgspec

from scoremode_server.worker.row_spec import WindowMark

IN_USE = "another reference is in use"
"""The outcome of `HoldReference` where another API server holds another reference."""


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
