"""The served model compared with a reference: whether they fit, and the reference's windows through the engine.

Knows no HTTP. Files are touched in threads.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
from vllm.engine.protocol import EngineClient

from scoremode_server.errors import RequestError
from scoremode_server.prefix_cache.engine import ScoringEngine
from scoremode_server.references.directory import StoredReference
from scoremode_server.references.tensor_files import BrokenFileError
from scoremode_server.scoring.reference_windows import ComparedWindow, MarkedWindow
from scoremode_server.scoring.references import References
from scoremode_server.scoring.scorer import ScoreSettings
from scoremode_server.scoring.turns import Turns
from scoremode_server.vllm_patches.window_params import call_workers


class Comparer:
    """Compares the served model with references."""

    def __init__(self, references: References, client: EngineClient, engine: ScoringEngine, turns: Turns) -> None:
        self._references = references
        self._client = client
        self._engine = engine
        self._turns = turns
        self._head_bytes: int | None = None

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
        if manifest.model.tokenizer_fingerprint != self._references.model.tokenizer_fingerprint:
            raise RequestError(f"reference {reference.name!r} was made with another tokenizer", "reference")
        longest = int((await self._references.text(reference)).num_tokens.max())
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
        text = await self._references.text(reference)

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
        await self._references.current(reference)
        try:
            await asyncio.to_thread(reference.read_shard, index)
            await asyncio.to_thread(reference.read_head)
        except BrokenFileError as error:
            raise self._references.broken(reference.name, error) from None
