"""The fake engine with one worker that keeps references: windows are those of a real worker, on a linear model."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.outputs import CompletionOutput, RequestOutput

from scoremode_server.app import ReferenceParts
from scoremode_server.prefix_cache.engine import ScoringEngine
from scoremode_server.references.directory import ReferenceDirectory, StoredReference
from scoremode_server.references.manifest import HeadFormat
from scoremode_server.rows import PromptLogprobs
from scoremode_server.scoring.turns import Turns
from scoremode_server.vllm_patches.head_room import HeadRoom
from scoremode_server.vllm_patches.reference_head import ReferenceHead
from scoremode_server.vllm_patches.reference_windows import Orders, Projections, ReferenceWindows, find_mark
from tests.unit.server.prefix_cache.fake_engine import VOCABULARY, FakeEngine
from tests.unit.server.references.reference_setup import HEAD, HIDDEN, MODEL

CPU = torch.device("cpu")
HEAD_FORMAT = HEAD.model_copy(update={"vocab_size": VOCABULARY, "weight_dtype": "float32", "head_dtype": "float32"})


class LinearModel(Projections):
    """Hidden states follow from a token and its position, logits are linear in them; `noise` is what another model has
    in its head."""

    shard = None

    def __init__(self, noise: float) -> None:
        generator = torch.Generator().manual_seed(7)
        self.embeddings = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.weight += noise * torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.project = lambda hidden_states: hidden_states @ self.weight.T

    def hidden_states(self, token_ids: list[int]) -> torch.Tensor:
        return self.embeddings[token_ids] * (1 + torch.arange(len(token_ids))[:, None] / 100)

    def all_ranks_agree(self, yes: bool) -> bool:
        return yes

    def score(self, targets: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs = self.project(hidden_states).log_softmax(1)
        of_targets = logprobs.gather(1, targets[:, None])
        return targets[:, None].int(), of_targets, (logprobs >= of_targets).sum(1).int()

    def compared_rows(self, num_top: int, reference_logit_bytes: int) -> int:
        return 100


class HeadInMemory:
    """A reference's head without a layer of vLLM's."""

    def __init__(self, head: HeadFormat) -> None:
        self.num_bytes = head.num_bytes

    def read(self, reference: StoredReference) -> None:
        self.weight, _ = reference.read_head()

    def place(self, memory: torch.Tensor) -> None:
        self.placed = memory.view(torch.float32).view(self.weight.shape).copy_(self.weight)

    def ready(self, *, local: bool) -> ReferenceHead:
        return ReferenceHead(lambda hidden_states: hidden_states @ self.placed.T, 4)


def make_room(windows: ReferenceWindows, num_bytes: int) -> HeadRoom:
    """The room for heads in a worker, without vLLM's layers, whose padding would be room for hundreds of these."""
    room = HeadRoom(num_bytes, num_bytes, CPU, HeadInMemory, windows._threads)  # type: ignore[arg-type]
    room._memory = room._memory[:num_bytes]
    return room


class ReferenceEngine(FakeEngine):
    """An engine with a folder of references.

    Attributes:
        computed: windows that were computed, in order, as (action, index).
        asked: methods of the worker that were called.
        nan_at: row of every window that is NaN.
        head: what the worker says of the served model's head.
        room: bytes of the largest head that fits.
        held: while it is not set, windows that come are not computed.
    """

    def __init__(self, root: Path, noise: float = 0.0) -> None:
        super().__init__(16, "v2")
        self.directory = ReferenceDirectory(root)
        self.windows = ReferenceWindows(self.directory)
        self.windows.room = make_room(self.windows, HEAD_FORMAT.num_bytes)
        self.vllm_config.parallel_config = SimpleNamespace(
            data_parallel_size=1, local_engines_only=False, data_parallel_index=0
        )
        self.model = LinearModel(noise)
        self.computed: list[tuple[str, int]] = []
        self.asked: list[str] = []
        self.nan_at: int | None = None
        self.head: HeadFormat | str = HEAD_FORMAT
        self.room = HEAD_FORMAT.num_bytes
        self.held, self.has_any = asyncio.Event(), asyncio.Event()
        self.held.set()
        self.engine_core = SimpleNamespace(call_utility_all_async=self._call_utility)

    def references(self, **identity: Any) -> Any:
        """What makes the server's references, of a model with that identity."""
        model = MODEL.model_copy(update=identity)

        def make(scoring: ScoringEngine, turns: Turns) -> ReferenceParts:
            return ReferenceParts.of(self.directory.root, self, scoring, turns, model)  # type: ignore[arg-type]

        return make

    async def _call_utility(self, call: str, method: str, *rest: Any) -> Any:
        assert call == "collective_rpc"
        _, arguments, _ = rest
        self.asked.append(method)
        return [[getattr(self, method)(*arguments)]]

    def scoremode_head_bytes(self) -> int:
        return self.room

    def scoremode_describe_head(self) -> dict[str, Any] | str:
        return self.head if isinstance(self.head, str) else self.head.model_dump()

    def scoremode_write_head(self, name: str, identity: str, ticket: str) -> None:
        self.windows.write_head_later(name, identity, ticket, self.model.weight, None)

    def scoremode_exchange(self, holder: str, orders: dict[int, dict[str, Any]]) -> dict[str, Any]:
        return self.windows.exchange(holder, Orders(**orders[0]), pinned=False)

    async def _compute(self, prompt: Any, params: Any, request_id: str, lora: Any) -> RequestOutput:
        mark = find_mark(params)
        if mark is None:
            return await super()._compute(prompt, params, request_id, lora)
        self.has_any.set()
        await self.held.wait()
        token_ids = prompt["prompt_token_ids"]
        window = self.windows.add(request_id, params, writes=True, device=CPU)
        assert window is not None
        hidden_states = self.model.hidden_states(token_ids)
        if self.nan_at is not None:
            hidden_states[mark.first - 1 + self.nan_at] = torch.nan
        rows = window.step(0, hidden_states, torch.tensor(token_ids), len(token_ids), self.model)
        self.windows.remove(request_id)
        self.computed.append((mark.action, mark.index))
        logprobs = PromptLogprobs()
        logprobs.append(rows)
        completion = CompletionOutput(0, "", [mark.last_token], None, None, finish_reason="length")
        return RequestOutput(request_id, None, token_ids, logprobs, [completion], True, num_cached_tokens=0)
