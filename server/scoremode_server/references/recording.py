"""Records the served model as a reference: from a request's text to the reference's perplexity. The engine's workers
write the files, and report when they are done."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import numpy as np
from vllm.logger import init_logger

from scoremode.metrics import perplexity
from scoremode.wire.references import Reference, ReferenceAnswers, ReferenceLayers, ReferenceRequest
from scoremode_server.engine.sequence import ScoreSettings
from scoremode_server.errors import NotServedError, RequestError, StorageError
from scoremode_server.references.comparer import Comparer, MarkedWindow
from scoremode_server.references.exchange import UnreadableFileError
from scoremode_server.references.files.directory import StoredReference, StoredText
from scoremode_server.references.files.manifest import HeadFormat, Manifest, Result
from scoremode_server.references.files.tensors import BrokenFileError
from scoremode_server.references.layers import LayerParts
from scoremode_server.references.plans import check_same, flaw_of_cuts, plan_texts
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

WindowOnDisk = tuple[np.ndarray, np.ndarray | None]
"""NLLs [scored] float64 in nats, and ranks [scored]; ranks are None if the window was on disk before this request."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The reference of one request to `/v1/references`, from the request's text to the reference's perplexity."""

    references: References
    comparer: Comparer
    reference: StoredReference

    @classmethod
    async def begin(
        cls,
        references: References,
        comparer: Comparer,
        layers: LayerParts,
        request: ReferenceRequest,
        texts: TextWindows,
        *,
        is_adapted: bool,
    ) -> "Recording":
        """Create the reference, or open an incomplete one of the same model and text. `is_adapted` says whether an
        adapter changes the served model. RequestError if that model cannot be recorded as requested, ConflictError if
        another reference has the name."""
        if request.lane != "prefill" or request.context is not None:
            raise RequestError("lane: a reference is recorded in the prefill lane, for all lanes", "lane")
        if is_adapted:
            raise RequestError("an adapter cannot be recorded as a reference", "model")
        text, plan = await asyncio.to_thread(plan_texts, texts, request.labels)
        served_layers = await layers.served() if request.layers else None
        if served_layers is not None:
            await _check_space(references, request.name, text, served_layers)
        routes = await layers.served_routes() if request.routes else None
        answers = request.answers
        new = Manifest(
            identity=uuid.uuid4().hex,
            created=int(time.time()),
            model=references.model,
            head=await _served_head(comparer.core),
            text=plan,
            corpus=request.corpus,
            layers=served_layers,
            routes=routes,
            answers=None
            if answers is None
            else ReferenceAnswers(**answers.model_dump(exclude={"data"}), num_answers=len(answers.data)),
        )
        create = partial(references.directory.create, request.name, new, text, () if answers is None else answers.data)
        try:
            reference = await references.in_thread(request.name, create)
        except FileExistsError:
            reference = await _resumed(references, request.name, new, text)
        except OSError as error:
            raise references.unwritable(request.name, error) from None
        # Windows are cut from the text on the event loop: read it in a thread first.
        await references.text(reference)
        return cls(references, comparer, reference)

    async def windows(self, settings: ScoreSettings) -> AsyncGenerator[WindowOnDisk, None]:
        """Yield every window in order, once it is on disk. Windows that were recorded before are read."""
        reference = self.reference
        recorded, has_head = await self.references.in_thread(
            reference.name, lambda: (reference.recorded_windows(), reference.has_head())
        )
        head_ticket = None
        if not has_head:
            # Workers write the LM head while windows are recorded.
            head_ticket, identity = uuid.uuid4().hex, reference.manifest.identity
            await call_workers(self.comparer.core.client, "scoremode_write_head", reference.name, identity, head_ticket)
        windows = (
            self._read_window(index, settings)
            if index in recorded
            else self._record_window(self._begin(index, settings))
            for index in range(len(reference.text.windows))
        )
        most = None
        if (layers := reference.manifest.layers) is not None:
            # The worker counts the final hidden states too.
            longest = int(reference.text.num_tokens.max())
            most = max(
                1, MAX_UNWRITTEN_BYTES // (longest * layers.token_bytes(reference.manifest.model.dtype, num_more=1))
            )
        # One load is in the engine while another is written.
        async with aclosing(settings.queue.in_order(windows, loads=2, most=most)) as in_order:
            async for window in in_order:
                yield window
        if head_ticket is not None:
            await self._wait_until_written(head_ticket, "the LM head")

    async def _read_window(self, index: int, settings: ScoreSettings) -> WindowOnDisk:
        """Read a window that has a file. If that file or one of its layers' is damaged, record the window again."""
        reference = self.reference
        try:
            logprobs = await self.references.in_thread(reference.name, lambda: reference.read_window(index))
        except BrokenFileError:
            return await self._record_window(self._begin(index, settings))
        return -json_logprobs(logprobs.numpy()), None

    def _begin(self, index: int, settings: ScoreSettings) -> MarkedWindow:
        boundaries, routes = self.reference.boundaries, self.reference.manifest.routes
        return MarkedWindow.begin("record", self.reference, index, settings, boundaries, routes=routes)

    async def _record_window(self, window: MarkedWindow) -> WindowOnDisk:
        scorer = self.comparer.core.scorer
        rows = await scorer.engine.window_rows(window.engine_pass())
        await self._wait_until_written(window.mark.ticket, f"window {window.mark.index}")
        # The workers do not hold its hidden states any more.
        window.settings.queue.done(len(window.token_ids), 0)
        await scorer.pacer.wait()
        return -json_logprobs(rows.logprobs[:, 0]), rows.ranks

    async def _wait_until_written(self, ticket: str, what: str) -> None:
        """Wait until a worker has written a window or the LM head."""
        try:
            async with asyncio.timeout(SECONDS_TO_WRITE):
                await self.comparer.files.wait_until_done(ticket)
        except TimeoutError:
            reason = f"{what} is not on disk after {SECONDS_TO_WRITE} s"
            raise self.references.unwritable(self.reference.name, reason) from None
        except UnreadableFileError as error:
            # This raises another error if the reference was deleted.
            await self.references.current(self.reference)
            raise self.references.unwritable(self.reference.name, str(error)) from None

    async def finish(self, nlls: list[np.ndarray], settings: ScoreSettings) -> Reference:
        """Store the reference's perplexity and the floor of its layers, and describe the reference. `nlls` has those of
        all windows: [scored] each, float64, nats."""
        layers = self.reference.manifest.layers
        if layers is not None and layers.floor is None:
            measured = layers.model_copy(update={"floor": await self._floor(layers, settings)})
            await self.references.save(self.reference, lambda _: {"layers": measured})
        figures = await asyncio.to_thread(lambda: perplexity(np.concatenate(nlls).tolist()))
        result = Result.model_validate(figures, from_attributes=True)
        await self.references.save(self.reference, lambda _: {"result": result})
        return await self.references.describe(self.reference.name)

    async def _floor(self, layers: ReferenceLayers, settings: ScoreSettings) -> list[float]:
        """Resume the recorded model from each boundary on the first window, fed with other tokens, and return its
        divergence from itself, per boundary in nats. RequestError if it is not near 0."""
        cuts = [{}, *({boundary: boundary} for boundary in range(layers.num_boundaries))]
        not_resumed, *floor = await self.comparer.resumed(self.reference, cuts, settings, 1)
        if flaw := flaw_of_cuts(layers, self.reference.manifest.model.dtype, floor, not_resumed):
            raise RequestError(f"layers: {flaw}: record it without layers", "layers")
        return floor


