"""Records the served model as a reference. The engine's workers write the files, and report when they have."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from vllm.logger import init_logger

from scoremode.metrics import perplexity
from scoremode.wire.references import Answers, CorpusInfo, LayerBlock, ReferenceAnswers, ReferenceLayers
from scoremode_server.engine.sequence import ScoreSettings
from scoremode_server.errors import ConflictError, NotServedError, RequestError, StorageError
from scoremode_server.references.comparer import Comparer, MarkedWindow
from scoremode_server.references.exchange import UnreadableFileError, WorkerFiles
from scoremode_server.references.files.directory import StoredReference, StoredText
from scoremode_server.references.files.manifest import HeadFormat, Manifest, Result, TextPlan, text_fingerprint
from scoremode_server.references.files.tensors import BrokenFileError
from scoremode_server.references.service import References
from scoremode_server.references.worker.orders import MAX_UNWRITTEN_BYTES
from scoremode_server.rows import json_logprobs
from scoremode_server.scoring.core import Core
from scoremode_server.scoring.text_windows import TextWindows
from scoremode_server.vllm_compat.engine_client import call_workers

# vLLM prints what loggers below its own write.
logger = init_logger("vllm.scoremode.references")

SECONDS_TO_WRITE = 120
"""The time in which a computed window must be on disk, and after all windows the LM head."""

LARGEST_FLOOR = 1e-3
"""Nats by which a model in float32 may diverge from itself when it is resumed: what rounding in another place gives. A
stream that is not cut right gives tenths."""
LARGEST_FLOOR_16_BITS = 1e-2
LARGEST_SHARE = 0.01
"""Of the divergence that the other tokens cause without a stream: where logits hardly differ, a stream that is not cut
right gives little too."""

WindowOnDisk = tuple[np.ndarray, np.ndarray | None]
"""NLLs [scored] float64 in nats, and ranks [scored]; ranks are None if the window was on disk before this request."""


@dataclass(slots=True)
class Recorder:
    references: References
    core: Core
    files: WorkerFiles
    comparer: Comparer

    async def begin(
        self,
        name: str,
        texts: TextWindows,
        labels: list[str] | None = None,
        corpus: CorpusInfo | None = None,
        layers: ReferenceLayers | None = None,
        answers: Answers | None = None,
    ) -> StoredReference:
        """The reference to record into: a new one, or an incomplete one of the same model and text. `labels` has one
        for each text or conversation; with `layers` the residual stream at their boundaries is recorded; `answers` are
        what the texts were made of. ConflictError if there is another reference of that name."""
        text, plan = await asyncio.to_thread(_plan, texts, labels)
        if layers is not None:
            await self._check_space(name, text, layers)
        model = self.references.model
        new = Manifest(
            identity=uuid.uuid4().hex,
            created=int(time.time()),
            model=model,
            head=await self._served_head(),
            text=plan,
            corpus=corpus,
            layers=layers,
            answers=None
            if answers is None
            else ReferenceAnswers(**answers.model_dump(exclude={"data"}), num_answers=len(answers.data)),
        )
        create = partial(self.references.directory.create, name, new, text, () if answers is None else answers.data)
        try:
            return await self.references.in_thread(name, create)
        except FileExistsError:
            reference = await self.references.open(name)
        except OSError as error:
            raise self.references.unwritable(name, error) from None
        of_disk = reference.manifest
        if not model.may_continue(of_disk.model):
            raise ConflictError(f"there is a reference {name!r} already, of another model", "name")
        if of_disk.text.fingerprint != plan.fingerprint:
            hint = " (a chat template that writes the date renders another text each day)"
            raise ConflictError(
                f"there is a reference {name!r} already, of another text or other windows"
                f"{hint if plan.method == 'conversation' else ''}",
                "name",
            )
        kept = await self.references.text(reference)
        if of_disk.text.labels != plan.labels or not np.array_equal(kept.origins, text.origins):
            raise ConflictError(f"there is a reference {name!r} already, of this text with other labels", "labels")
        if _blocks(of_disk.layers) != _blocks(layers):
            recorded = "without layers" if of_disk.layers is None else "with layers"
            raise ConflictError(
                f"there is a reference {name!r} already, recorded {recorded}: delete it, or take another name",
                "layers",
            )
        if differing := model.computes_otherwise(of_disk.model):
            logger.warning("Reference %s was begun on other GPUs or kernels: here %s", name, differing)
        return await self.references.save(reference, lambda manifest: {"corpus": manifest.corpus or corpus})

    async def _check_space(self, name: str, text: StoredText, layers: ReferenceLayers) -> None:
        """Make sure that the layers of a text's windows that are not recorded yet fit on the disk. StorageError if they
        do not."""
        directory = self.references.directory
        try:
            recorded = await self.references.use(name, lambda: directory.open(name).recorded_windows())
        except NotServedError:
            recorded = set()
        missing = [size for index, size in enumerate((text.num_tokens - 1).tolist()) if index not in recorded]
        num_bytes = sum(missing) * layers.token_bytes(self.references.model.dtype)
        if num_bytes > (free_bytes := await self.references.free_bytes()):
            raise StorageError(
                f"reference {name!r}: its layers need {num_bytes / 2**30:.1f} GiB, and the disk of references has "
                f"{free_bytes / 2**30:.1f} GiB free: record fewer tokens, or make space",
                "layers",
            )

    async def _served_head(self) -> HeadFormat:
        answers = await call_workers(self.core.client, "scoremode_describe_head")
        described = next((each for each in answers if isinstance(each, dict)), None)
        if described is None:
            raise RequestError(f"this model cannot be a reference: {answers[-1]}", "model")
        return HeadFormat.model_validate(described)

    async def record(self, reference: StoredReference, settings: ScoreSettings) -> AsyncGenerator[WindowOnDisk, None]:
        """Every window in order, once it is on disk. Windows that were recorded before are read."""
        text = await self.references.text(reference)
        recorded = await self.references.in_thread(reference.name, reference.recorded_windows)
        head_ticket = None
        try:
            await self.references.in_thread(reference.name, reference.read_head)
        except BrokenFileError:
            # Workers write it while windows are recorded.
            head_ticket, identity = uuid.uuid4().hex, reference.manifest.identity
            await call_workers(self.core.client, "scoremode_write_head", reference.name, identity, head_ticket)
        windows = (
            self._read_window(reference, index, settings)
            if index in recorded
            else self._record_window(reference, index, settings)
            for index in range(len(text.windows))
        )
        most = None
        if (layers := reference.manifest.layers) is not None:
            # With the final hidden states, as the worker counts them.
            window_bytes = int(text.num_tokens.max()) * layers.token_bytes(reference.manifest.model.dtype, num_more=1)
            most = max(1, MAX_UNWRITTEN_BYTES // window_bytes)
        # One load is in the engine while another is written.
        async with aclosing(settings.queue.in_order(windows, loads=2, most=most)) as in_order:
            async for window in in_order:
                yield window
        if head_ticket is not None:
            await self._wait_until_written(reference, head_ticket, "the LM head")

    async def _read_window(self, reference: StoredReference, index: int, settings: ScoreSettings) -> WindowOnDisk:
        """A window that has a file. If that or one of its layers' is damaged, the window is recorded again."""

        def read() -> torch.Tensor:
            for boundary in _boundaries(reference):
                reference.read_stream(index, boundary)
            return reference.read_shard(index)[1]

        try:
            logprobs = await self.references.in_thread(reference.name, read)
        except BrokenFileError:
            return await self._record_window(reference, index, settings)
        return -json_logprobs(logprobs.numpy()), None

    async def _record_window(self, reference: StoredReference, index: int, settings: ScoreSettings) -> WindowOnDisk:
        window = MarkedWindow.begin("record", reference, index, settings, _boundaries(reference))
        rows = await self.core.scorer.engine.window_rows(window.engine_pass())
        await self._wait_until_written(reference, window.mark.ticket, f"window {window.mark.index}")
        # Until now its hidden states were in memory.
        window.settings.queue.done(len(window.token_ids), 0)
        await self.core.scorer.pacer.wait()
        return -json_logprobs(rows.logprobs[:, 0]), rows.ranks

    async def _wait_until_written(self, reference: StoredReference, ticket: str, what: str) -> None:
        """Wait until a worker has written a window or the LM head."""
        try:
            async with asyncio.timeout(SECONDS_TO_WRITE):
                await self.files.wait_until_done(ticket)
        except TimeoutError:
            raise self.references.unwritable(
                reference.name, f"{what} is not there after {SECONDS_TO_WRITE} s"
            ) from None
        except UnreadableFileError as error:
            # Unless the reference was deleted.
            await self.references.current(reference)
            raise self.references.unwritable(reference.name, str(error)) from None

    async def finish(self, reference: StoredReference, nlls: list[np.ndarray], settings: ScoreSettings) -> None:
        """Store the perplexity of a reference, and the floor of its layers, after all windows are recorded."""
        await self._measure_floor(reference, settings)
        figures = await asyncio.to_thread(lambda: perplexity(np.concatenate(nlls).tolist()))
        result = Result.model_validate(figures, from_attributes=True)
        await self.references.save(reference, lambda _: {"result": result})

    async def _measure_floor(self, reference: StoredReference, settings: ScoreSettings) -> None:
        """Resume the recorded model from each of its boundaries on the first window, and store how far it then is from
        itself.

        The engine is fed other tokens than the window's. So the result shows that nothing but the stream matters to the
        layers after a boundary, and that it was replaced. RequestError if the divergence is not near 0.
        """
        layers, vocab_size = reference.manifest.layers, self.core.limits.vocab_size
        if layers is None or layers.floor is not None:
            return

        def resumed(boundaries: tuple[int, ...]) -> MarkedWindow:
            window = MarkedWindow.begin("compare", reference, 0, settings, boundaries)
            return replace(window, token_ids=[(token_id + 1) % vocab_size for token_id in window.token_ids])

        windows = map(resumed, [(), *((boundary,) for boundary in range(layers.num_boundaries))])
        async with aclosing(self.comparer.compare(reference, windows, settings)) as in_order:
            means = [float(np.mean(rows.column("kld"), dtype=np.float64)) async for _, rows in in_order]
        not_resumed, *floor = means
        largest = LARGEST_FLOOR if reference.manifest.model.dtype == "float32" else LARGEST_FLOOR_16_BITS
        limit = min(largest, LARGEST_SHARE * not_resumed)
        # Not so where one is NaN or infinite.
        if not max(floor) <= limit:
            raise RequestError(
                f"layers: {layers.layer_class} cannot be measured: resumed from its own boundary "
                f"{int(np.argmax(floor))}, the model diverges from itself by {max(floor):.3g} nats, more than "
                f"{limit:g}: delete the reference, and record it without layers",
                "layers",
            )
        measured = layers.model_copy(update={"floor": floor})
        await self.references.save(reference, lambda _: {"layers": measured})


