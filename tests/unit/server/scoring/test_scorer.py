"""Scoring on an engine, without HTTP."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.config.lora import LoRAConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from scoremode_server.engine.sequence import EnginePass, ScoreSettings, TokenSequence
from scoremode_server.scoring.scorer import Pacer, Scorer, check_engine, served_lanes
from tests.unit.server.engine.cache_setup import Setup, setup
from tests.unit.server.engine.fake_engine import expected_rows

TOKENS = list(range(20))


async def scored(made: Setup, tokens: list[int], first: int = 0, **options: Any) -> EnginePass:
    async with made.scoring.admission.request(1, len(tokens)) as queue:
        settings = ScoreSettings(request_id="id", queue=queue, **options)
        sequence = TokenSequence(context=tokens, first=first)
        (answer,) = [each async for each in Scorer(made.scoring, Pacer()).scores([EnginePass(sequence)], settings)]
    return answer


async def test_rows_are_those_of_the_requested_tokens():
    made = setup()
    answer = await scored(made, TOKENS, first=7, top_logprobs=2)
    assert np.array_equal(answer.rows.logprobs, expected_rows(TOKENS, 3)[1][6:])
    # Top tokens are wanted on a server with --max-logprobs 1 too.
    assert [params.prompt_logprobs for _, params in made.engine.requests] == [0]
    answer = await scored(made, [4], top_logprobs=3)
    assert (answer.rows.logprobs.shape, answer.num_cached_tokens, made.engine.num_requests) == ((0, 4), 0, 1)


@pytest.mark.parametrize("use_cache", [True, False])
async def test_an_answer_holds_its_rows_once(use_cache: bool):
    """The arrays in which they came from the engine are freed."""
    answer = await scored(setup(), TOKENS, top_logprobs=2, use_cache=use_cache)
    assert (len(answer.rows), answer.output.prompt_logprobs) == (19, None)


@pytest.mark.parametrize(
    ("max_bytes", "options"),
    [(1 << 24, [{"use_cache": False, "cache_salt": "shared"}] * 2), (0, [{"owner": "a"}, {"owner": "b"}])],
)
async def test_keys_and_values_that_may_not_be_shared_have_different_salts(max_bytes, options):
    made = setup(max_bytes=max_bytes)
    for each in options:
        await scored(made, TOKENS, **each)
    assert len({*made.engine.salts, None, ""}) == 4


async def test_lanes_share_nothing_in_either_order_or_with_themselves():
    made, orders = setup(), ({}, {"chunk": 1}, {"chunk": 1}, {"chunk": 3}, {"chunk": 1, "cache_salt": "x"}, {})
    answers = [await scored(made, TOKENS, **options) for options in orders]
    assert [answer.num_cached_tokens > 0 for answer in answers] == [False] * 5 + [True]
    assert len({*made.engine.salts[1:5], made.engine.salts[0]}) == 5


@pytest.mark.parametrize(
    ("first", "context", "prefilled", "of_answer"),
    [(0, None, 1, 1), (7, None, 6, 7), (7, 3, 3, 3), (7, 100, 6, 7), (1, 5, 1, 1)],
)
def test_no_wanted_row_comes_from_a_prefill_step(first: int, context: int | None, prefilled: int, of_answer: int):
    """But the first token of an answer, as when it was generated."""
    settings = ScoreSettings(request_id="", queue=None, chunk=1, context=context)
    spec, spec_of_answer = (
        EnginePass(TokenSequence(context=TOKENS, first=first)).begin(each, "id", block_size=4).spec
        for each in (settings, replace(settings, prefills_first_target=True))
    )
    assert (spec.first, spec.context, spec.chunk) == (max(1, first), prefilled, 1)
    assert spec_of_answer.context == of_answer


@pytest.mark.parametrize(
    ("drafts", "context_parallel", "lanes"),
    [
        (0, 1, {"prefill": 0, "decode": 1}),
        (3, 1, {"prefill": 0, "decode": 1, "verify": 4}),
        # Ranks would have parts of a prompt's tokens.
        (3, 2, {"prefill": 0}),
    ],
)
def test_an_engine_has_the_lanes_of_its_scheduler(drafts: int, context_parallel: int, lanes: dict[str, int]):
    config = SimpleNamespace(
        model_config=SimpleNamespace(architecture="LlamaForCausalLM", has_inner_state=False),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
        scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: AsyncScheduler),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=context_parallel),
        num_speculative_tokens=drafts,
    )
    assert served_lanes(config) == lanes
    config.scheduler_config.get_scheduler_cls = lambda: object
    assert served_lanes(config) == {"prefill": 0}


@pytest.mark.parametrize(
    ("mode", "fast_prefill", "lora", "flag"),
    [
        ("processed_logits", False, None, "--logprobs-mode"),
        ("raw_logits", False, None, "--logprobs-mode"),
        ("raw_logprobs", True, None, "--kv-sharing"),
        # This platform is a CPU.
        ("raw_logprobs", False, LoRAConfig(), "--enable-lora"),
    ],
)
def test_settings_that_change_logprobs_are_refused(mode: str, fast_prefill: bool, lora: LoRAConfig | None, flag: str):
    config = SimpleNamespace(
        model_config=SimpleNamespace(logprobs_mode=mode),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
        lora_config=lora,
    )
    with pytest.raises(ValueError, match=flag):
        check_engine(config)
