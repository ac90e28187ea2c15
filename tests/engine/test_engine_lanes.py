"""The decode lane in an engine: one token of each sequence a step, and the logprobs of transformers."""

from pathlib import Path

import numpy as np
from vllm import LLM

from tests import oracle
from tests.engine.conftest import LENGTH
from tests.gpu.lanes import lane_logprobs

TOKENS = 90


def note_steps(worker) -> None:
    """Let a worker note the tokens of each request in each step."""
    runner, steps = worker.model_runner, []
    execute = runner.execute_model

    def execute_and_note(step, *rest):
        steps.append(sorted(step.num_scheduled_tokens.values()))
        return execute(step, *rest)

    runner.execute_model, worker.steps = execute_and_note, steps


def test_every_lane_is_as_transformers(llm: LLM, random_model: Path):
    """Two pairs of texts begin alike, and are longer than several blocks of keys and values."""
    first, second, *ends = np.random.default_rng(23).integers(3, 900, (4, TOKENS)).tolist()
    texts = [first, first[:40] + ends[0][40:], second, second[:64] + ends[1][64:]]
    exact = oracle.logprobs(random_model, texts)
    for lane in (lane_logprobs(llm, texts, chunk) for chunk in (1, 0, 3)):
        for found, expected in zip(lane, exact, strict=True):
            oracle.assert_close(found, expected)


def test_a_full_cache_of_keys_begins_sequences_again_in_their_lane(llm: LLM, random_model: Path):
    """The cache has blocks for two of three sequences, so vLLM must preempt the third."""
    llm.collective_rpc(note_steps)
    texts = np.random.default_rng(29).integers(3, 900, (3, LENGTH)).tolist()
    found = lane_logprobs(llm, texts, 1)
    (steps,) = llm.collective_rpc(lambda worker: [step for step in worker.steps if step])
    assert {size for step in steps for size in step} == {1}
    assert len([size for step in steps for size in step]) > 3 * (LENGTH - 1)
    for one, exact in zip(found, oracle.logprobs(random_model, texts), strict=True):
        oracle.assert_close(one, exact)
