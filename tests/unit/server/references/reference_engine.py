"""The fake engine with one worker that stores references. Windows are those of a real worker, on a linear model."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from vllm.outputs import CompletionOutput, RequestOutput

from scoremode.wire.references import LayerBlock, ReferenceLayers
from scoremode_server.references.files.directory import ReferenceDirectory, StoredReference
from scoremode_server.references.files.manifest import HeadFormat
from scoremode_server.references.streams import Stream
from scoremode_server.references.worker.heads import LeasedHead, ReferenceHead
from scoremode_server.references.worker.orders import SINK
from scoremode_server.references.worker.sinks import WorkerWindows
from scoremode_server.rows import PromptLogprobs
from scoremode_server.settings import WORKER_EXTENSION
from scoremode_server.worker.row_spec import RowSpec
from tests.bad_inputs import REFERENCES
from tests.unit.server.engine.fake_engine import VOCABULARY, HeldEngine
from tests.unit.server.light_app import client_of, light_app
from tests.unit.server.references.reference_setup import HEAD, HIDDEN, MODEL
from tests.unit.server.worker.linear_scorer import LinearWorker, make_scorer

CPU = torch.device("cpu")
HEAD_FORMAT = HEAD.model_copy(update={"vocab_size": VOCABULARY, "weight_dtype": "float32", "head_dtype": "float32"})
TOKENS = [(37 * position + position**2) % 997 for position in range(60)]
LAYERS = ReferenceLayers(
    layer_class="LinearLayer",
    hidden_size=HIDDEN,
    blocks=[
        LayerBlock(modules=["model.layers.0.mixer"], kind="mamba"),
        LayerBlock(modules=["model.layers.0.mlp"], kind="mlp"),
    ],
)
BODY: dict[str, Any] = {"name": "base", "prompt": TOKENS, "method": "sliding", "context_length": 16, "stride": 8}
NUM_WINDOWS = 7
"""Windows have 16 tokens each. The last 8 are scored, and in the first window all but the first token."""


async def record(client: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    answer = await client.post(REFERENCES, json={**BODY, **changes})
    assert answer.status_code == 200, answer.text
    return answer.json()


class LinearModel:
    """Hidden states follow from a token and its position, logits are linear in them. `noise` makes another model."""

    def __init__(self, noise: float) -> None:
        generator = torch.Generator().manual_seed(7)
        self.embeddings, weight, more = (torch.randn(VOCABULARY, HIDDEN, generator=generator) for _ in range(3))
        self.weight = weight + noise * more
        self.project = lambda hidden_states: hidden_states @ self.weight.T
        self.leak, self.calls_no_hooks = 0.0, False

    def hidden_states(self, token_ids: list[int]) -> torch.Tensor:
        return self.embeddings[token_ids] * (1 + torch.arange(len(token_ids))[:, None] / 100)

    def through_layers(self, stream: torch.Tensor, sink: Any) -> torch.Tensor:
        """Let a window copy or replace its stream at the boundaries of blocks that change nothing, unless `leak` is
        set: then the last depends on more than the stream."""
        stream, at_first = stream.clone(), stream.clone()
        for boundary in range(LAYERS.num_boundaries):
            if boundary in sink.mark.boundaries and not self.calls_no_hooks:
                sink.cross(boundary, Stream(stream, None), slice(0, len(stream)), 0)
        return stream + self.leak * at_first


class HeadInMemory:
    """A reference's head without a layer of vLLM's."""

    def __init__(self, head: HeadFormat) -> None:
        self.num_bytes = head.vocab_size * head.hidden_size * 4

    def read(self, reference: StoredReference) -> torch.Tensor:
        return reference.read_head()[0]

    def place(self, weight: torch.Tensor, memory: torch.Tensor) -> None:
        self.placed = memory.view(torch.float32).view(weight.shape).copy_(weight)

    def ready(self, *, local: bool) -> ReferenceHead:
        return ReferenceHead(lambda hidden_states: hidden_states @ self.placed.T, 4)


class ReferenceEngine(HeldEngine):
    """An engine with a folder of references; `identity` is that of the served model. It is not held at first.

    Attributes:
        computed: indices of the windows that were computed, in order.
        asked: methods of the worker that were called.
        nan_at: row of every window that is NaN.
        head: the worker's description of the served model's head.
        layers: the same of its decoder layers, or why they cannot be cut.
    """

    def __init__(self, root: Path, noise: float = 0.0, **identity: Any) -> None:
        super().__init__(16)
        self.let_go.set()
        self.directory, self.reference_root = ReferenceDirectory(root), root
        self.windows = WorkerWindows(self.directory)
        self.windows.leased = LeasedHead(0, CPU, HeadInMemory)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                data_parallel_size=1,
                local_engines_only=False,
                data_parallel_index=0,
                worker_extension_cls=WORKER_EXTENSION,
                pipeline_parallel_size=1,
                prefill_context_parallel_size=1,
                use_ubatching=False,
            ),
            model_config=SimpleNamespace(enforce_eager=True),
            speculative_config=None,
        )
        self.model = LinearModel(noise)
        self.identity = MODEL.model_copy(update=identity)
        self.computed: list[int] = []
        self.asked: list[str] = []
        self.nan_at: int | None = None
        self.head: dict[str, Any] | str = HEAD_FORMAT.model_dump()
        self.layers: dict[str, Any] | str = LAYERS.model_dump()
        self.engine_core = SimpleNamespace(call_utility_all_async=self._call_utility)

    async def _call_utility(self, call: str, method: str, *rest: Any) -> Any:
        methods = {
            "scoremode_describe_head": lambda: self.head,
            "scoremode_describe_layers": lambda: self.layers,
            "scoremode_write_head": lambda *of: self.windows.write_head_later(*of, [self.model.weight]),
            "scoremode_exchange": lambda messages: self.windows.exchange(*messages[0]),
        }
        _, arguments, _ = rest
        self.asked.append(method)
        return [[methods[method](*arguments)]]

    async def _compute(self, prompt: Any, params: Any, request_id: str, lora: Any) -> RequestOutput:
        spec, token_ids = RowSpec.read(params), prompt["prompt_token_ids"]
        if spec is None or SINK not in spec.sinks:
            return await super()._compute(prompt, params, request_id, lora)
        hidden_states = self.model.hidden_states(token_ids)
        if self.nan_at is not None:
            hidden_states[spec.first - 1 + self.nan_at] = torch.nan
        worker = LinearWorker(make_scorer(VOCABULARY, {SINK: self.windows}, chunk=100), self.model.project)
        worker.scorer.begin("whole", spec)
        if (sink := worker.scorer.requests["whole"].sinks[SINK]).mark.boundaries:
            hidden_states = self.model.through_layers(hidden_states, sink)
        rows = worker.step("whole", 0, hidden_states, torch.tensor(token_ids), len(token_ids))
        logprobs = PromptLogprobs([torch.from_numpy(rows.table)])
        self.computed.append(spec.sinks[SINK]["index"])
        completion = CompletionOutput(0, "", [7], None, None, finish_reason="length")
        return RequestOutput(request_id, None, token_ids, logprobs, [completion], True, num_cached_tokens=0)


def client_of_model(root: Path, noise: float = 0.0, **identity: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """A client of a server that has just started, with references in a folder; see `ReferenceEngine`."""
    return client_of(light_app(ReferenceEngine(root, noise, **identity)))
