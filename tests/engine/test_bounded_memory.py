"""`score` on a real engine: the numbers of transformers, in chunks of rows that fit a budget, and refusals."""

from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM

from scoremode_server import score
from scoremode_server.errors import RequestError
from scoremode_server.kernels.working_memory import LogitsShape, row_bytes_fused
from tests import oracle
from tests.engine.conftest import BLOCK, CHUNK, LENGTH, MAX_LOGPROBS, SMALL_BUDGET, STEP_TOKENS


@pytest.mark.parametrize("top", [0, 5])
def test_chunks_score_as_transformers_does(llm, random_model, top):
    generator = np.random.default_rng(7)
    # One row fewer than a chunk, a chunk, one more; the same of two chunks, of a step's tokens, and of several steps.
    lengths = (2, CHUNK, CHUNK + 1, CHUNK + 2, 15, 16, STEP_TOKENS, STEP_TOKENS + 1, STEP_TOKENS + 2, 101, LENGTH)
    sequences = [generator.integers(3, 1000, length).tolist() for length in lengths]
    llm.collective_rpc(record_rows)
    alone, *scores = score(llm, [[5], *sequences], top_logprobs=top)
    rows = llm.collective_rpc(lambda worker: worker.recorded_rows)[0]
    assert np.isnan([alone.logprobs[0], *(one.logprobs[0] for one in scores)]).all()
    assert len(alone.logprobs) == 1
    expected = oracle.logprobs(random_model, sequences)
    ranks = oracle.ranks(random_model, sequences)
    for index, one in enumerate(scores):
        oracle.assert_close(one.logprobs[1:], expected[index])
        assert np.array_equal(one.ranks[1:], ranks[index])
        if top:
            best = oracle.logits(random_model, sequences[index]).log_softmax(-1).topk(top).values
            oracle.assert_close(one.top_logprobs[1:], best.numpy())
    # Rows with fewer results take less memory.
    assert max(rows) == (CHUNK if top else 2 * CHUNK)


@pytest.mark.parametrize(
    ("prompts", "top_logprobs", "param"),
    [
        ([5] * (LENGTH + 1), 0, "prompt"),
        ([[5, 6], []], 0, "prompt"),
        ([5, 10**6], 0, "prompt"),
        ([5, 6], MAX_LOGPROBS + 1, "top_logprobs"),
    ],
)
def test_bad_input_names_its_field(llm: LLM, prompts, top_logprobs, param):
    with pytest.raises(RequestError) as error:
        score(llm, prompts, top_logprobs)
    assert error.value.param == param


def test_what_a_gpu_reserves_is_a_chunk_of_scores_and_a_step_of_comparisons(llm):
    score(llm, [5, 6])
    llm.collective_rpc(record_rows)
    llm.collective_rpc(reserve)
    # A trial, and chunks without and with 20 top tokens each.
    chunks = [(SMALL_BUDGET - BLOCK) // row_bytes_fused(LogitsShape(1024, 4), num_top, 1) for num_top in (0, 20)]
    trial, without, with_top, *compared = llm.collective_rpc(lambda worker: worker.recorded_rows)[0]
    assert [trial, without, with_top] == [2, *chunks]
    # All that a step may compare, of both sides.
    assert sum(compared) == 2 * STEP_TOKENS


# The functions below run in the engine's worker.


def record_rows(worker: Any) -> None:
    """Keep the number of rows of every projection from now on."""
    model = worker.model_runner.model
    compute_logits = type(model).compute_logits
    worker.recorded_rows = []

    def recording(self: Any, hidden_states: Any) -> Any:
        worker.recorded_rows.append(len(hidden_states))
        return compute_logits(self, hidden_states)

    # A method, as the model's own is.
    model.compute_logits = MethodType(recording, model)


def reserve(worker: Any) -> None:
    """As in a GPU's dummy run."""
    runner = worker.model_runner
    runner._scoremode_scorer.reserve(runner, torch.zeros(1, runner.model_config.get_hidden_size()))