async def _resumed(references: References, name: str, new: Manifest, text: StoredText) -> StoredReference:
    """Open a reference of that name to record the rest of it. ConflictError if it is not the one that `new` and `text`
    describe."""
    reference = await references.open(name)
    await references.text(reference)
    check_same(reference, new, text)
    if differing := references.model.computes_otherwise(reference.manifest.model):
        logger.warning("Reference %s was begun on other GPUs or kernels: here %s", name, differing)
    return await references.save(reference, lambda manifest: {"corpus": manifest.corpus or new.corpus})


async def _check_space(references: References, name: str, text: StoredText, layers: ReferenceLayers) -> None:
    """StorageError if the disk has no space for the layers of windows that are not recorded yet."""
    try:
        recorded = await references.use(name, lambda: references.directory.open(name).recorded_windows())
    except NotServedError:
        recorded = set()
    missing = [size for index, size in enumerate((text.num_tokens - 1).tolist()) if index not in recorded]
    num_bytes = sum(missing) * layers.token_bytes(references.model.dtype)
    if num_bytes > (free_bytes := await references.free_bytes()):
        raise StorageError(
            f"reference {name!r}: its layers need {num_bytes / 2**30:.1f} GiB, and the disk of references has "
            f"{free_bytes / 2**30:.1f} GiB free: record fewer tokens, or make space",
            "layers",
        )


async def _served_head(core: Core) -> HeadFormat:
    described = await call_workers(core.client, "scoremode_describe_head")
    head = next((answer for answer in described if isinstance(answer, dict)), None)
    if head is None:
        raise RequestError(f"this model cannot be a reference: {described[-1]}", "model")
    return HeadFormat.model_validate(head)
