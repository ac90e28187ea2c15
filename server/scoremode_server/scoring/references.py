"""References of a server: which there are, and what is told and kept of each.

Knows no HTTP. Files are touched in threads.
"""

import asyncio
import os
from collections import OrderedDict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from scoremode.protocol import Reference
from scoremode_server.errors import RequestError
from scoremode_server.references.directory import (
    NoReferenceError,
    ReferenceDirectory,
    StoredReference,
    StoredText,
)
from scoremode_server.references.manifest import ModelIdentity
from scoremode_server.references.tensor_files import BrokenFileError

KEPT_OPEN = 8
"""References whose tokens are kept in memory: a client asks for the windows of one by one, in requests of their own."""


class References:
    """The references in a folder.

    Attributes:
        directory: where they are.
        model: the served one.
    """

    def __init__(self, root: Path, model: ModelIdentity) -> None:
        self.directory = ReferenceDirectory(root)
        self.model = model
        self._opened: OrderedDict[str, StoredReference] = OrderedDict()
        """By name, those that were asked for last."""

    async def all(self) -> list[Reference]:
        """Those whose manifest can be read."""
        return await asyncio.to_thread(lambda: [_describe(each) for each in self.directory.all()])

    async def open(self, name: str, param: str = "reference") -> StoredReference:
        """The reference of a name, which is the request's field `param`.

        Raises:
            RequestError: there is none (404), or it is damaged (409).
        """
        try:
            reference = await asyncio.to_thread(self.directory.open, name)
        except NoReferenceError as error:
            self._opened.pop(name, None)
            raise RequestError(str(error), param, HTTPStatus.NOT_FOUND) from None
        except BrokenFileError as error:
            raise self.broken(name, error, param) from None
        # With the tokens that were read for it, as long as the manifest is the same.
        reference = known if (known := self._opened.pop(name, None)) == reference else reference
        self._opened[name] = reference
        if len(self._opened) > KEPT_OPEN:
            self._opened.popitem(last=False)
        return reference

    async def describe(self, name: str) -> Reference:
        """What is told of the reference of a name.

        Raises:
            RequestError: as for `open`.
        """
        return await asyncio.to_thread(_describe, await self.open(name, "name"))

    async def delete(self, name: str) -> None:
        """Remove a reference.

        Raises:
            RequestError: there is none (404), or its folder cannot be changed.
        """
        try:
            await asyncio.to_thread(self.directory.delete, name)
        except NoReferenceError as error:
            raise RequestError(str(error), "name", HTTPStatus.NOT_FOUND) from None
        except OSError as error:
            raise self.unwritable(name, error) from None

    async def save(self, reference: StoredReference, changes: dict[str, Any]) -> None:
        """Change the manifest that is on disk now.

        Raises:
            RequestError: the reference was deleted meanwhile, or its manifest cannot be written.
        """
        current = await self.current(reference)
        try:
            await asyncio.to_thread(current.save, current.manifest.model_copy(update=changes))
        except OSError as error:
            raise self.unwritable(reference.name, error) from None

    async def current(self, reference: StoredReference) -> StoredReference:
        """A reference as it is on disk now.

        Raises:
            RequestError: it was deleted meanwhile.
        """
        current = await self.open(reference.name)
        if current.manifest.identity != reference.manifest.identity:
            raise RequestError(
                f"reference {reference.name!r} was deleted meanwhile, and another has its name now",
                "reference",
                HTTPStatus.CONFLICT,
            )
        return current

    async def text(self, reference: StoredReference) -> StoredText:
        """The tokens of a reference.

        Raises:
            RequestError: they are damaged.
        """
        try:
            return await asyncio.to_thread(lambda: reference.text)
        except BrokenFileError as error:
            raise self.broken(reference.name, error) from None

    def broken(self, name: str, error: BrokenFileError, param: str = "reference") -> RequestError:
        """The error for a reference of which a file is damaged."""
        reason = self._without_folder(name, error)
        return RequestError(f"reference {name!r} is damaged: {reason}", param, HTTPStatus.CONFLICT)

    def unwritable(self, name: str, failure: OSError | str) -> RequestError:
        """The error for a reference of which a file cannot be written."""
        reason = self._without_folder(name, failure)
        return RequestError(
            f"reference {name!r} could not be written: {reason}", "name", HTTPStatus.INSUFFICIENT_STORAGE
        )

    def _without_folder(self, name: str, reason: object) -> str:
        """What went wrong with a file of a reference: of paths from the root vLLM tells clients nothing."""
        return str(reason).replace(f"{self.directory.root / name}{os.sep}", "")


def _describe(reference: StoredReference) -> Reference:
    manifest, text, model = reference.manifest, reference.manifest.text, reference.manifest.model
    result = manifest.result
    return Reference(
        name=reference.name,
        created=manifest.created,
        complete=result is not None,
        **model.model_dump(exclude={"tokenizer_fingerprint"}),
        vocab_size=0 if manifest.head is None else manifest.head.vocab_size,
        text_fingerprint=text.fingerprint,
        **text.model_dump(exclude={"fingerprint"}),
        num_recorded=len(reference.recorded()),
        disk_bytes=reference.disk_bytes(),
        perplexity=None if result is None else result.perplexity,
        perplexity_stderr=None if result is None else result.perplexity_stderr,
        nll_mean=None if result is None else result.nll_mean,
        noise_floor=manifest.noise_floor,
    )
