"""Records the served model as a reference. The engine's workers write the files, and report when they are done."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
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

# vLLM prints the messages of loggers below its own.
logger = init_logger("vllm.scoremode.references")

SECONDS_TO_WRITE = 120
"""Time limit for a computed window to be on disk, and for the LM head after all windows."""

LARGEST_FLOOR = 1e-3
"""Nats by which a resumed float32 model may diverge from itself, because it rounds in another place. A wrongly cut
stream gives tenths."""
LARGEST_FLOOR_16_BITS = 1e-2
LARGEST_SHARE = 0.01
"""Limit as a share of the divergence that other tokens cause without a stream: where logits hardly differ, even a
wrongly cut stream gives little."""

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
        """Create the reference to record into, or open an incomplete one of the same model and text. `labels` has one
        label per text or conversation. If `layers` are given, the residual stream at their boundaries is recorded. The
        texts were made from `answers`. ConflictError if another reference has that name."""
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
        stored = reference.manifest
        if not model.may_continue(stored.model):
            raise ConflictError(f"there is a reference {name!r} already, of another model", "name")
        if stored.text.fingerprint != plan.fingerprint:
            hint = " (a chat template that writes the date renders another text each day)"
            raise ConflictError(
                f"there is a reference {name!r} already, of another text or other windows"
                f"{hint if plan.method == 'conversation' else ''}",
                "name",
            )
        stored_text = await self.references.text(reference)
        if stored.text.labels != plan.labels or not np.array_equal(stored_text.origins, text.origins):
            raise ConflictError(f"there is a reference {name!r} already, of this text with other labels", "labels")
        if _blocks(stored.layers) != _blocks(layers):
            recorded = "without layers" if stored.layers is None else "with layers"
            raise ConflictError(
                f"there is a reference {name!r} already, recorded {recorded}: delete it, or choose another name",
                "layers",
            )
        if differing := model.computes_otherwise(stored.model):
            logger.warning("Reference %s was begun on other GPUs or kernels: here %s", name, differing)
        return await self.references.save(reference, lambda manifest: {"corpus": manifest.corpus or corpus})

    async def _check_space(self, name: str, text: StoredText, layers: ReferenceLayers) -> None:
        """StorageError if the disk has no space for the layers of windows that are not recorded yet."""
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
        described = next((answer for answer in answers if isinstance(answer, dict)), None)
        if described is None:
            raise RequestError(f"this model cannot be a reference: {answers[-1]}", "model")
        return HeadFormat.model_validate(described)

    async def record(self, reference: StoredReference, settings: ScoreSettings) -> AsyncGenerator[WindowOnDisk, None]:
        """Yield every window in order, once it is on disk. Windows that were recorded before are read."""
        text = await self.references.text(reference)
        recorded, has_head = await self.references.in_thread(
            reference.name, lambda: (reference.recorded_windows(), reference.has_head())
        )
        head_ticket = None
        if not has_head:
            # Workers write the LM head while windows are recorded.
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
            # The worker counts the final hidden states too.
            window_bytes = int(text.num_tokens.max()) * layers.token_bytes(reference.manifest.model.dtype, num_more=1)
            most = max(1, MAX_UNWRITTEN_BYTES // window_bytes)
        # One load is in the engine while another is written.
        async with aclosing(settings.queue.in_order(windows, loads=2, most=most)) as in_order:
            async for window in in_order:
                yield window
        if head_ticket is not None:
            await self._wait_until_written(reference, head_ticket, "the LM head")

    async def _read_window(self, reference: StoredReference, index: int, settings: ScoreSettings) -> WindowOnDisk:
        """Read a window that has a file. If that file or one of its layers' is damaged, record the window again."""
        try:
            logprobs = await self.references.in_thread(reference.name, lambda: reference.read_window(index))
        except BrokenFileError:
            return await self._record_window(reference, index, settings)
        return -json_logprobs(logprobs.numpy()), None

    async def _record_window(self, reference: StoredReference, index: int, settings: ScoreSettings) -> WindowOnDisk:
        window = MarkedWindow.begin("record", reference, index, settings, reference.boundaries)
        rows = await self.core.scorer.engine.window_rows(window.engine_pass())
        await self._wait_until_written(reference, window.mark.ticket, f"window {window.mark.index}")
        # The workers do not hold its hidden states any more.
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
                reference.name, f"{what} is not on disk after {SECONDS_TO_WRITE} s"
            ) from None
        except UnreadableFileError as error:
            # This raises another error if the reference was deleted.
            await self.references.current(reference)
            raise self.references.unwritable(reference.name, str(error)) from None

    async def finish(self, reference: StoredReference, nlls: list[np.ndarray], settings: ScoreSettings) -> None:
        """Store the perplexity of a reference, and the floor of its layers, after all windows are recorded."""
        await self._measure_floor(reference, settings)
        figures = await asyncio.to_thread(lambda: perplexity(np.concatenate(nlls).tolist()))
        result = Result.model_validate(figures, from_attributes=True)
        await self.references.save(reference, lambda _: {"result": result})

    async def _measure_floor(self, reference: StoredReference, settings: ScoreSettings) -> None:
        """Resume the recorded model from each boundary on the first window, and store its divergence from itself.

        The engine is fed other tokens than the window's. If the divergence is near 0 all the same, the stream was
        replaced, and the layers after the boundary depend on it alone. RequestError if it is not near 0.
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
        # Refuse NaN too.
        if not max(floor) <= limit:
            raise RequestError(
                f"layers: {layers.layer_class} cannot be measured: resumed from its own boundary "
                f"{int(np.argmax(floor))}, the model diverges from itself by {max(floor):.3g} nats, more than "
                f"{limit:g}: delete the reference, and record it without layers",
                "layers",
            )
        measured = layers.model_copy(update={"floor": floor})
        await self.references.save(reference, lambda _: {"layers": measured})


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
