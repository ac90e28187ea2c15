"""The cost of each block of decoder layers in nats, on one or several servers: what `ppl-client layers` runs, as a
library.

D(k) is the mean KL divergence of the served model from a reference when its residual stream is replaced by the
reference's at boundary k. The cost of block k is D(k) - D(k + 1), that of the embeddings is the whole divergence less
D(0), and that of the final norm and the LM head is D of the last boundary. So costs add up to the whole divergence.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from scoremode._texts import model_name
from scoremode.client import AsyncScoreClient
from scoremode.errors import ResponseError, RunError
from scoremode.metrics import finite_or_none
from scoremode.results import ResumedKld
from scoremode.runs.divergence import ComparedModel, compared_window, reference_header, same_references, unreplaced
from scoremode.runs.plan import server_header
from scoremode.runs.pool import Pool
from scoremode.runs.report import record_beginning
from scoremode.runs.run import OnProgress, StartJournal, measure
from scoremode.wire import BlockKind, Reference

PartKind = BlockKind | Literal["embeddings", "head"]
LEAST_WINDOWS = 4
"""Windows from which on the errors of costs mean something."""


@dataclass(frozen=True, slots=True)
class LayersPlan(ComparedModel):
    """The divergences to be measured, as their journal has them."""

    @property
    def num_places(self) -> int:
        """Divergences of a window: of the whole model, and from each boundary."""
        return self.layers.num_boundaries + 1

    @property
    def num_windows(self) -> int:
        return self.reference.num_windows * self.num_places

    async def measure(self, client: AsyncScoreClient, index: int) -> ResumedKld:
        window, place = divmod(index, self.num_places)
        values = await compared_window(
            client, self.server, self.reference, window, from_boundary=place - 1 if place else None
        )
        kld = values.positions.kld
        if not np.isfinite(kld).all():
            raise ResponseError(f"the divergence of window {window} is infinite, and has no parts")
        return ResumedKld(index=index, num_scored=len(kld), kld_sum=float(kld.sum(dtype="f8")))

    def nats(self, window: ResumedKld) -> float:
        return window.kld_sum

    def header(self) -> dict[str, object]:
        return {
            "kind": "layers",
            **reference_header(self.reference),
            "model": self.model,
            **server_header(self.server),
        }

    def from_line(self, line: dict[str, object]) -> ResumedKld:
        return ResumedKld.model_validate(line)


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class Cost:
    """A cost in nats per token, and its standard error with windows as independent; None for one window."""

    cost: float
    stderr: float | None

    @property
    def in_words(self) -> str:
        return f"{self.cost:.6f} ± {'-' if self.stderr is None else f'{self.stderr:.6f}'}"


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class PartCost(Cost):
    """The cost of a part of the model."""

    name: str
    """A block's as the checkpoint's modules, such as `model.layers.11.mlp`."""
    kind: PartKind
    modules: list[str]
    floor: float
    """What the recorded model costs here from its own boundaries, by rounding in another place."""

    @property
    def is_above_floor(self) -> bool:
        return self.cost > self.floor


@dataclass(frozen=True, slots=True, eq=False)
class LayersMeasurement(ComparedModel):
    """The cost of each part of a served model, next to a reference."""

    window_sizes: NDArray[np.int64]
    """Positions of each window."""
    kld_sums: NDArray[np.float64]
    """[windows, boundaries + 1]: of each window the sum of its divergences, of the whole model first."""
    seconds: float

    @property
    def whole(self) -> Cost:
        return self._cost(self.kld_sums[:, 0])

    @property
    def parts(self) -> list[PartCost]:
        """The embeddings, every block, and the final norm with the LM head."""
        floor = self.layers.floor or [0.0]
        names: list[tuple[str, PartKind, list[str]]] = [
            ("embeddings", "embeddings", []),
            *((block.name, block.kind, block.modules) for block in self.layers.blocks),
            ("head", "head", []),
        ]
        # Of the whole model and after the head there is nothing to resume from.
        floors = [max(pair) for pair in zip([0.0, *floor], [*floor, 0.0], strict=True)]
        sums = [*(self.kld_sums[:, :-1] - self.kld_sums[:, 1:]).T, self.kld_sums[:, -1]]
        return [
            PartCost(**asdict(self._cost(of_windows)), name=name, kind=kind, modules=modules, floor=at_floor)
            for of_windows, (name, kind, modules), at_floor in zip(sums, names, floors, strict=True)
        ]

    @property
    def blocks(self) -> list[PartCost]:
        return self.parts[1:-1]

    def without(self, blocks: Sequence[PartCost]) -> Cost:
        """The divergence to expect if blocks are kept as the reference has them."""
        return self._cost(self.sums_without(blocks))

    def sums_without(self, blocks: Sequence[PartCost]) -> NDArray[np.float64]:
        """[windows], of each the sum of divergences to expect then."""
        places = np.array([index + 1 for index, block in enumerate(self.blocks) if block in blocks], np.int64)
        kept = (self.kld_sums[:, places] - self.kld_sums[:, places + 1]).sum(1)
        sums: NDArray[np.float64] = self.kld_sums[:, 0] - kept
        return sums

    def _cost(self, sums: NDArray[np.float64]) -> Cost:
        num_scored, num_windows = self.window_sizes.sum(), len(sums)
        mean = sums.sum() / num_scored
        stderr = None
        if num_windows > 1:
            squares = ((sums - mean * self.window_sizes) ** 2).sum()
            stderr = float(np.sqrt(num_windows / (num_windows - 1) * squares) / num_scored)
        return Cost(float(mean), stderr)

    def record(self, urls: Sequence[str]) -> dict[str, object]:
        parts = [{**asdict(part), "is_above_floor": part.is_above_floor} for part in self.parts]
        return {
            **record_beginning("layers", urls, self.model, self.server),
            "reference": finite_or_none(self.reference.model_dump()) | {"model": model_name(self.reference.model)},
            "whole": asdict(self.whole),
            "embeddings": parts[0],
            "blocks": parts[1:-1],
            "head": parts[-1],
            "floor": self.layers.floor,
            "seconds": self.seconds,
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"kld_sums": self.kld_sums, "window_sizes": self.window_sizes}


def few_windows(reference: Reference) -> list[str]:
    """A sentence where a reference has too few windows to tell costs from chance; none where it has enough."""
    number = reference.num_windows
    if number >= LEAST_WINDOWS:
        return []
    subject = "1 window decides" if number == 1 else f"{number} windows decide"
    return [f"{subject} nothing: record 4,096 tokens in windows of 1,024 (the default of ppl-client record --layers)."]


def shares(parts: Sequence[Cost]) -> list[float]:
    """The share of each cost in the sum of those above 0, so that no sum of shares exceeds 1; 0 for the others."""
    total = sum(max(part.cost, 0) for part in parts)
    return [max(part.cost, 0) / total if total else 0.0 for part in parts]


async def measure_layers(
    clients: AsyncScoreClient | Sequence[AsyncScoreClient],
    name: str,
    *,
    concurrency: int | None = None,
    start_journal: StartJournal[ResumedKld] | None = None,
    on_progress: OnProgress | None = None,
) -> LayersMeasurement:
    """Measure what each block of a served model's decoder layers costs, spread over servers of the same model.

    Args:
        clients: One, or one for each server; all must have the reference, and run with `--enforce-eager`.
        name: Of a complete reference that was recorded with `layers`.
        concurrency: As for `measure_kld`, with its other arguments.
        start_journal: Opens the journal once it is known what is to be measured.
        on_progress: Called for each window and boundary.

    Raises:
        ScoremodeError: as `measure_kld`; or the reference has no layers, or the served model has others.
    """
    pool = await Pool.connect(clients, concurrency)
    reference = await same_references(pool, name)
    if reference.layers is None or not reference.complete:
        what = "is not complete" if reference.layers is not None else "was recorded without layers"
        raise RunError(f"reference {name} {what}: record it on a server of the original (ppl-client record --layers)")
    plan = LayersPlan(pool.info, pool.clients[0].model or pool.info.model, reference)
    run = await measure(plan, pool, start_journal, on_progress)
    windows, seconds = run.in_order(), run.seconds()
    await unreplaced(pool.clients[0], reference)
    sizes = np.array([window.num_scored for window in windows]).reshape(-1, plan.num_places)
    if (sizes != sizes[:, :1]).any() or sizes[:, 0].sum() != reference.num_scored:
        raise ResponseError(f"the server's windows do not have the {reference.num_scored} positions of the reference")
    sums = np.array([window.kld_sum for window in windows]).reshape(sizes.shape)
    return LayersMeasurement(plan.server, plan.model, reference, sizes[:, 0], sums, seconds)
