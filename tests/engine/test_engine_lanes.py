"""The decode lane in an engine: one token of each sequence a step, and the logprobs of step-by-step decoding."""

from pathlib import Path

import numpy as np
import pytest
import torch
from vllm import LLM

from tests import oracle
from tests.engine.conftest import LENGTH, STEP_TOKENS
from tests.gpu.lanes import by_transformers, lane_logprobs

BATCH, TOKENS = 4, 90


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Two pairs that begin alike, longer than several blocks of keys and values."""
    random = np.random.default_rng(23)
    first, second, *ends = (random.integers(3, 900, TOKENS).tolist() for _ in range(4))
    return [first, first[:40] + ends[0][40:], second, second[:64] + ends[1][64:]]


def note_steps(worker) -> None:
    """Let a worker note the tokens of each request in each step."""
    runner, steps = worker.model_runner, []
    execute = runner.execute_model

    def execute_and_note(step, *rest):
        steps.append(sorted(step.num_scheduled_tokens.values()))
        return execute(step, *rest)

    runner.execute_model, worker.steps = execute_and_note, steps


def noted_steps(worker) -> list[list[int]]:
    """The steps since they were last asked for."""
    steps = [step for step in worker.steps if step]
    worker.steps.clear()
    return steps


@pytest.fixture(scope="module")
def noting(llm: LLM) -> LLM:
    llm.collective_rpc(note_steps)
    return llm


def steps_of(llm: LLM) -> list[list[int]]:
    (steps,) = llm.collective_rpc(noted_steps)
    return steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decode_is_as_step_by_step_decoding(noting: LLM, random_model: Path, texts, dtype):
    exact = by_transformers(random_model, texts, dtype)
    for lane in (lane_logprobs(noting, texts, chunk) for chunk in (1, 0, 3)):
        for found, expected in zip(lane, exact, strict=True):
            oracle.assert_close(found, expected)


@pytest.mark.parametrize("chunk", [1, 3])
def test_after_the_context_each_step_has_a_chunk(noting: LLM, texts, chunk):
    steps_of(noting)
    first = 11
    lane_logprobs(noting, texts, chunk, first)
    steps = steps_of(noting)
    context, rest = first - 1, TOKENS - 1 - (first - 1)
    assert sum(map(sum, steps)) == BATCH * (TOKENS - 1)
    sizes = [size for step in steps for size in step]
    assert sizes.count(context) == BATCH
    assert sizes.count(chunk) == BATCH * (rest // chunk)
    # All sequences go on together once all have their context.
    assert [chunk] * BATCH in steps


def test_a_context_longer_than_a_step_is_prefilled_in_several(noting: LLM, texts):
    steps_of(noting)
    lane_logprobs(noting, texts[:1], 1, STEP_TOKENS + 21)
    assert [step[0] for step in steps_of(noting)][:3] == [STEP_TOKENS, 20, 1]


def test_a_full_cache_of_keys_begins_sequences_again_in_their_lane(random_model: Path):
    """With blocks for less than two of the three sequences vLLM must preempt, or let them wait."""
    engine = LLM(
        str(random_model),
        dtype="float32",
        max_model_len=LENGTH,
        max_num_seqs=4,
        max_num_batched_tokens=STEP_TOKENS,
        num_gpu_blocks_override=4,
        scheduler_reserve_full_isl=False,
        enforce_eager=True,
    )
    engine.collective_rpc(note_steps)
    random = np.random.default_rng(29)
    texts = random.integers(3, 900, (3, LENGTH)).tolist()
    found = lane_logprobs(engine, texts, 1)
    steps = steps_of(engine)
    engine.llm_engine.engine_core.shutdown()
    assert {size for step in steps for size in step} == {1}
    assert len([size for step in steps for size in step]) > 3 * (LENGTH - 1)
    for one, exact in zip(found, oracle.logprobs(random_model, texts), strict=True):
        oracle.assert_close(one, exact)
