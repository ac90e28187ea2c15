"""Decoder layers of the served model: whether the residual stream can be cut at their boundaries, and how far the model
is from itself when it is resumed from its own."""

import shutil
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from vllm.config import VllmConfig

from scoremode.wire.protocol import LaneFields
from scoremode.wire.references import ReferenceLayers, ServedLayers
from scoremode_server.errors import RequestError, StorageError
from scoremode_server.references.comparer import Comparer, MarkedWindow
from scoremode_server.references.files.directory import StoredReference, StoredText
from scoremode_server.references.service import References
from scoremode_server.scoring.core import Core
from scoremode_server.scoring.scorer import ScoreSettings
from scoremode_server.vllm_compat.engine_client import call_workers

LARGEST_FLOOR = {"float32": 1e-3}
"""Nats by which a model may diverge from itself when it is resumed, by dtype: what rounding in another place gives. A
stream that is not cut right gives tenths."""
LARGEST_FLOOR_16_BITS = 1e-2
LARGEST_SHARE = 0.01
"""Of the divergence that the other tokens cause without a stream: where logits hardly differ, a stream that is not cut
right gives little too."""


@dataclass(slots=True)
class LayerParts:
    """Checks whether layers can be recorded and resumed from, for the routes."""

    references: References
    core: Core
    comparer: Comparer
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

    async def describe(self) -> ServedLayers:
        """The served model's layers, and the free space for references."""
        layers = await self.served()
        return ServedLayers(**layers.model_dump(), free_bytes=await self._free_bytes())

    async def check_space(self, name: str, text: StoredText) -> None:
        """Make sure that the layers of a text's windows that are not recorded yet fit on the disk. StorageError if they
        do not."""
        layers, sizes = await self.served(), text.num_tokens - 1
        recorded = await self.references.in_thread(name, partial(self.references.directory.recorded_windows, name))
        missing = [size for index, size in enumerate(sizes.tolist()) if index not in recorded]
        num_bytes = sum(missing) * layers.token_bytes(self.references.model.dtype)
        if num_bytes > (free_bytes := await self._free_bytes()):
            raise StorageError(
                f"reference {name!r}: its layers need {num_bytes / 2**30:.1f} GiB, and the disk of references has "
                f"{free_bytes / 2**30:.1f} GiB free: record fewer tokens, or make space",
                "layers",
            )

    async def _free_bytes(self) -> int:
        root = self.references.directory.root
        return await self.references.in_thread("", lambda: shutil.disk_usage(root).free)

    async def check_resumable(self, reference: StoredReference, boundary: int, lane: LaneFields) -> None:
        """Make sure that the served model can be resumed from a boundary of a reference. RequestError if it cannot."""
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
        served = await self.served()
        if difference := _difference(served, recorded):
            raise RequestError(f"from_boundary: reference {reference.name!r} has {difference}", "from_boundary")

    async def measure_floor(self, reference: StoredReference, settings: ScoreSettings) -> None:
        """Resume the recorded model from each of its boundaries on the first window, and store how far it then is from
        itself.

        The engine is fed other tokens than the window's. So the result shows that nothing but the stream matters to the
        layers after a boundary, and that it was replaced. RequestError if the divergence is not near 0.
        """
        layers, vocab_size = reference.manifest.layers, self.core.limits.vocab_size
        if layers is None or layers.floor is not None:
            return

        def resumed(boundaries: tuple[int, ...]) -> MarkedWindow:
            window = MarkedWindow.begin("compare", reference, 0, settings, boundaries)
            return replace(window, token_ids=[(token_id + 1) % vocab_size for token_id in window.token_ids])

        windows = map(resumed, [(), *((boundary,) for boundary in range(layers.num_boundaries))])
        means: list[float] = []
        async with aclosing(self.comparer.compare_windows(reference, windows, settings)) as in_order:
            async for _, rows in in_order:
                means.append(float(np.mean(rows.positions.kld, dtype=np.float64)))
        not_resumed, *floor = means
        limit = LARGEST_FLOOR.get(reference.manifest.model.dtype, LARGEST_FLOOR_16_BITS)
        limit = min(limit, LARGEST_SHARE * not_resumed)
        # Not so where one is NaN or infinite.
        if not max(floor) <= limit:
            raise RequestError(
                f"layers: {layers.layer_class} cannot be measured: resumed from its own boundary "
                f"{int(np.argmax(floor))}, the model diverges from itself by {max(floor):.3g} nats, more than "
                f"{limit:g}: delete the reference, and record it without layers",
                "layers",
            )
        measured = layers.model_copy(update={"floor": floor})
        await self.references.save(reference, lambda _: {"layers": measured})


def refusal(config: VllmConfig) -> str:
    """Why an engine of this configuration calls no hooks on whole layers; empty if it does."""
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
    kinds = [(mine.kind, other.kind) for mine, other in zip(served.blocks, recorded.blocks, strict=True)]
    differing = next((index for index, (mine, other) in enumerate(kinds) if mine != other), None)
    if differing is None:
        return ""
    mine, other = kinds[differing]
    return f"{other} as block {differing}, and the served model {mine}"
