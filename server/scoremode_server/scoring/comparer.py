"""Compares the served model with a reference, window by window. Threads and workers read files, the event loop none."""

from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.engine.protocol import EngineClient

from scoremode_server.errors import RequestError
from scoremode_server.prefix_cache.engine import ScoringEngine
from scoremode_server.references.directory import StoredReference
from scoremode_server.references.tensor_files import BrokenFileError
from scoremode_server.scoring.reference_windows import MarkedWindow, WindowComparison, mark_window
from scoremode_server.scoring.references import References
from scoremode_server.scoring.scorer import ScoreSettings
from scoremode_server.scoring.turns import Turns
from scoremode_server.scoring.worker_files import STEPS_READ, UnreadableFileError, WorkerFiles
from scoremode_server.settings import REFERENCE_HEADS_FLAG
from scoremode_server.vllm_patches.worker_extension import call_workers


@dataclass(slots=True)
class Comparer:
    references: References
    client: EngineClient
    engine: ScoringEngine
    turns: Turns
    files: WorkerFiles
    _head_bytes: int | None = None

    async def check(self, reference: StoredReference, vocab_size: int, max_model_len: int) -> None:
        """Refuse a reference that the served model cannot be compared with."""
        if (reason := await self._reason(reference, vocab_size, max_model_len)) is not None:
            raise RequestError(reason, "reference")

    async def _reason(self, reference: StoredReference, vocab_size: int, max_model_len: int) -> str | None:
        named, manifest = f"reference {reference.name!r}", reference.manifest
        head = manifest.head
        if head is None or manifest.result is None:
            return f"{named} is not complete: record it again to resume"
        if head.vocab_size != vocab_size:
            return f"{named} has a vocabulary of {head.vocab_size} tokens, and the served model one of {vocab_size}"
        if manifest.model.tokenizer_fingerprint != self.references.model.tokenizer_fingerprint:
            return f"{named} was made with another tokenizer"
        text = await self.references.text(reference)
        if len(text.windows) != manifest.text.num_windows:
            missing = f"{len(text.windows)} of {manifest.text.num_windows} windows are there"
            raise self.references.broken(reference.name, BrokenFileError(missing))
        if (longest := int(text.num_tokens.max())) > max_model_len:
            return f"{named} has windows of {longest} tokens, and the served model takes {max_model_len}"
        if head.num_bytes > (reserved := await self._reserved_bytes()):
            return (
                f"the LM head of {named} has {head.num_bytes} bytes, and this server reserved {reserved}: start it "
                f"again now that the reference is there, or with {REFERENCE_HEADS_FLAG}"
            )
        return None

    async def _reserved_bytes(self) -> int:
        """Bytes of the largest LM head that fits, which stays the same. Workers answer between two steps."""
        if self._head_bytes is None:
            answers = await call_workers(self.client, "scoremode_head_bytes")
            self._head_bytes = min(answer for answer in answers if answer is not None)
        return self._head_bytes

    async def compare(
        self, reference: StoredReference, indices: list[int], num_top: int, settings: ScoreSettings
    ) -> AsyncGenerator[WindowComparison, None]:
        """Score the windows of a reference with the served model, in the order of `indices`."""
        text = await self.references.text(reference)
        stamp = await self.references.in_thread(reference.name, reference.head_stamp)

        def windows() -> Iterator[Coroutine[Any, Any, WindowComparison]]:
            for index in indices:
                marked = mark_window("compare", reference, text, index, stamp)
                yield self._compared(reference, MarkedWindow(*marked, settings, num_top))

        # Twice as many windows are read as are in the engine: the workers answer between two of its steps.
        async with aclosing(settings.queue.in_order(windows(), loads=STEPS_READ)) as compared:
            async for window in compared:
                yield window
        # Fail if the reference was deleted meanwhile.
        await self.references.current(reference)

    async def _compared(self, reference: StoredReference, window: MarkedWindow) -> WindowComparison:
        head, rank = reference.manifest.head, window.settings.options.get("data_parallel_rank")
        assert head is not None
        try:
            async with self.files.loaded(window.mark, head, len(window.token_ids), rank) as (gate, loaded_rank):
                columns = await self.engine.prompt_columns(window.request(gate, loaded_rank))
        except UnreadableFileError as error:
            await self.references.current(reference)
            raise self.references.broken(reference.name, BrokenFileError(str(error))) from None
        window.done()
        # Infinite divergences are numbers.
        window.check_rows(np.any(np.isnan(columns[1]), axis=1))
        await self.turns.wait()
        return WindowComparison.from_columns(window.mark.index, columns)
