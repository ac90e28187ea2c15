"""Checks whether the served model's residual stream can be cut at the boundaries of its decoder layers, and replaced
with a reference's, and whether its choices of experts can."""

import asyncio
from dataclasses import dataclass, field

from vllm.config import VllmConfig

from scoremode.wire.protocol import LaneFields
from scoremode.wire.references import ReferenceLayers, ReferenceRoutes
from scoremode_server.engine.sequence import ScoreSettings
from scoremode_server.errors import RequestError
from scoremode_server.references.comparer import Comparer
from scoremode_server.references.files.directory import StoredReference
from scoremode_server.references.plans import flaw_of_cuts
from scoremode_server.scoring.core import Core
from scoremode_server.vllm_compat.engine_client import call_workers


@dataclass(slots=True)
class LayerParts:
    """Checks for the HTTP routes whether the served model's layers and choices of experts can be recorded, and whether
    they can be replaced with recorded ones."""

    core: Core
    _layers: ReferenceLayers | None = None
    _routes: ReferenceRoutes | None = None
    _checked: set[str] = field(default_factory=set)
    """The references with which `check_cuts` was done."""
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def served(self) -> ReferenceLayers:
        """The served model's layers. RequestError if their residual stream cannot be cut on this server."""
        if self._layers is None:
            self._layers = ReferenceLayers.model_validate(await self._described("layers", "layers cannot be cut"))
        return self._layers

    async def served_routes(self) -> ReferenceRoutes:
        """The served model's mixture-of-experts layers. RequestError if their experts cannot be recorded on this
        server."""
        if self._routes is None:
            if self.core.client.vllm_config.parallel_config.data_parallel_size > 1:
                raise RequestError("routes: with data parallelism a router may see tokens of other ranks", "routes")
            self._routes = ReferenceRoutes.model_validate(
                await self._described("routes", "choices of experts cannot be recorded")
            )
        return self._routes

    async def _described(self, what: str, cannot: str) -> object:
        """The workers' description of the served model's layers or routes."""
        if reason := refusal(self.core.client.vllm_config):
            raise RequestError(f"{what}: {reason}", what)
        answers = await call_workers(self.core.client, f"scoremode_describe_{what}")
        if reasons := [answer for answer in answers if isinstance(answer, str)]:
            raise RequestError(f"{what}: this model's {cannot}: {reasons[0]}", what)
        return answers[0]

    async def check_routes(self, reference: StoredReference) -> None:
        """RequestError if the served model's choices of experts cannot be compared with a reference's."""
        if (recorded := reference.manifest.routes) is None:
            raise RequestError(
                f"routes: reference {reference.name!r} was recorded without routes: delete and record it with routes",
                "routes",
            )
        if (served := await self.served_routes()).sizes != recorded.sizes:
            raise RequestError(
                f"routes: reference {reference.name!r} has {recorded.in_words}, and the served model has "
                f"{served.in_words}",
                "routes",
            )

    async def resumable(self, reference: StoredReference, boundary: int, lane: LaneFields) -> int:
        """Find the served model's boundary that is a reference's `boundary`. RequestError if the served model cannot be
        resumed from it."""
        if lane.lane != "prefill":
            raise RequestError(f"from_boundary: the lane must be prefill, not {lane.lane}", "from_boundary")
        if (recorded := reference.manifest.layers) is None:
            raise RequestError(
                f"from_boundary: reference {reference.name!r} was recorded without layers: record it with layers",
                "from_boundary",
            )
        if boundary >= recorded.num_boundaries:
            raise RequestError(
                f"from_boundary: {boundary} is not from 0 to {len(recorded.blocks)}, the boundaries of reference "
                f"{reference.name!r}",
                "from_boundary",
            )
        shared = recorded.shared_with(served := await self.served())
        if boundary not in shared:
            cut = f"cut at boundaries {[*shared]} of it alone" if shared else f"of {served.in_words}"
            raise RequestError(
                f"from_boundary: reference {reference.name!r} is of {recorded.in_words}, and the served model is {cut}",
                "from_boundary",
            )
        return shared[boundary]

    async def check_cuts(self, comparer: Comparer, reference: StoredReference, settings: ScoreSettings) -> None:
        """RequestError if the served model's layers after a boundary do not follow from the stream there. If vLLM
        recorded the reference, that was checked then."""
        manifest = reference.manifest
        async with self._checking:
            if manifest.model.vllm_version or manifest.identity in self._checked or manifest.layers is None:
                return
            served = await self.served()
            cuts = [{own: other} for own, other in manifest.layers.shared_with(served).items()]
            whole, *resumed = await comparer.resumed(reference, [{}, *cuts], settings, 0)
            not_resumed, *others = await comparer.resumed(reference, [{}, *cuts], settings, 1)
            # Other tokens must make no difference. The original's stream must not make the model worse, as it does if
            # the layers use another stream, or only a part of it.
            pairs = zip(resumed, others, strict=True)
            floor = [max(abs(same - other), same - 2 * whole) for same, other in pairs]
            if flaw := flaw_of_cuts(served, comparer.references.model.dtype, floor, not_resumed):
                raise RequestError(f"from_boundary: {flaw}", "from_boundary")
            self._checked.add(manifest.identity)


def refusal(config: VllmConfig) -> str:
    """Why layers and choices of experts cannot be recorded or replaced on an engine of this configuration; empty if
    they can."""
    parallel = config.parallel_config
    reasons = {
        "start the server with --enforce-eager: a compiled model calls no hooks": (
            not config.model_config.enforce_eager
        ),
        "a server with pipeline parallelism has no rank with all layers": parallel.pipeline_parallel_size > 1,
        "a server with prefill context parallelism divides a prompt": parallel.prefill_context_parallel_size > 1,
        "a server with micro-batching divides a step": parallel.use_ubatching,
        "a server with speculative decoding also feeds drafts": config.speculative_config is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
