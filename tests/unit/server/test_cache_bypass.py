"""What is not for the cache, and what the engine gets wrong."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_setup import ROOM, SIZE, Ask, Setup, setup
from fake_engine import FakeEngine
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from scoremode_server.cache import LogprobCache
from scoremode_server.caching import NO_CACHE, CachingEngine, make_cache, scored_tokens
from scoremode_server.engine.packed_logprobs import PACKED, PackedLogprobs
from scoremode_server.errors import EngineOutputError
from scoremode_server.scoring import score_params


class RecordingEngine(FakeEngine):
    """Keeps what it is given."""

    given: tuple[Any, ...] = ()

    def generate(self, *given: Any, **options: Any) -> Any:
        self.given = given
        return super().generate(*given, **options)


@pytest.mark.parametrize(
    "change",
    [
        {"extra_args": None},
        {"extra_args": {PACKED: 1, NO_CACHE: 1}},
        {"extra_args": {PACKED: 1, "kv_transfer_params": {}}},
        {"n": 2},
        {"prompt_logprobs": None},
        {"prompt_logprobs": -1},
        {"prompt_logprob_token_ids": np.zeros((12, 1), np.int64)},
        {"output_kind": RequestOutputKind.CUMULATIVE},
    ],
    ids=str,
)
async def test_other_requests_are_the_engines_own(change: dict[str, Any]):
    engine = RecordingEngine(SIZE, "v1")
    caching = CachingEngine(engine, LogprobCache(SIZE, ROOM))
    prompt, params = tokens_input(list(range(12))), score_params(list(range(13)))
    for name, value in change.items():
        setattr(params, name, value)
    caching.generate(prompt, params, "id")
    assert engine.given[0] is prompt
    assert engine.given[1] is params


@pytest.mark.parametrize(
    "prompt",
    [
        {"type": "multimodal", "prompt_token_ids": list(range(12))},
        {"prompt_token_ids": list(range(12))},
        "text",
        tokens_input([0, 1]),
        tokens_input([*range(12), 1 << 40]),
    ],
    ids=["multimodal", "raw", "text", "shorter than a block", "no token of any vocabulary"],
)
async def test_other_prompts_are_the_engines_own(prompt: Any):
    engine = RecordingEngine(SIZE, "v1")
    CachingEngine(engine, LogprobCache(SIZE, ROOM)).generate(prompt, score_params(list(range(13))), "id")
    assert engine.given[0] is prompt


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"allowed_token_ids": [1, 2]},
        {"allowed_token_ids": None},
        {"max_tokens": 2},
        {"logprobs": None},
        {"logprobs": 3},
        {"flat_logprobs": False},
    ],
    ids=str,
)
def test_the_last_token_has_a_row_only_where_sampling_is_sure_to_give_it(change: dict[str, Any]):
    params = score_params([4, 5, 6], 1)
    for name, value in change.items():
        setattr(params, name, value)
    tokens = scored_tokens(tokens_input([4, 5]), params)
    assert tokens is not None
    assert tokens.tolist() == ([4, 5] if change else [4, 5, 6])


async def test_a_cache_without_a_budget_is_off():
    engine = RecordingEngine(SIZE, "v1")
    prompt = tokens_input(list(range(12)))
    CachingEngine(engine, LogprobCache(SIZE, 0)).generate(prompt, score_params(list(range(13))), "id")
    assert engine.given[0] is prompt


async def test_the_callers_params_and_prompt_stay_as_they_are():
    made = setup()
    prompt, params = tokens_input(list(range(12))), score_params(list(range(13)))
    for _ in range(2):
        (output,) = [output async for output in made.caching.generate(prompt, params, "id")]
    assert params.skip_reading_prefix_cache is True
    assert "cache_salt" not in prompt
    assert output.request_id == "id"


def engine_config(*, prefix_caching: bool = True, num_api_servers: int = 1) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16, prefix_match_unit=None, enable_prefix_caching=prefix_caching),
        parallel_config=SimpleNamespace(_api_process_count=num_api_servers),
    )


def test_the_block_size_is_the_engines_and_an_engine_without_a_prefix_cache_has_none():
    cache = make_cache(engine_config(), 9)
    assert (cache.block_size, cache.max_bytes) == (16, 9)
    assert not make_cache(engine_config(prefix_caching=False), 9).enabled


@pytest.mark.parametrize(("mode", "count", "enabled"), [("0", 2, True), ("1", 1, True), ("1", 2, False)])
def test_no_rows_are_kept_where_another_api_server_may_change_the_weights(
    monkeypatch: pytest.MonkeyPatch, mode: str, count: int, enabled: bool
):
    """The routes that do so are vLLM's development mode's, and reach one of the processes."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", mode)
    assert make_cache(engine_config(num_api_servers=count), 9).enabled == enabled


# What the engine gets wrong


class BrokenEngine(FakeEngine):
    """Spoils the rows of the first requests: `spoil` is given the arrays and returns others."""

    def __init__(self, spoil: Any, num_spoilt: int, runner: str = "v1") -> None:
        super().__init__(SIZE, runner)
        self.spoil, self.num_spoilt = spoil, num_spoilt

    async def generate(self, *given: Any, **options: Any) -> Any:
        async for output in super().generate(*given, **options):
            if self.num_requests <= self.num_spoilt:
                rows = output.prompt_logprobs.arrays(1)
                output.prompt_logprobs = PackedLogprobs.of(*self.spoil(*(array.copy() for array in rows)))
            yield output


def with_nan(ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, ...]:
    logprobs[5] = np.nan
    return ids, logprobs, ranks


def with_nan_in_the_first_block(ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, ...]:
    logprobs[1] = np.nan
    return ids, logprobs, ranks


def of_other_tokens(ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, ...]:
    return ids + 1, logprobs, ranks


def too_few(*rows: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(array[1:] for array in rows)


def too_many(*rows: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(np.concatenate([array[:2], array]) for array in rows)


@pytest.mark.parametrize("spoil", [with_nan, with_nan_in_the_first_block, of_other_tokens, too_few, too_many])
async def test_an_output_that_is_not_what_was_asked_for_is_asked_for_again_once(spoil: Any):
    made = Setup(BrokenEngine(spoil, 1), LogprobCache(SIZE, ROOM))
    await made.ask(Ask(list(range(13))))
    assert made.engine.num_requests == 2
    # What is kept now is right as well.
    assert (await made.ask(Ask([*range(13), 20, 21]))).num_cached_tokens == 12
    broken = Setup(BrokenEngine(spoil, 9), LogprobCache(SIZE, ROOM))
    with pytest.raises(EngineOutputError, match="no logprob, or NaN"):
        await broken.ask(Ask(list(range(13))))
    assert len(broken.cache) == 0
    broken.check_nothing_is_left()
