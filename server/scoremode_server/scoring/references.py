"""References of a server: which there are, whether they fit the served model, and their windows through the engine.

Knows no HTTP. Files are touched in threads.
"""

import asyncio
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger

from scoremode.metrics import perplexity
from scoremode.protocol import NoiseFloor, Reference
from scoremode_server.errors import RequestError
from scoremode_server.prefix_cache.engine import ScoringEngine
from scoremode_server.references.directory import (
    NoReferenceError,
    ReferenceDirectory,
    StoredReference,
    StoredText,
)
from scoremode_server.references.manifest import HeadFormat, Manifest, ModelIdentity, Result, TextPlan
from scoremode_server.references.tensor_files import BrokenFileError
from scoremode_server.rows import json_logprobs
from scoremode_server.scoring.reference_windows import ComparedWindow, MarkedWindow
from scoremode_server.scoring.scorer import ScoreSettings
from scoremode_server.scoring.turns import Turns
from scoremode_server.vllm_patches.reference_windows import HEAD
from scoremode_server.vllm_patches.window_params import call_workers

# vLLM writes what comes below its own name.
logger = init_logger("vllm.scoremode.references")

SECONDS_TO_WRITE = 120
"""In which a window that the engine has computed must be on disk, and after all windows the LM head."""

SECONDS_TO_ASK = 1
"""After which the workers are asked why it is not."""

POLL_SECONDS = 0.005
"""After which it is first looked for; then after twice as long each time, up to `MAX_POLL_SECONDS`."""

MAX_POLL_SECONDS = 0.25

KEPT_OPEN = 8
"""References whose tokens are kept in memory: a client asks for the windows of one by one, in requests of their own."""


@dataclass(frozen=True, slots=True)
class RecordedWindow:
    """A window that is on disk."""

    nlls: np.ndarray
    """[scored] float64, in nats."""
    is_new: bool
    """Whether it was not there before this request."""


