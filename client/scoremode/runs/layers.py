"""Measures the cost of each block of decoder layers in nats, on one or several servers, for `ppl-client layers` and for
Python.

D(k) is the mean KL divergence of the served model from a reference whose residual stream replaces the model's at
boundary k. The cost of block k is D(k) - D(k + 1). The embeddings cost the whole divergence minus D(0), and the final
norm and the LM head together cost D of the last boundary. So costs add up to the whole divergence.
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
from scoremode.kld import error_of_sums
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
"""The fewest windows that give costs meaningful standard errors."""


@dataclass(frozen=True, slots=True)
class LayersPlan(ComparedModel):
    """The divergences to measure, as the `Measurement` of their journal."""

    boundaries: tuple[int, ...]
    """The boundaries that the served model has too, by their numbers in the stored reference. `layers` has these
    alone."""

    @property
    def num_places(self) -> int:
        """How many divergences a window has: one for the whole model, and one per boundary."""
        return self.layers.num_boundaries + 1

    @property
    def num_windows(self) -> int:
        return self.reference.num_windows * self.num_places

    async def measure(self, client: AsyncScoreClient, index: int) -> ResumedKld:
        window, place = divmod(index, self.num_places)
        values = await compared_window(
            client, self.server, self.reference, window, from_boundary=self.boundaries[place - 1] if place else None
        )
        kld = values.positions.kld
        if not np.isfinite(kld).all():
            raise ResponseError(f"the divergence of window {window} is infinite, so it cannot be split by layers")
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
    """A cost in nats per token. `stderr` is its standard error if windows are independent, and None for one window."""

    cost: float
    stderr: float | None

    @property
    def in_words(self) -> str:
        return f"{self.cost:.6f} ± {'-' if self.stderr is None else f'{self.stderr:.6f}'}"


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class PartCost(Cost):
    """The cost of a part of the model."""

    name: str
    """For a block, the names of its modules, such as `model.layers.11.mlp`."""
    kind: PartKind
    modules: list[str]
    floor: float
    """The recorded model's divergence from itself in nats per token, which only rounding causes, when it is resumed at
    the part's two boundaries: the larger of both."""

    @property
    def is_above_floor(self) -> bool:
        return self.cost > self.floor


@dataclass(frozen=True, slots=True, eq=False)
class LayersMeasurement(ComparedModel):
    """The cost of each part of a served model, compared with a reference."""

    window_sizes: NDArray[np.int64]
    """Positions of each window."""
    kld_sums: NDArray[np.float64]
    """[windows, boundaries + 1], sums of each window's divergences: the whole model's, then one per boundary."""
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
        # The whole model and the end of the head have a floor of 0, because nothing is resumed there.
        floors = [max(pair) for pair in zip([0.0, *floor], [*floor, 0.0], strict=True)]
        sums = [*(self.kld_sums[:, :-1] - self.kld_sums[:, 1:]).T, self.kld_sums[:, -1]]
        return [
            PartCost(**asdict(self._cost(window_sums)), name=name, kind=kind, modules=modules, floor=part_floor)
            for window_sums, (name, kind, modules), part_floor in zip(sums, names, floors, strict=True)
        ]

    @property
    def blocks(self) -> list[PartCost]:
        return self.parts[1:-1]

    def without(self, blocks: Sequence[PartCost]) -> Cost:
        """Predict the divergence if these blocks stay as in the recorded model."""
        return self._cost(self.sums_without(blocks))

    def sums_without(self, blocks: Sequence[PartCost]) -> NDArray[np.float64]:
        """[windows], the predicted sum of each window's divergences if these blocks stay as in the recorded model."""
        places = np.array([index + 1 for index, block in enumerate(self.blocks) if block in blocks], np.int64)
        costs = (self.kld_sums[:, places] - self.kld_sums[:, places + 1]).sum(1)
        sums: NDArray[np.float64] = self.kld_sums[:, 0] - costs
        return sums

    def _cost(self, sums: NDArray[np.float64]) -> Cost:
        mean = float(sums.sum() / self.window_sizes.sum())
        return Cost(mean, finite_or_none(error_of_sums(sums, self.window_sizes)))

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
    """A warning if a reference has too few windows to tell costs from chance; empty if it has enough."""
    number = reference.num_windows
    if number >= LEAST_WINDOWS:
        return []
    subject = "1 window decides" if number == 1 else f"{number} windows decide"
    return [f"{subject} nothing: record 4,096 tokens in windows of 1,024 (the default of ppl-client record --layers)."]


def shares(parts: Sequence[Cost]) -> list[float]:
    """The share of each cost in the sum of positive costs, so that no sum of shares exceeds 1; 0 for negative costs."""
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
    """Measure the cost of each block of a served model's decoder layers, on one server or on several of the same model.

    Args:
        clients: A client, or one per server; all servers must have the reference, and run with `--enforce-eager`.
        name: Name of a complete reference that was recorded with `layers`.
        concurrency: As for `measure_kld`.
        start_journal: Called with the plan; returns the journal, as for `measure_kld`.
        on_progress: Called for each window and boundary.

    Raises:
        ScoremodeError: as for `measure_kld`; or the reference has no layers, or the served model has different ones.
    """
    pool = await Pool.connect(clients, concurrency)
    reference = await same_references(pool, name)
    if reference.layers is None or not reference.complete:
        fault = "is not complete" if reference.layers is not None else "was recorded without layers"
        raise RunError(f"reference {name} {fault}: record it on a server of the original (ppl-client record --layers)")
    served = await pool.clients[0].layers()
    shared = tuple(reference.layers.shared_with(served))
    if not shared:
        raise RunError(f"reference {name} is of {reference.layers.in_words}, and the served model of {served.in_words}")
    reference = reference.model_copy(update={"layers": reference.layers.merged(shared)})
    plan = LayersPlan(pool.info, pool.clients[0].model or pool.info.model, reference, shared)
    run = await measure(plan, pool, start_journal, on_progress)
    windows, seconds = run.in_order(), run.seconds()
    await unreplaced(pool.clients[0], reference)
    sizes = np.array([window.num_scored for window in windows]).reshape(-1, plan.num_places)
    if (sizes != sizes[:, :1]).any() or sizes[:, 0].sum() != reference.num_scored:
        raise ResponseError(f"the server's windows do not have the {reference.num_scored} positions of the reference")
    sums = np.array([window.kld_sum for window in windows]).reshape(sizes.shape)
    return LayersMeasurement(plan.server, plan.model, reference, sizes[:, 0], sums, seconds)
