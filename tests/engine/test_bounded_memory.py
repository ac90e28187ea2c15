"""`score` on a real engine: the numbers of transformers, in chunks with no more memory than the budget, and refusals.

What is measured is measured in the engine's own process, through vLLM's `collective_rpc`.
"""

import ctypes
import os
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM, SamplingParams, TokensPrompt

from scoremode_server import score
from scoremode_server.errors import RequestError
from scoremode_server.kernels.working_memory import LogitsShape, row_bytes_fused
from scoremode_server.settings import LOGPROB_BYTES
from tests import models, oracle
from tests.engine.conftest import BLOCK, CHUNK, LENGTH, MAX_LOGPROBS, SMALL_BUDGET, STEP_TOKENS

MEBIBYTE = 1024**2

LARGE_VOCABULARY = 262_144
LONG_PROMPT = 640
LONG_STEP_TOKENS = 512
TOLERANCE = 48 * MEBIBYTE
"""For what is not working memory of prompt logprobs: a step's activations, a queue of the vocabulary's size that top-k
keeps for each thread (4 MiB a thread), the request's results, and what the allocator keeps of small blocks."""


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


def test_what_a_gpu_reserves_is_one_chunk(llm):
    score(llm, [5, 6])
    llm.collective_rpc(record_rows)
    llm.collective_rpc(reserve)
    # A trial, and chunks without and with 20 top tokens each.
    chunks = [(SMALL_BUDGET - BLOCK) // row_bytes_fused(LogitsShape(1024, 4), num_top, 1) for num_top in (0, 20)]
    assert llm.collective_rpc(lambda worker: worker.recorded_rows)[0] == [2, *chunks]


def test_a_large_vocabulary_stays_within_the_budget(tmp_path, monkeypatch):
    """With the same engine unbounded for contrast: a step's 512 rows of 262,144 logits are 512 MiB."""
    # Only the worker is measured: it has a process, and one for the scheduler would take long to start.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = models.random_llama(tmp_path, vocab_size=LARGE_VOCABULARY, num_layers=1, max_position=2 * LONG_PROMPT)
    engine = LLM(
        str(model),
        dtype="float32",
        max_model_len=LONG_PROMPT + 1,
        max_num_seqs=2,
        max_num_batched_tokens=LONG_STEP_TOKENS,
        enforce_eager=True,
        skip_tokenizer_init=True,
        distributed_executor_backend="mp",
    )
    tokens = np.random.default_rng(11).integers(3, LARGE_VOCABULARY, LONG_PROMPT).tolist()
    try:
        # What only a first request allocates: compiled code, the pages of the KV cache, buffers that are kept.
        logprobs(engine, tokens[:600], 5)
        engine.collective_rpc(reset_peak)
        bounded = logprobs(engine, tokens, 5)
        bounded_growth = engine.collective_rpc(growth)[0]
        engine.collective_rpc(unbound)
        engine.collective_rpc(reset_peak)
        unbounded = logprobs(engine, tokens, 5)
        unbounded_growth = engine.collective_rpc(growth)[0]
    finally:
        engine.llm_engine.engine_core.shutdown()
    assert np.abs(bounded - unbounded).max() < 1e-5
    assert bounded_growth < LOGPROB_BYTES + TOLERANCE < unbounded_growth


def logprobs(engine: LLM, tokens: list[int], top: int) -> np.ndarray:
    """[(tokens - 1) * (top + 1)]: of the actual token and the top tokens, position by position."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=top, flat_logprobs=True, detokenize=False)
    output = engine.generate([TokensPrompt(prompt_token_ids=tokens)], params, use_tqdm=False)[0]
    return np.array(output.prompt_logprobs.logprobs)


# What follows runs in the engine's process.


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


def unbound(worker: Any) -> None:
    """Let this engine have all the memory it wants."""
    worker.model_runner._scoremode_scorer.budget_bytes = 1 << 60


def reset_peak(worker: Any) -> None:
    """Let the peak of resident memory start from what is in use now: free pages that are resident would hide growth."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    worker.resident_before = _status("VmRSS")


def growth(worker: Any) -> int:
    """Bytes by which resident memory has grown at its peak since `reset_peak`."""
    return _status("VmHWM") - worker.resident_before


def _status(field: str) -> int:
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
