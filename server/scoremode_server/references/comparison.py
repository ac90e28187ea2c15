"""Compares windows of a reference with the served model, and summarizes them as figures or as a noise floor."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from scoremode.kld import POSITION_DTYPES, KldPositions, statistics
from scoremode.wire.protocol import ServedModel
from scoremode.wire.references import KldRequest, KldStatistics, NoiseFloor, ReferenceRoutes
from scoremode_server.engine.sequence import ScoreSettings
from scoremode_server.errors import RequestError
from scoremode_server.references.answers import agreement
from scoremode_server.references.comparer import Comparer, MarkedWindow
from scoremode_server.references.files.directory import StoredReference
from scoremode_server.references.layers import LayerParts
from scoremode_server.rows import Rows
from scoremode_server.scoring.sequences import make_sink


@dataclass(slots=True)
class Comparison:
    """The windows of one request to `/v1/kld`."""

    comparer: Comparer
    layers: LayerParts
    request: KldRequest
    reference: StoredReference
    windows: range
    served_boundary: int | None = None
    """The served model's boundary that is the request's `from_boundary`."""
    positions: dict[int, KldPositions] = field(default_factory=dict)
    """The figures of each computed window's positions, by its index."""

    @classmethod
    async def begin(
        cls, comparer: Comparer, layers: LayerParts, request: KldRequest, *, is_adapted: bool
    ) -> "Comparison":
        """Open the reference. `is_adapted` says whether an adapter changes the served model. RequestError if that model
        cannot be compared as requested."""
        reference = await comparer.open(request.reference)
        windows = _windows(request, reference.manifest.text.num_windows)
        is_own = comparer.references.model.may_continue(reference.manifest.model) and not is_adapted
        if request.as_noise_floor and not is_own:
            raise RequestError(
                "as_noise_floor: a noise floor needs the reference's own model, without an adapter",
                "as_noise_floor",
            )
        boundary = None
        if request.from_boundary is not None:
            if request.as_noise_floor:
                raise RequestError("from_boundary: a noise floor needs the whole model", "from_boundary")
            boundary = await layers.resumable(reference, request.from_boundary, request)
        if request.routes is not None:
            if request.as_noise_floor and request.routes == "forced":
                raise RequestError("routes: a noise floor needs the model's own routes", "routes")
            await layers.check_routes(reference)
        if request.statistics:
            # Refuse a statistic that is named twice.
            make_sink("statistics", request.statistics)
        return cls(comparer, layers, request, reference, windows, boundary)

    @property
    def num_values(self) -> list[int]:
        """The size of the answer per window: how many logprobs with their token ids take as much space."""
        text = self.reference.text
        num_scored = (text.num_tokens - text.num_context)[self.windows.start : self.windows.stop]
        # Two figures take the space of a logprob with its token id. Statistics and top tokens are of both models.
        width = math.ceil(len(POSITION_DTYPES) / 2) + len(self.request.statistics) + 2 * self.request.top_logprobs
        if self.request.routes is not None:
            width += 1
        return list((width * num_scored).tolist())

    @property
    def routes(self) -> ReferenceRoutes | None:
        """The reference's mixture-of-experts layers, if their experts are compared."""
        return self.reference.manifest.routes if self.request.routes else None

    @property
    def num_tokens(self) -> int:
        return int(self.reference.text.num_tokens[self.windows.start : self.windows.stop].sum())

    async def rows(self, settings: ScoreSettings) -> AsyncGenerator[tuple[int, Rows], None]:
        """Compute the windows, and put their figures into `positions`. Yields each window's index and rows."""
        if self.served_boundary is not None:
            await self.layers.check_cuts(self.comparer, self.reference, settings)
        indices, most = list(self.windows), None
        if self.request.as_noise_floor:
            # A noise floor needs other batches than the recording, so windows are sent in reverse order. In the prefill
            # lane, in which references are recorded, fewer are also in flight. Two keep the engine busy.
            indices.reverse()
            # Two windows alone would be in the batch of their recording again.
            most = max(1, min(2, len(indices) - 1)) if self.request.lane == "prefill" else None
        begin = partial(
            MarkedWindow.begin,
            boundaries=() if self.served_boundary is None else (self.served_boundary,),
            recorded=() if self.request.from_boundary is None else (self.request.from_boundary,),
            statistics=self.request.statistics,
            routes=self.routes,
            forces_routes=self.request.routes == "forced",
        )
        windows = (begin("compare", self.reference, index, settings) for index in indices)
        async with aclosing(self.comparer.compare(self.reference, windows, settings, most)) as in_order:
            async for index, rows in in_order:
                self.positions[index] = _positions(rows)
                yield index, rows

    async def figures(self) -> KldStatistics:
        """Summarize the windows, all of which must be computed. If the request measures a noise floor, store it in the
        reference."""
        parts = [self.positions[index] for index in self.windows]
        joined = KldPositions.concatenate(parts)
        figures = await asyncio.to_thread(statistics, joined, list(map(len, parts)), self.windows.start)
        if self.request.as_noise_floor:
            references, recorded = self.comparer.references, self.reference.manifest.model
            floor = _noise_floor(figures, agreement(self.reference, joined), recorded, references.model)
            await references.save(
                self.reference, lambda manifest: manifest.noise_floor_changes(self.request.lane, floor)
            )
        return figures


def _noise_floor(
    figures: KldStatistics, agreement_lengths: list[int] | None, recorded: ServedModel, served: ServedModel
) -> NoiseFloor:
    kld = figures["kld"]
    mean = kld["mean"]
    if mean is None or None in (kld["p99"], kld["max"]):
        raise RequestError("as_noise_floor: the noise floor is infinite", "as_noise_floor")
    if mean > served.most_noise_floor:
        differing = served.computes_otherwise(recorded)
        raise RequestError(
            f"as_noise_floor: the model diverges from its own recording by {mean:.3g} nats on average, but rounding "
            f"in {served.dtype} gives at most {served.most_noise_floor:g}, so this is not a noise floor and is not "
            f"stored. Serve the model as it was recorded{differing and f' ({differing})'}, or record it again",
            "as_noise_floor",
        )
    return NoiseFloor.model_validate(
        {
            **kld,
            "num_scored": figures["num_scored"],
            "created": int(time.time()),
            "agreement_lengths": agreement_lengths,
        }
    )


def _windows(request: KldRequest, num_windows: int) -> range:
    first, last = request.windows or (0, num_windows)
    if not 0 <= first < last <= num_windows:
        raise RequestError(
            f"windows: {[first, last]} is not [first, last) within the reference's {num_windows} windows", "windows"
        )
    if request.as_noise_floor and (first, last) != (0, num_windows):
        raise RequestError("windows: a noise floor needs all windows", "windows")
    return range(first, last)


def _positions(rows: Rows) -> KldPositions:
    """Copy the figures of a window's targets. Views would keep the whole table of rows in memory, with all top
    tokens."""
    reference_ids, reference_logprobs = rows.column("reference_token_ids"), rows.column("reference_logprobs")
    views = KldPositions(
        token_ids=rows.token_ids[:, 0],
        kld=rows.column("kld"),
        reverse_kld=rows.column("reverse_kld"),
        acceptance=rows.column("acceptance"),
        logprobs=rows.logprobs[:, 0],
        reference_logprobs=reference_logprobs[:, 0],
        ranks=rows.ranks,
        reference_ranks=rows.column("reference_ranks"),
        top_token_ids=rows.token_ids[:, 1],
        reference_top_token_ids=reference_ids[:, 1],
        reference_confidence=np.exp(reference_logprobs[:, 1]),
    )
    return KldPositions.concatenate([views])
