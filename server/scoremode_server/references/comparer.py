"""Sends windows of a reference through the engine, to compare them with the served model or to export them. Threads and
workers read files; the event loop reads none."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from vllm.utils import random_uuid

from scoremode.wire.base_file import BaseFile
from scoremode.wire.protocol import Statistic
from scoremode.wire.references import ReferenceRoutes
from scoremode_server.engine.sequence import EnginePass, ScoreSettings, TokenSequence
from scoremode_server.errors import BusyError, RequestError
from scoremode_server.references.exchange import (
    STEPS_READ_AHEAD,
    LeaseEndedError,
    UnreadableFileError,
    WorkerFiles,
)
from scoremode_server.references.files.directory import StoredReference
from scoremode_server.references.service import References
from scoremode_server.references.worker.orders import SINK, WindowMark, sink_columns
from scoremode_server.rows import Columns, Rows
from scoremode_server.scoring.core import Core
from scoremode_server.settings import BYTES_AHEAD, EXPORTED_BYTES

T = TypeVar("T")

SECONDS_TO_WAIT = 45.0
"""How long a request waits while the engine compares with other references. Proxies cut off an answer that has sent no
byte for 60 seconds. If the client tries again, its reference has kept its place in the queue."""


def llama_cpp_header(reference: StoredReference) -> bytes:
    """Write the header of llama.cpp's base file: context length, vocabulary size, number of windows, and their tokens.
    The tokens are the text's: llama-perplexity itself replaces each window's first token with BOS."""
    file, plan, text = base_file_of(reference), reference.manifest.text, reference.text
    if plan.method != "llama.cpp":
        raise RequestError(
            f"reference {reference.name!r} was recorded with method {plan.method!r}, but llama-perplexity reads "
            "only windows of method 'llama.cpp'",
            "name",
        )
    ends = (text.windows[:, 0] + text.windows[:, 2])[:, None]
    tokens = text.token_ids[ends + np.arange(-file.context_length, 0)]
    numbers = np.array([file.context_length, file.vocab_size, file.num_windows])
    return b"".join((b"_logits_", numbers.astype("<i4").data, np.ascontiguousarray(tokens, "<i4").data))


def base_file_of(reference: StoredReference) -> BaseFile:
    """The sizes of llama.cpp's base file for a reference that was recorded with method `llama.cpp`."""
    head, plan = reference.manifest.head, reference.manifest.text
    return BaseFile(plan.context_length, plan.num_windows, plan.num_scored, head.vocab_size)


