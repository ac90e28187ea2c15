"""Checks whether the served model's residual stream can be cut at the boundaries of its decoder layers, and replaced
with a reference's."""

from dataclasses import dataclass

from vllm.config import VllmConfig

from scoremode.wire.protocol import LaneFields
from scoremode.wire.references import ReferenceLayers
from scoremode_server.errors import RequestError
from scoremode_server.references.files.directory import StoredReference
from scoremode_server.scoring.core import Core
from scoremode_server.vllm_compat.engine_client import call_workers


@dataclass(slots=True)
class LayerParts:
    """Checks for the routes whether the served model's layers can be recorded, and whether it can be resumed from
    recorded ones."""

    core: Core
    _described: ReferenceLayers | None = None

    async def served(self) -> ReferenceLayers:
        """The served model's layers. RequestError if their residual stream cannot be cut on this server."""
        if self._described is None:
            if reason := refusal(self.core.client.vllm_config):
                raise RequestError(f"layers: {reason}", "layers")
            answers = await call_workers(self.core.client, "scoremode_describe_layers")
            if reasons := [answer for answer in answers if isinstance(answer, str)]:
                raise RequestError(f"layers: this model's layers cannot be cut: {reasons[0]}", "layers")
            self._described = ReferenceLayers.model_validate(answers[0])
        return self._described

    async def check_resumable(self, reference: StoredReference, boundary: int, lane: LaneFields) -> None:
        """RequestError if the served model cannot be resumed from a boundary of a reference."""
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
        if difference := _difference(await self.served(), recorded):
            raise RequestError(f"from_boundary: reference {reference.name!r} has {difference}", "from_boundary")


def refusal(config: VllmConfig) -> str:
    """Why layers cannot be recorded or resumed on an engine of this configuration; empty if they can."""
    parallel = config.parallel_config
    reasons = {
        "start the server with --enforce-eager: a compiled model cannot be resumed": (
            not config.model_config.enforce_eager
        ),
        "a server with pipeline parallelism has no rank with all layers": parallel.pipeline_parallel_size > 1,
        "a server with prefill context parallelism divides a prompt": parallel.prefill_context_parallel_size > 1,
        "a server with micro-batching divides a step": parallel.use_ubatching,
        "a server with speculative decoding cannot be resumed": config.speculative_config is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _difference(served: ReferenceLayers, recorded: ReferenceLayers) -> str:
    """Say what a reference has and the served model does not; empty if the model can be resumed from it."""
    if len(served.blocks) != len(recorded.blocks):
        return f"{recorded.num_boundaries} boundaries, and the served model {served.num_boundaries}"
    if served.hidden_size != recorded.hidden_size:
        return f"a hidden size of {recorded.hidden_size}, and the served model one of {served.hidden_size}"
    for index, (mine, other) in enumerate(zip(served.blocks, recorded.blocks, strict=True)):
        if mine.kind != other.kind:
            return f"{other.kind} as block {index}, and the served model {mine.kind}"
    return ""