class References:
    """What `/v1/references` and `/v1/kld` do."""

    def __init__(
        self, root: Path, client: EngineClient, engine: ScoringEngine, turns: Turns, model: ModelIdentity
    ) -> None:
        self._directory = ReferenceDirectory(root)
        self._client = client
        self._engine = engine
        self._turns = turns
        self.model = model
        self._head: HeadFormat | None = None
        self._head_bytes: int | None = None
        self._opened: OrderedDict[str, StoredReference] = OrderedDict()
        """By name, those that were asked for last."""
        self._beginning = asyncio.Lock()

    async def all(self) -> list[Reference]:
        """Those whose manifest can be read."""
        return await asyncio.to_thread(lambda: [_describe(each) for each in self._directory.all()])

    async def open(self, name: str, param: str = "reference") -> StoredReference:
        """The reference of a name, which is the request's field `param`.

        Raises:
            RequestError: there is none (404), or it is damaged (409).
        """
        try:
            reference = await asyncio.to_thread(self._directory.open, name)
        except NoReferenceError as error:
            self._opened.pop(name, None)
            raise RequestError(str(error), param, HTTPStatus.NOT_FOUND) from None
        except BrokenFileError as error:
            raise self._broken(name, error, param) from None
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
            await asyncio.to_thread(self._directory.delete, name)
        except NoReferenceError as error:
            raise RequestError(str(error), "name", HTTPStatus.NOT_FOUND) from None
        except OSError as error:
            raise self._unwritable(name, error) from None

    async def begin(self, name: str, plan: TextPlan, text: StoredText) -> StoredReference:
        """The reference to record into: a new one, or one of the same model and text that is not complete.

        Raises:
            RequestError: there is another of that name (409), or this model's logits are not what a reference can keep.
        """
        # One at a time: two of one name would both find that it has no LM head.
        async with self._beginning:
            return await self._begin(name, plan, text)

    async def _begin(self, name: str, plan: TextPlan, text: StoredText) -> StoredReference:
        head = await self._served_head()
        new = Manifest(identity=uuid.uuid4().hex, created=int(time.time()), model=self.model, head=None, text=plan)
        try:
            reference = await asyncio.to_thread(self._directory.create, name, new, text)
        except FileExistsError:
            reference = await self.open(name, "name")
        except OSError as error:
            raise self._unwritable(name, error) from None
        of_disk = reference.manifest
        if of_disk.model.fingerprint != self.model.fingerprint or of_disk.text.fingerprint != plan.fingerprint:
            what = "model" if of_disk.model.fingerprint != self.model.fingerprint else "text or other windows"
            raise RequestError(f"there is a reference {name!r} already, of another {what}", "name", HTTPStatus.CONFLICT)
        if of_disk.head is None or not await asyncio.to_thread(_has_head, reference):
            try:
                # One that is damaged must not pass for the one that is being written.
                await asyncio.to_thread(reference.head_path.unlink, missing_ok=True)
            except OSError as error:
                raise self._unwritable(name, error) from None
            failures = await call_workers(self._client, "scoremode_write_head", name)
            if failure := next(filter(None, failures), None):
                raise self._unwritable(name, failure)
            reference = await asyncio.to_thread(reference.save, of_disk.model_copy(update={"head": head}))
        return reference

    async def _served_head(self) -> HeadFormat:
        if self._head is None:
            answers = await call_workers(self._client, "scoremode_describe_head")
            described = next((each for each in answers if isinstance(each, dict)), None)
            if described is None:
                raise RequestError(f"this model cannot be a reference: {answers[-1]}", "model")
            self._head = HeadFormat.model_validate(described)
        return self._head

    async def record(self, reference: StoredReference, settings: ScoreSettings) -> AsyncGenerator[RecordedWindow, None]:
        """Every window in order, once it is on disk. Those that were recorded before are read.

        Raises:
            RequestError: a window could not be written, or see `Scorer.scores`.
            EngineOutputError: the engine computed no logprob, or NaN.
        """
        text = await self._text(reference)
        recorded = await asyncio.to_thread(reference.recorded)

        def windows() -> Iterator[Coroutine[Any, Any, RecordedWindow]]:
            for index in range(len(text.windows)):
                if index in recorded:
                    yield self._found(reference, index, text, settings)
                else:
                    yield self._recorded(reference, MarkedWindow.begin("record", reference, text, index, settings))

        async with aclosing(settings.queue.in_order(windows())) as in_order:
            async for window in in_order:
                yield window

    async def _found(
        self, reference: StoredReference, index: int, text: StoredText, settings: ScoreSettings
    ) -> RecordedWindow:
        """A window that has a file; it is recorded again where that is damaged."""
        try:
            _, logprobs = await asyncio.to_thread(reference.read_shard, index)
        except BrokenFileError as error:
            logger.warning("Reference %s: window %d is recorded again: %s", reference.name, index, error)
            try:
                # Nobody must take it for the new one.
                await asyncio.to_thread(reference.shard(index).unlink, missing_ok=True)
            except OSError as failure:
                raise self._unwritable(reference.name, failure) from None
            return await self._recorded(reference, MarkedWindow.begin("record", reference, text, index, settings))
        return RecordedWindow(-json_logprobs(logprobs.numpy()), is_new=False)

    async def _recorded(self, reference: StoredReference, window: MarkedWindow) -> RecordedWindow:
        _, columns, _ = await self._engine.prompt_columns(window.request())
        window.check_rows(np.isnan(columns[:, 0]))
        index = window.mark.index
        await self._written(reference, reference.shard(index), index, f"window {index}")
        await self._turns.take()
        return RecordedWindow(-json_logprobs(columns[:, 0]), is_new=True)

    async def _written(self, reference: StoredReference, path: Path, index: int, what: str) -> None:
        """Wait until a window, or the LM head, that workers have is on disk.

        Raises:
            RequestError: it could not be written, or is not there in time.
        """
        start, pause = time.monotonic(), POLL_SECONDS
        asked = start
        while not await asyncio.to_thread(path.exists):
            await asyncio.sleep(pause)
            pause, now = min(2 * pause, MAX_POLL_SECONDS), time.monotonic()
            if now - asked < SECONDS_TO_ASK:
                continue
            asked = now
            failures = await call_workers(self._client, "scoremode_write_failure", reference.manifest.identity, index)
            if failure := next(filter(None, failures), None):
                raise self._unwritable(reference.name, failure)
            if now - start > SECONDS_TO_WRITE:
                raise self._unwritable(reference.name, f"{what} is not there after {SECONDS_TO_WRITE} s")

    async def finish(self, reference: StoredReference, nlls: list[np.ndarray]) -> None:
        """Keep the perplexity of a reference, once all windows are recorded.

        Raises:
            RequestError: the reference was deleted, or its LM head or manifest cannot be written.
        """
        await self._written(reference, reference.head_path, HEAD, "the LM head")
        result = await asyncio.to_thread(lambda: Result.of(perplexity(np.concatenate(nlls).tolist())))
        await self._save(reference, {"result": result})
        await asyncio.to_thread(reference.remove_partial_files)

    async def keep_floor(self, reference: StoredReference, floor: NoiseFloor) -> None:
        """Keep the noise floor of a reference.

        Raises:
            RequestError: as for `finish`.
        """
        await self._save(reference, {"noise_floor": floor})

    async def _save(self, reference: StoredReference, changes: dict[str, Any]) -> None:
        """Change the manifest that is on disk now, unless it is another reference's."""
        current = await self._same(reference)
        try:
            await asyncio.to_thread(current.save, current.manifest.model_copy(update=changes))
        except OSError as error:
            raise self._unwritable(reference.name, error) from None

    async def _same(self, reference: StoredReference) -> StoredReference:
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

    async def _text(self, reference: StoredReference) -> StoredText:
        try:
            return await asyncio.to_thread(lambda: reference.text)
        except BrokenFileError as error:
            raise self._broken(reference.name, error) from None

    async def check(self, reference: StoredReference, vocab_size: int, max_model_len: int) -> None:
        """Make sure that the served model can be compared with a reference.

        Raises:
            RequestError: it is not complete, of another tokenizer or vocabulary, or too large.
        """
        manifest = reference.manifest
        if manifest.head is None or manifest.result is None:
            raise RequestError(
                f"reference {reference.name!r} is not complete: record it again, and it goes on", "reference"
            )
        if manifest.head.vocab_size != vocab_size:
            raise RequestError(
                f"reference {reference.name!r} has a vocabulary of {manifest.head.vocab_size} tokens, and the served "
                f"model one of {vocab_size}",
                "reference",
            )
        if manifest.model.tokenizer_fingerprint != self.model.tokenizer_fingerprint:
            raise RequestError(f"reference {reference.name!r} was made with another tokenizer", "reference")
        longest = int((await self._text(reference)).num_tokens.max())
        if longest > max_model_len:
            raise RequestError(
                f"reference {reference.name!r} has windows of {longest} tokens, and the served model takes "
                f"{max_model_len}",
                "reference",
            )
        room = await self._room()
        if manifest.head.num_bytes > room:
            raise RequestError(
                f"the LM head of reference {reference.name!r} has {manifest.head.num_bytes} bytes, and this server "
                f"reserved {room}: start it again now that the reference is there",
                "reference",
            )

    async def _room(self) -> int:
        """Bytes of the largest LM head that fits; workers answer between two steps, and it stays the same."""
        if self._head_bytes is None:
            self._head_bytes = max(await call_workers(self._client, "scoremode_head_bytes"))
        return self._head_bytes

    async def compare(
        self, reference: StoredReference, indices: list[int], num_top: int, settings: ScoreSettings
    ) -> AsyncGenerator[ComparedWindow, None]:
        """The windows of a reference through the served model, in the order of `indices`.

        Raises:
            RequestError: a file of the reference is missing or not what was written, or see `Scorer.scores`.
            EngineOutputError: the engine computed no logprob, or NaN.
        """

        text = await self._text(reference)

        def windows() -> Iterator[Coroutine[Any, Any, ComparedWindow]]:
            for index in indices:
                yield self._compared(
                    reference, MarkedWindow.begin("compare", reference, text, index, settings, num_top)
                )

        async with aclosing(settings.queue.in_order(windows())) as compared:
            async for window in compared:
                yield window

    async def _compared(self, reference: StoredReference, window: MarkedWindow) -> ComparedWindow:
        columns = await self._engine.prompt_columns(window.request())
        # Infinite divergences are numbers.
        is_nan = np.any(np.isnan(columns[1]), axis=1)
        if is_nan.any():
            await self._explain(reference, window.mark.index)
        window.check_rows(is_nan)
        await self._turns.take()
        return ComparedWindow.of(window.mark.index, columns)

    async def _explain(self, reference: StoredReference, index: int) -> None:
        """Find out whether a file of the reference is at fault, where figures are not numbers.

        Raises:
            RequestError: one is.
        """
        await self._same(reference)
        try:
            await asyncio.to_thread(reference.read_shard, index)
            await asyncio.to_thread(reference.read_head)
        except BrokenFileError as error:
            raise self._broken(reference.name, error) from None

    def _broken(self, name: str, error: BrokenFileError, param: str = "reference") -> RequestError:
        reason = self._without_folder(name, error)
        return RequestError(f"reference {name!r} is damaged: {reason}", param, HTTPStatus.CONFLICT)

    def _unwritable(self, name: str, failure: OSError | str) -> RequestError:
        reason = self._without_folder(name, failure)
        return RequestError(
            f"reference {name!r} could not be written: {reason}", "name", HTTPStatus.INSUFFICIENT_STORAGE
        )

    def _without_folder(self, name: str, reason: object) -> str:
        """What went wrong with a file of a reference: of paths from the root vLLM tells clients nothing."""
        return str(reason).replace(f"{self._directory.root / name}{os.sep}", "")


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


def _has_head(reference: StoredReference) -> bool:
    try:
        reference.read_head()
    except BrokenFileError:
        return False
    return True
