"""A caching engine on a fake one, and requests whose answers are held against what they have to be."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from fake_engine import FakeEngine, LostRequestError, expected_rows
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from scoremode_server.cache import ENTRY_BYTES, LogprobCache, Whole
from scoremode_server.caching import NO_CACHE, CachingEngine, OnCounts, clear_on_changes
from scoremode_server.completion_logprobs import LogprobsWriter, Style, openai_logprobs
from scoremode_server.engine.packed_logprobs import PACKED
from scoremode_server.scoring import read_score, score_params

ROOM = 1 << 24
SIZE = 4
LORAS = {0: None, 1: LoRARequest("one", 1, "/one"), 2: LoRARequest("two", 2, "/two")}
RUNNERS = ["v1", "v2"]


@dataclass
class Ask:
    """One request: `scores` the last token too, as score mode does, or feeds all, as completions do."""

    token_ids: Sequence[int]
    top: int = 0
    adapter: int = 0
    salt: str | None = None
    scores: bool = True
    cached: bool = True

    @property
    def fed(self) -> list[int]:
        return list(self.token_ids[:-1] if self.scores else self.token_ids)

    def params(self) -> SamplingParams:
        if self.scores:
            params = score_params(self.token_ids, self.top)
        else:
            params = SamplingParams(
                max_tokens=1,
                temperature=0.0,
                prompt_logprobs=self.top,
                logprobs=self.top,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={PACKED: 1},
            )
        if not self.cached:
            params.extra_args = {PACKED: 1, NO_CACHE: 1}
        return params


class Names:
    """Stands in for `TokenStrings`: a token's text is its number."""

    def json_at(self, prompt: Sequence[int], start: int, ids: np.ndarray) -> list[str]:
        return [f'"{token_id}"' for token_id in ids.ravel().tolist()]

    def first_of_a_prompt(self, token_id: int) -> str:
        return f'"{token_id}"'


@dataclass
class Setup:
    engine: FakeEngine
    cache: LogprobCache
    on_counts: OnCounts = None
    caching: CachingEngine = field(init=False)
    num_asked: int = 0
    num_rows: int = 0
    """Rows in the answers that the cache had a part in."""
    writer: LogprobsWriter = field(default_factory=lambda: LogprobsWriter(Names()))

    def __post_init__(self) -> None:
        clear_on_changes(self.engine, self.cache, self.on_counts)
        self.caching = CachingEngine(self.engine, self.cache, self.on_counts)

    async def ask(self, ask: Ask) -> RequestOutput:
        """Ask, and hold every row of the answer against what it has to be."""
        self.num_asked += 1
        first = self.engine.weights[ask.adapter]
        through_cache = ask.cached and self.cache.enabled and len(ask.token_ids) > self.cache.block_size
        outputs = [
            output
            async for output in self.caching.generate(
                tokens_input(ask.fed, cache_salt=ask.salt),
                ask.params(),
                f"ask-{self.num_asked}",
                lora_request=LORAS[ask.adapter],
            )
        ]
        (output,) = outputs
        if output.outputs[0].finish_reason == "abort":
            assert not through_cache or len(output.prompt_logprobs.arrays(ask.top + 1)[0]) == 0
            raise LostRequestError
        weights = range(first, self.engine.weights[ask.adapter] + 1)
        assert any(self.is_right(ask, output, version) for version in weights), (ask, output.num_cached_tokens)
        assert 0 <= output.num_cached_tokens < len(ask.fed)
        assert ask.scores or self.written(ask, output) == output.prompt_logprobs.arrays(1)[1][:, 0].tolist()
        self.num_rows += through_cache * (len(ask.token_ids) - 1)
        return output

    def is_right(self, ask: Ask, output: RequestOutput, weights: int) -> bool:
        width = ask.top + 1
        expected = expected_rows(ask.token_ids, width, adapter=ask.adapter, salt=ask.salt or "", weights=weights)
        if ask.scores:
            score = read_score(ask.token_ids, ask.top, output)
            ids = np.concatenate([np.array(ask.token_ids)[:, None], score.top_token_ids], axis=1)[1:]
            logprobs = np.concatenate([score.logprobs[:, None], score.top_logprobs], axis=1)[1:]
            got = (ids, logprobs, score.ranks[1:])
        else:
            got = output.prompt_logprobs.arrays(width)
        return all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))

    def written(self, ask: Ask, output: RequestOutput) -> list[float]:
        """The logprobs of the prompt's tokens but the first, as JSON says them."""
        pieces = self.writer.prompt(ask.fed, output.prompt_logprobs, ask.top + 1, Style(ask.top, as_token_ids=False))
        logprobs: list[float] = orjson.loads(openai_logprobs(pieces))["token_logprobs"]
        return logprobs[1:]

    def check_nothing_is_left(self) -> None:
        assert len(self.caching._flights) == 0
        assert self.engine.num_running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert self.num_bytes() == self.cache.num_bytes <= self.cache.max_bytes

    def num_bytes(self) -> int:
        """What the entries take, added up anew."""
        return sum(
            entry.num_bytes if isinstance(entry, Whole) else len(entry) + ENTRY_BYTES
            for entry in self.cache._entries.values()
        )


def setup(runner: str = "v2", max_bytes: int = ROOM, size: int = SIZE, **settings: Any) -> Setup:
    return Setup(FakeEngine(size, runner, **settings), LogprobCache(size, max_bytes))


async def outcome(setup: Setup, ask: Ask) -> RequestOutput | None:
    """The answer, or None where the engine lost the request."""
    try:
        return await setup.ask(ask)
    except LostRequestError:
        return None