def _boundaries(reference: StoredReference) -> range:
    """The boundaries at which a reference has the residual stream."""
    layers = reference.manifest.layers
    return range(0 if layers is None else layers.num_boundaries)


def _blocks(layers: ReferenceLayers | None) -> list[LayerBlock] | None:
    return None if layers is None else layers.blocks


def _plan(texts: TextWindows, labels: list[str] | None) -> tuple[StoredText, TextPlan]:
    """Collect what a reference stores about texts and their windows."""
    places = {label: place for place, label in enumerate(dict.fromkeys(labels or ()))}
    roles = list(dict.fromkeys(role for document in texts.documents for role in document.roles))
    origins = [
        (
            document.index,
            places[labels[document.index]] if labels else -1,
            roles.index(document.roles[place]) if document.roles else -1,
        )
        for document in texts.documents
        for place in range(len(document.windows))
    ]
    documents = [(document.token_ids, document.windows) for document in texts.documents]
    text = StoredText.from_documents(documents, origins)
    plan = TextPlan(
        fingerprint=text_fingerprint(text.token_ids, text.windows, texts.method),
        method=texts.method,
        context_length=texts.context_length,
        stride=texts.stride,
        num_tokens=len(text.token_ids),
        num_windows=len(text.windows),
        num_scored=sum(window.num_scored for window in texts.windows),
        num_bytes=texts.num_bytes,
        num_words=texts.num_words,
        labels=list(places),
        roles=roles,
    )
    return text, plan
