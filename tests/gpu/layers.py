"""An engine in process that records a reference with layers and resumes from its boundaries, without a server.

    python -m tests.gpu.layers FAMILY [--dtype float32]

prints how far a random model of the family is from itself when it is resumed, or why it is refused.
"""

import argparse
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import transformers

from scoremode.windows import Window
from scoremode.wire.references import ReferenceLayers, ReferenceRoutes
from scoremode_server.references.files.directory import ReferenceDirectory, StoredReference, StoredText
from scoremode_server.references.files.manifest import HeadFormat, Manifest, TextPlan
from scoremode_server.references.worker.lease import FIRST_SECONDS
from scoremode_server.references.worker.orders import (
    SINK,
    Forget,
    LeaseCall,
    ReadHead,
    ReadWindow,
    WindowMark,
    sink_columns,
)
from scoremode_server.rows import Rows
from scoremode_server.scoring.model_identity import ModelIdentity
from scoremode_server.settings import REFERENCE_VARIABLE, WORKER_EXTENSION
from scoremode_server.worker.row_spec import RowSpec
from tests import models
from tests.gpu.family import FAMILIES, SIZES, family_engine
from tests.gpu.lanes import Tokens, scored_rows

ODD_FAMILIES: dict[str, Any] = {
    "Cohere (norms with one tensor twice)": lambda: transformers.CohereConfig(**SIZES),
    "Granite (scaled residuals)": lambda: transformers.GraniteConfig(**SIZES, residual_multiplier=0.5),
    "OLMo 2 (norms after)": lambda: transformers.Olmo2Config(**SIZES),
    "GPT-2 (adds by itself)": lambda: transformers.GPT2Config(
        vocab_size=4096, n_embd=256, n_layer=4, n_head=4, n_positions=2048, bos_token_id=0, eos_token_id=1
    ),
    "Nemotron-H": lambda: transformers.NemotronHConfig(
        **SIZES, layers_block_type=["mamba", "attention", "mlp", "mamba"], mamba_num_heads=8, mamba_head_dim=64
    ),
}
"""Whose streams are not, or not in all versions, what a layer is called with."""

Job = tuple[int, int | None]
"""A window, and the boundary from which it is resumed."""


