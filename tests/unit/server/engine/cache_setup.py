"""A scoring engine on a fake one, and requests whose answers are compared with what they have to be."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
from prometheus_client import CollectorRegistry
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from scoremode_server.completions.logprobs_json import LogprobsWriter, Style, openai_logprobs
from scoremode_server.engine.admission import EngineSize, RequestQueue
from scoremode_server.engine.engine import ScoringEngine
from scoremode_server.engine.sequence import EnginePass, ScoreSettings, TokenSequence, engine_id
from scoremode_server.engine.store import BLOCK_OVERHEAD_BYTES, RowStore
from scoremode_server.errors import UnfinishedError
from scoremode_server.metrics import Metrics
from scoremode_server.worker.row_spec import RowSpec
from tests.unit.server.engine.fake_engine import FakeEngine, LostRequestError, expected_rows

ROOM = 1 << 24
SIZE = 4
LARGE = EngineSize(tokens=3072, sequences=192, max_scoring_tokens=100_000)
LORAS = {0: None, 1: LoRARequest("one", 1, "/one"), 2: LoRARequest("two", 2, "/two")}


@dataclass
class Ask:
    """One request: `scores` the last token too, as score mode does, or feeds all, as completions do."""

    token_ids: Sequence[int]
    top: int = 0
    adapter: int = 0
    salt: str | None = None
    scores: bool = True
    cached: bool = True
    first: int = 1
    """Position from which on rows are needed."""

    @property
    def fed(self) -> list[int]:
        return list(self.token_ids[:-1] if self.scores else self.token_ids)

    def engine_pass(self, request_id: str, queue: RequestQueue, block_size: int = SIZE) -> EnginePass:
        settings = ScoreSettings(
            request_id=request_id,
            queue=queue,
            top_logprobs=self.top,
            cache_salt=self.salt,
            use_cache=self.cached,
            options={"lora_request": LORAS[self.adapter]},
        )
        sequence = TokenSequence(context=list(self.token_ids), first=self.first)
        if self.scores:
            return EnginePass(sequence).begin(settings, request_id, block_size)
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=self.top,
            logprobs=self.top,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        sequence.settings = settings
        prompt = tokens_input(self.fed, cache_salt=self.salt)
        return EnginePass(sequence).prepare(engine_id(request_id), self.fed, RowSpec(num_top=self.top), prompt, params)


NAMES = SimpleNamespace(first_of_a_prompt=str, texts_of=lambda token_ids: list(map(str, token_ids)))
"""Stands in for `TokenStrings`: a token's text is its number."""


@dataclass
class Setup:
    engine: FakeEngine
    store: RowStore
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    size: EngineSize = LARGE
    scoring: ScoringEngine = field(init=False)
    num_asked: int = 0
    num_rows: int = 0
    """Rows in the answers that the cache had a part in."""
    writer: LogprobsWriter = field(init=False)

    def __post_init__(self) -> None:
        self.scoring = ScoringEngine(self.engine, self.store, Metrics(1 << 28, self.registry), self.size)
        self.writer = LogprobsWriter(NAMES, self.store.block_size)

    async def ask(self, ask: Ask) -> EnginePass:
        """Ask, and compare every row of the answer with what it has to be."""
        self.num_asked += 1
        first_weights = self.engine.weights[ask.adapter]
        through_cache = ask.cached and self.store.is_usable and len(ask.token_ids) > self.store.block_size
        async with self.scoring.admission.request(1, len(ask.token_ids)) as queue:
            answer = await self.scoring.rows(ask.engine_pass(f"ask-{self.num_asked}", queue, self.store.block_size))
        weights = range(first_weights, self.engine.weights[ask.adapter] + 1)
        assert any(self.is_right(ask, answer, version) for version in weights), (ask, answer.num_cached_tokens)
        assert 0 <= answer.num_cached_tokens < len(ask.fed)
        assert ask.scores or ask.first > 1 or self.written(ask, answer) == answer.rows.logprobs[:, 0].tolist()
        self.num_rows += through_cache * (len(ask.token_ids) - ask.first)
        return answer

    def is_right(self, ask: Ask, answer: EnginePass, weights: int) -> bool:
        salt = (ask.salt if ask.cached else answer.prompt.get("cache_salt")) or ""
        expected = expected_rows(ask.token_ids, ask.top + 1, adapter=ask.adapter, salt=salt, weights=weights)
        got = answer.rows.token_ids, answer.rows.logprobs, answer.rows.ranks
        return all(np.array_equal(a, b[ask.first - 1 :]) for a, b in zip(got, expected, strict=True))

    def written(self, ask: Ask, answer: EnginePass) -> list[float]:
        """The logprobs of the prompt's tokens but the first, as JSON says them."""
        pieces = self.writer.prompt(answer, Style(ask.top, as_token_ids=False))
        return orjson.loads(b"".join(openai_logprobs(pieces)))["token_logprobs"][1:]

    def counted(self, name: str) -> int:
        """The count of the cache's metric of that name."""
        return int(self.registry.get_sample_value(f"scoremode_score_cache_{name}_total"))

    def check_nothing_is_left(self) -> None:
        assert len(self.scoring._in_flight) == 0
        assert self.engine.num_running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert self.num_bytes() == self.store.num_bytes <= self.store.max_bytes

    def num_bytes(self) -> int:
        """The bytes of all blocks, added up anew."""
        return sum(len(block) + BLOCK_OVERHEAD_BYTES for block in self.store._blocks.values())


def setup(max_bytes: int = ROOM, size: int = SIZE, **settings: Any) -> Setup:
    return Setup(FakeEngine(size, **settings), RowStore(size, max_bytes))


async def outcome(setup: Setup, ask: Ask) -> EnginePass | None:
    """The answer, or None where the engine lost the request or gave it up."""
    try:
        return await setup.ask(ask)
    except (LostRequestError, UnfinishedError):
        return None
