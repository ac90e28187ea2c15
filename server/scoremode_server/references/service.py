"""Opens, lists and changes the references of a server. Threads read and write their files."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cachetools import LRUCache

from scoremode.wire.references import Reference
from scoremode_server.errors import ConflictError, NotServedError, StorageError, UnavailableError
from scoremode_server.references.files.directory import (
    NoReferenceError,
    ReferenceDirectory,
    StoredReference,
    StoredText,
)
from scoremode_server.references.files.manifest import Manifest
from scoremode_server.references.files.tensors import BrokenFileError
from scoremode_server.scoring.model_identity import ModelIdentity
from scoremode_server.threads import CallThreads

T = TypeVar("T")

SECONDS_TO_ANSWER = 120
"""Time limit for a call that reads or writes files of a reference."""

SECONDS_TO_LIST = 10
"""Time limit for reading a reference's files to list it."""

LISTED_AT_ONCE = 16
"""How many references are read at once to list them, each in a thread."""

KEPT_OPEN = 8
"""How many references' tokens stay in memory, because clients request a reference's windows one by one."""


@dataclass(frozen=True, slots=True)
class References:
    """The references in the folder of a server of `model`. Errors name `param`, the request's field that names a
    reference."""

    directory: ReferenceDirectory
    model: ModelIdentity
    param: str
    _threads: CallThreads = field(default_factory=CallThreads)
    _listing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LISTED_AT_ONCE))
    _opened: LRUCache[str, StoredReference] = field(default_factory=lambda: LRUCache(KEPT_OPEN))
    """References that were opened last, by name, with the tokens that were read for them."""

    async def all(self) -> list[Reference]:
        """All references whose files can be read."""
        names = await self.in_thread("", self.directory.names)
        described = await asyncio.gather(*map(self._listed, names))
        return [reference for reference in described if reference is not None]

    async def _listed(self, name: str) -> Reference | None:
        try:
            async with self._listing, asyncio.timeout(SECONDS_TO_LIST):
                return await self.in_thread(name, lambda: self.directory.open(name).described())
        except (NoReferenceError, BrokenFileError, TimeoutError):
            return None

    async def in_thread(self, name: str, call: Callable[[], T]) -> T:
        """Run a call that reads or writes files of a reference, in a thread. UnavailableError if the call hangs; calls
        for other references still run."""
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                return await asyncio.wrap_future(self._threads.submit(name, call))
        except TimeoutError:
            raise UnavailableError(
                f"the files of reference {name!r} do not answer within {SECONDS_TO_ANSWER} s",
                self.param if name else None,
            ) from None

    async def use(self, name: str, call: Callable[[], T]) -> T:
        """Run a call that needs the reference `name`, in a thread. NotServedError if no reference has that name,
        ConflictError if it is damaged, StorageError if a file cannot be written."""
        try:
            return await self.in_thread(name, call)
        except NoReferenceError as error:
            self._opened.pop(name, None)
            raise NotServedError(str(error), self.param) from None
        except BrokenFileError as error:
            raise self.broken(name, error) from None
        except OSError as error:
            raise self.unwritable(name, error) from None

    async def open(self, name: str) -> StoredReference:
        reference = await self.use(name, lambda: self.directory.open(name))
        # If the manifest has not changed, reuse the reference opened before, with the tokens that were read for it.
        opened = self._opened.get(name)
        self._opened[name] = reference = opened if opened == reference else reference
        return reference

    async def describe(self, name: str) -> Reference:
        reference = await self.open(name)
        return await self.in_thread(name, reference.described)

    async def delete(self, name: str) -> None:
        await self.use(name, lambda: self.directory.delete(name))

    async def save(self, reference: StoredReference, changes: Callable[[Manifest], dict[str, Any]]) -> StoredReference:
        """Save changes to the manifest: see `ReferenceDirectory.update`."""
        return await self.use(reference.name, lambda: self.directory.update(reference, changes))

    async def current(self, reference: StoredReference) -> StoredReference:
        """Read a reference's manifest again. NotServedError if the reference was deleted."""
        name, identity = reference.name, reference.manifest.identity
        return await self.use(name, lambda: self.directory.open_same(name, identity))

    async def text(self, reference: StoredReference) -> StoredText:
        return await self.use(reference.name, lambda: reference.text)

    async def free_bytes(self) -> int:
        """The free space on the disk that has the folder of references."""
        return await self.in_thread("", lambda: shutil.disk_usage(self.directory.root).free)

    def broken(self, name: str, failure: BrokenFileError | str) -> ConflictError:
        reason = self._without_folder(name, failure)
        return ConflictError(f"reference {name!r} cannot be read: {reason}", self.param)

    def unwritable(self, name: str, failure: OSError | str) -> StorageError:
        reason = self._without_folder(name, failure)
        return StorageError(f"reference {name!r} could not be written: {reason}", "name")

    def _without_folder(self, name: str, reason: object) -> str:
        """Remove the server's folder from a reason, because clients must not learn its path."""
        root = self.directory.root
        return str(reason).replace(f"{root / name}/", "").replace(f"{root}/", "")
