"""The served model recorded as a reference: its windows through the engine, until their files are on disk.

Knows no HTTP. Workers write the files; they are looked for in threads.
"""

import asyncio
import time
import uuid
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
from scoremode.protocol import is_old_fingerprint
from scoremode_server.errors import RequestError
from scoremode_server.prefix_cache.engine import ScoringEngine
from scoremode_server.references.directory import StoredReference, StoredText
from scoremode_server.references.manifest import HeadFormat, Manifest, ModelIdentity, Result, TextPlan
from scoremode_server.references.tensor_files import BrokenFileError
from scoremode_server.rows import json_logprobs
from scoremode_server.scoring.reference_windows import MarkedWindow
from scoremode_server.scoring.references import References
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


@dataclass(frozen=True, slots=True)
class RecordedWindow:
    """A window that is on disk."""

    nlls: np.ndarray
    """[scored] float64, in nats."""
    is_new: bool
    """Whether it was not there before this request."""


class Recorder:
    """Records the served model."""

    def __init__(self, references: References, client: EngineClient, engine: ScoringEngine, turns: Turns) -> None:
        self._references = references
        self._client = client
        self._engine = engine
        self._turns = turns
        self._head: HeadFormat | None = None
        self._beginning = asyncio.Lock()

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
        model = self._references.model
        new = Manifest(identity=uuid.uuid4().hex, created=int(time.time()), model=model, head=None, text=plan)
        try:
            reference = await asyncio.to_thread(self._references.directory.create, name, new, text)
        except FileExistsError:
            reference = await self._references.open(name, "name")
        except OSError as error:
            raise self._references.unwritable(name, error) from None
        of_disk = reference.manifest
        is_same_model = model.may_continue(of_disk.model)
        if not is_same_model or of_disk.text.fingerprint != plan.fingerprint:
            what = "text or other windows" if is_same_model else "model"
            raise RequestError(f"there is a reference {name!r} already, of another {what}", "name", HTTPStatus.CONFLICT)
        _warn_of_another_server(reference, model)
        if of_disk.head is not None and await asyncio.to_thread(_has_head, reference):
            return reference
        await self._write_head(reference)
        return await asyncio.to_thread(reference.save, of_disk.model_copy(update={"head": head}))

    async def _write_head(self, reference: StoredReference) -> None:
        """Have the LM head written while windows are recorded."""
        await self._remove(reference, reference.head_path)
        await self._ask_workers(reference, "scoremode_write_head", reference.name)

    async def _remove(self, reference: StoredReference, path: Path) -> None:
        """Remove a damaged file: it must not pass for the one that is being written.

        Raises:
            RequestError: it cannot be removed.
        """
        try:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        except OSError as error:
            raise self._references.unwritable(reference.name, error) from None

    async def _ask_workers(self, reference: StoredReference, method: str, *arguments: Any) -> None:
        """Call a method of the workers that answers with a failure to write, or with None.

        Raises:
            RequestError: one of them failed.
        """
        failures = await call_workers(self._client, method, *arguments)
        if failure := next(filter(None, failures), None):
            raise self._references.unwritable(reference.name, failure)

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
        text = await self._references.text(reference)
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
            await self._remove(reference, reference.shard(index))
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
            await self._ask_workers(reference, "scoremode_write_failure", reference.manifest.identity, index)
            if now - start > SECONDS_TO_WRITE:
                raise self._references.unwritable(reference.name, f"{what} is not there after {SECONDS_TO_WRITE} s")

    async def finish(self, reference: StoredReference, nlls: list[np.ndarray]) -> None:
        """Keep the perplexity of a reference, once all windows are recorded.

        Raises:
            RequestError: the reference was deleted, or its LM head or manifest cannot be written.
        """
        await self._written(reference, reference.head_path, HEAD, "the LM head")
        result = await asyncio.to_thread(lambda: Result.of(perplexity(np.concatenate(nlls).tolist())))
        await self._references.save(reference, {"result": result})
        await asyncio.to_thread(reference.remove_partial_files)


def _warn_of_another_server(reference: StoredReference, model: ModelIdentity) -> None:
    """Log what forbids nothing, and may make a reference of two models, or of two kinds of kernels."""
    recorded = reference.manifest.model
    if is_old_fingerprint(recorded.fingerprint):
        logger.warning(
            "Reference %s was begun when fingerprints did not see the contents of weights: make sure that they are the "
            "same",
            reference.name,
        )
    if None not in (recorded.computed_by, model.computed_by) and recorded.computed_by != model.computed_by:
        logger.warning(
            "Reference %s was begun on other GPUs or kernels: %s; here: %s",
            reference.name,
            recorded.computed_by,
            model.computed_by,
        )


def _has_head(reference: StoredReference) -> bool:
    try:
        reference.read_head()
    except BrokenFileError:
        return False
    return True