@dataclass(frozen=True, slots=True)
class MarkedWindow:
    """A window's tokens, and the mark that tells workers what to do with its hidden states."""

    token_ids: list[int]
    first: int
    """Position of the first target."""
    mark: WindowMark
    settings: ScoreSettings
    """`top_logprobs` applies to the served model and to the reference."""
    sink_columns: Columns

    @classmethod
    def begin(
        cls,
        action: Literal["record", "compare", "export"],
        reference: StoredReference,
        index: int,
        settings: ScoreSettings,
        boundaries: Iterable[int] = (),
        recorded: Iterable[int] = (),
        statistics: Iterable[Statistic] = (),
        *,
        routes: ReferenceRoutes | None = None,
        forces_routes: bool = False,
    ) -> "MarkedWindow":
        """Make a window of a reference whose text has been read. The request's queue counts the window's tokens until
        the window is done. `boundaries` and `recorded` say where the residual stream is recorded or replaced: see
        `WindowMark`. `statistics` names figures to compute for both models. `routes` has the layers whose experts are
        recorded or compared; `forces_routes` has all tokens computed with the reference's."""
        token_ids, first = reference.text.window(index)
        settings.queue.add(1, len(token_ids))
        mark = WindowMark(
            action=action,
            reference=reference.name,
            identity=reference.manifest.identity,
            index=index,
            num_scored=len(token_ids) - first,
            ticket=random_uuid(),
            head=f"{reference.name}/{reference.manifest.identity}",
            num_fed=len(token_ids) - 1,
            boundaries=tuple(boundaries),
            statistics=tuple(statistics),
            recorded=tuple(recorded),
            num_routed_layers=0 if routes is None else len(routes.layers),
            forces_routes=forces_routes,
        )
        columns = sink_columns(mark, settings.top_logprobs, reference.manifest.head.vocab_size)
        return cls(token_ids, first, mark, settings, columns)

    def engine_pass(
        self, rank: int | None = None, inside: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> EnginePass:
        """Make the window's pass, which enters a context of `inside` while it is in the engine. `rank` is the
        data-parallel rank that has read the window's files; None means any."""
        settings = self.settings
        if rank is not None:
            settings = replace(settings, options={**settings.options, "data_parallel_rank": rank})
        sinks: dict[str, Any] = {SINK: msgspec.to_builtins(self.mark)}
        if self.mark.statistics:
            sinks["statistics"] = list(self.mark.statistics)
        sequence = TokenSequence(
            context=self.token_ids,
            first=self.first,
            sinks=sinks,
            sink_columns=self.sink_columns,
            may_be_cached=False,
        )
        # A request may send the same window once per boundary.
        request_id = f"{settings.request_id}-{self.mark.index}-{self.mark.ticket}"
        return EnginePass(sequence, inside=inside).begin(settings, request_id)


@dataclass(slots=True)
class Comparer:
    """Compares the served model with a reference, window by window."""

    references: References
    core: Core
    files: WorkerFiles
    _exported_bytes: int = 0
    """Bytes that windows of running exports may take between the engine and their clients."""

    async def open(self, name: str) -> StoredReference:
        """Open a reference and read its text. RequestError if the served model cannot be compared with it."""
        reference = await self.references.open(name)
        head, model, limits = reference.manifest.head, reference.manifest.model, self.core.limits
        if reference.manifest.result is None:
            reason = "is not complete: record it again to resume"
        elif head.vocab_size != limits.vocab_size:
            reason = f"has a vocabulary of {head.vocab_size} tokens, and the served model one of {limits.vocab_size}"
        elif model.tokenizer_fingerprint != self.references.model.tokenizer_fingerprint:
            reason = "was made with another tokenizer: serve the model with --tokenizer ORIGINAL"
        elif (longest := int((await self.references.text(reference)).num_tokens.max())) > limits.max_model_len:
            reason = f"has windows of {longest} tokens, and the served model takes {limits.max_model_len}"
        else:
            return reference
        raise RequestError(f"reference {name!r} {reason}", "reference")

    def compare(
        self,
        reference: StoredReference,
        windows: Iterable[MarkedWindow],
        settings: ScoreSettings,
        most: int | None = None,
    ) -> AsyncGenerator[tuple[int, Rows], None]:
        """Score windows of an opened reference with the served model, at most `most` at once. A window begins when it
        is read from `windows`. Yields each window's index and rows in order: its scores, and the columns of
        `kl_divergence.compare`. A divergence may be infinite."""

        async def compared(window: MarkedWindow) -> tuple[int, Rows]:
            rows = await self._rows(reference, window)
            await self.core.scorer.pacer.wait()
            return window.mark.index, rows

        num_layers = 0 if reference.manifest.routes is None else len(reference.manifest.routes.layers)
        window_bytes = (16 * (1 + settings.top_logprobs) + 4 * num_layers) * int(reference.text.num_tokens.max())
        num_ahead = min(self.core.admission.size.sequences + 1, max(1, BYTES_AHEAD // window_bytes))
        # Begin more windows than the engine can take, because workers report files only between steps.
        num_ahead = num_ahead if most is None else min(most, num_ahead)
        return self._in_order(reference, windows, settings, compared, loads=STEPS_READ_AHEAD, most=num_ahead)

    async def resumed(
        self, reference: StoredReference, cuts: Iterable[Mapping[int, int]], settings: ScoreSettings, shift: int
    ) -> list[float]:
        """Compute mean divergences on the first window, in nats. The served model is fed tokens that are moved by
        `shift`, and resumed for each of `cuts` from a boundary of the reference, given with the served model's; or not
        resumed if there is none. If other tokens give the same divergence, the stream was replaced, and the layers
        after it depend on it alone."""
        vocab_size = self.core.limits.vocab_size

        def moved(cut: Mapping[int, int]) -> MarkedWindow:
            window = MarkedWindow.begin("compare", reference, 0, settings, cut.values(), cut)
            return replace(window, token_ids=[(token_id + shift) % vocab_size for token_id in window.token_ids])

        async with aclosing(self.compare(reference, map(moved, cuts), settings)) as in_order:
            return [float(np.mean(rows.column("kld"), dtype=np.float64)) async for _, rows in in_order]

    async def export(
        self, reference: StoredReference, indices: range, settings: ScoreSettings
    ) -> AsyncGenerator[np.ndarray, None]:
        """Yield an opened reference's distributions at each window's targets in llama.cpp's format: int32 [scored,
        words]. The served model scores the windows too, but its scores are not used. BusyError if other exports leave
        too little of `EXPORTED_BYTES`."""

        async def exported(window: MarkedWindow) -> np.ndarray:
            rows = await self._rows(reference, window)
            return rows.narrowed(window.sink_columns).table

        window_bytes = base_file_of(reference).window_size
        num_ahead = max(1, BYTES_AHEAD // window_bytes)
        num_bytes = num_ahead * window_bytes
        if self._exported_bytes and self._exported_bytes + num_bytes > EXPORTED_BYTES:
            raise BusyError(
                f"exports to other clients use {self._exported_bytes} of {EXPORTED_BYTES} bytes: try again later",
                None,
            )
        self._exported_bytes += num_bytes
        try:
            windows = (MarkedWindow.begin("export", reference, index, settings) for index in indices)
            async with aclosing(self._in_order(reference, windows, settings, exported, most=num_ahead)) as in_order:
                async for rows in in_order:
                    yield rows
        finally:
            self._exported_bytes -= num_bytes

    async def _in_order(
        self,
        reference: StoredReference,
        windows: Iterable[MarkedWindow],
        settings: ScoreSettings,
        compute: Callable[[MarkedWindow], Coroutine[Any, Any, T]],
        **how_many: Any,
    ) -> AsyncGenerator[T, None]:
        async with aclosing(settings.queue.in_order(map(compute, windows), **how_many)) as in_order:
            async for result in in_order:
                yield result
        # Fail if the reference was deleted meanwhile.
        await self.references.current(reference)

    async def _rows(self, reference: StoredReference, window: MarkedWindow) -> Rows:
        """Have the engine compute a window. BusyError if the engine compares with other references for
        `SECONDS_TO_WAIT`. Once a window of the request has entered the engine, the request's other windows wait without
        that limit."""
        head, queue, options = reference.manifest.head, window.settings.queue, window.settings.options
        # If the window has boundaries, workers hold a second tensor for it: the residual stream.
        num_tokens = len(window.token_ids) * (2 if window.mark.boundaries else 1)
        rank = options.get("data_parallel_rank")
        while True:
            wait = SECONDS_TO_WAIT if queue.entered_at is None else None
            try:
                async with self.files.loaded(window.mark, head, num_tokens, rank, wait) as (engine_rank, inside):
                    rows = await self.core.scorer.engine.window_rows(window.engine_pass(engine_rank, inside))
                queue.done(len(window.token_ids), 0)
                return rows
            except UnreadableFileError as error:
                await self.references.current(reference)
                raise self.references.broken(reference.name, str(error)) from None
            except LeaseEndedError:
                continue