@dataclass
class LayeredEngine:
    engine: Any
    """A `vllm.LLM` with the worker extension and a folder for references."""
    root: Path
    now: float = 0.0
    """The time of the last `LeaseCall`."""

    def call(self, method: Any, *args: Any) -> Any:
        """Call a method of the only worker."""
        return self.engine.collective_rpc(method, args=args)[0]

    def layers(self) -> ReferenceLayers:
        described = self.call("scoremode_describe_layers")
        assert isinstance(described, dict), described
        return ReferenceLayers.model_validate(described)

    def routes(self) -> ReferenceRoutes:
        described = self.call("scoremode_describe_routes")
        assert isinstance(described, dict), described
        return ReferenceRoutes.model_validate(described)

    def record(self, name: str, texts: Sequence[Tokens], routes: ReferenceRoutes | None = None) -> StoredReference:
        """Record each text as one window."""
        lengths = [len(text) for text in texts]
        stored = StoredText.from_documents(
            [(text, [Window(0, len(text), 1)]) for text in texts], [(index, -1, -1) for index in range(len(texts))]
        )
        plan = TextPlan(
            fingerprint="", method="disjoint", context_length=max(lengths), stride=max(lengths),
            num_tokens=sum(lengths), num_windows=len(texts), num_scored=sum(lengths) - len(texts),
            num_bytes=None, num_words=None,
        )  # fmt: skip
        model = ModelIdentity(
            model=name, revision=None, dtype="float32", quantization=None, scoremode_version="", vllm_version="",
            fingerprint=name, tokenizer_fingerprint="",
        )  # fmt: skip
        head = HeadFormat.model_validate(self.call("scoremode_describe_head"))
        layers = self.layers()
        manifest = Manifest(
            identity=uuid.uuid4().hex, created=0, model=model, head=head, text=plan, layers=layers, routes=routes
        )
        reference = ReferenceDirectory(self.root).create(name, manifest, stored)
        self.call("scoremode_write_head", name, manifest.identity, "head")
        boundaries = range(layers.num_boundaries)
        marks = [self._mark("record", reference, index, boundaries, routes=routes) for index in range(len(texts))]
        self._generate(marks, texts)
        self._wait("head", *[mark.ticket for mark in marks])
        return reference

    def kld(
        self, reference: StoredReference, jobs: Sequence[Job], shift: int = 0, plain: Sequence[Tokens] = ()
    ) -> list[np.ndarray]:
        """The divergences [n - 1] of windows, whose tokens are fed moved by `shift`, and the logprobs of plain texts.
        The engine has all of them at once."""
        marks = [
            self._mark("compare", reference, index, () if boundary is None else (boundary,)) for index, boundary in jobs
        ]
        rows = self.compare(reference, marks, shift, plain)
        compared = [each.column("kld") for each in rows[: len(marks)]]
        return [*compared, *(each.logprobs[:, 0] for each in rows[len(marks) :])]

    def routed(self, reference: StoredReference, *, forced: bool) -> list[Rows]:
        """The rows of all windows of a reference that has routes, with the agreement of experts."""
        indices, routes = range(len(reference.text.windows)), reference.manifest.routes
        marks = [self._mark("compare", reference, index, (), routes=routes, forced=forced) for index in indices]
        return self.compare(reference, marks)

    def compare(
        self, reference: StoredReference, marks: Sequence[WindowMark], shift: int = 0, plain: Sequence[Tokens] = ()
    ) -> list[Rows]:
        """The rows of windows, and those of plain texts."""
        head = reference.manifest.head
        orders = [ReadHead(marks[0], "head", head.model_dump()), *map(ReadWindow, marks)]
        self._wait("head", *[mark.ticket for mark in marks], orders=orders)
        # The reference before it has no windows, so this one gets the lease once that has been idle for long enough.
        key, self.now = marks[0].head, self.now + FIRST_SECONDS
        self._exchange([], [], LeaseCall("me", self.now, {key: "head"}, held=False, used=False))
        self._wait(key)
        windows = [reference.text.window(mark.index)[0] for mark in marks]
        texts = [[(token + shift) % head.vocab_size for token in window] for window in windows]
        rows = self._generate([*marks, *[None] * len(plain)], [*texts, *plain])
        self._exchange([Forget(ticket) for ticket in ("head", *[mark.ticket for mark in marks])], [])
        return rows

    def _mark(
        self,
        action: Any,
        reference: StoredReference,
        index: int,
        boundaries: Iterable[int],
        *,
        routes: ReferenceRoutes | None = None,
        forced: bool = False,
    ) -> WindowMark:
        num_fed = len(reference.text.window(index)[0]) - 1
        identity = reference.manifest.identity
        ticket = uuid.uuid4().hex
        return WindowMark(
            action, reference.name, identity, index, num_fed, ticket, identity, num_fed, tuple(boundaries),
            num_routed_layers=0 if routes is None else len(routes.layers), forces_routes=forced,
        )  # fmt: skip

    def _generate(self, marks: Sequence[WindowMark | None], texts: Sequence[Tokens]) -> list[Rows]:
        return scored_rows(self.engine, texts, map(_spec, marks))

    def _exchange(
        self, orders: Sequence[Any], tickets: Sequence[str], lease: LeaseCall | None = None
    ) -> dict[str, str | None]:
        message = msgspec.to_builtins(list(orders)), list(tickets), msgspec.to_builtins(lease)
        answer = self.call("scoremode_exchange", {0: message})
        outcomes: dict[str, str | None] = answer["outcomes"]
        return outcomes

    def _wait(self, *tickets: str, orders: Sequence[Any] = ()) -> None:
        waiting = list(tickets)
        while waiting:
            outcomes = self._exchange(orders, waiting)
            assert not any(outcomes.values()), outcomes
            waiting, orders = [ticket for ticket, outcome in outcomes.items() if outcome is None], ()
            time.sleep(0.01)


def _spec(mark: WindowMark | None) -> RowSpec:
    if mark is None:
        return RowSpec()
    columns = sink_columns(mark, 0, 0)
    return RowSpec(sinks={SINK: msgspec.to_builtins(mark)}, sink_columns=columns)


def result_of(family: str, path: Path, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The engine's description of the layers, and its distance from itself when it is resumed from each boundary and
    fed other tokens."""
    os.environ[REFERENCE_VARIABLE] = str(root)
    settings = {"dtype": options.dtype, "enforce_eager": True, "worker_extension_cls": WORKER_EXTENSION}
    layered = LayeredEngine(family_engine(family, path, **settings), root)
    described = layered.call("scoremode_describe_layers")
    if isinstance(described, str):
        return {"refusal": described}
    (text,) = np.random.default_rng(5).integers(3, 4000, (1, options.length)).tolist()
    reference = layered.record("itself", [text])
    num_boundaries = len(described["blocks"]) + 1
    resumed = layered.kld(reference, [(0, boundary) for boundary in range(num_boundaries)], shift=1)
    (other,) = layered.kld(reference, [(0, None)], shift=1)
    return {
        "layer_class": described["layer_class"],
        "kinds": [block["kind"] for block in described["blocks"]],
        "floor": [float(kld.mean(dtype="f8")) for kld in resumed],
        "not resumed": float(other.mean(dtype="f8")),
    }


def main() -> None:
    """Make a random model of a family, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("family", choices=FAMILIES | ODD_FAMILIES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=257)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = (FAMILIES | ODD_FAMILIES)[options.family]()
        path = models.random_model_of(config, Path(folder) / "model")
        print(json.dumps(result_of(options.family, path, Path(folder) / "references", options)), flush=True)


if __name__ == "__main__":
    main()
