"""Prompt logprobs from the Triton kernels beside float64 PyTorch. `test_triton_kernels.py` runs these."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from row_checks import DTYPES, Scores, check, random_logits
from vllm.v1.worker.gpu.sample import prompt_logprob

from scoremode_server.kernels import fused_logprobs, triton_kernels
from scoremode_server.kernels.reduced_rows import ReducedRows
from scoremode_server.kernels.tiling import TILING, Tiling
from scoremode_server.kernels.working_memory import LogitsShape
from scoremode_server.vllm_patches import runner_v2
from scoremode_server.vllm_patches.runner_v2 import PromptLogprobs

TILE = TILING.lanes * TILING.width


def scored(logits: torch.Tensor, targets: torch.Tensor, num_top: int, limit: int = 1000) -> Scores:
    """`compute` with an identity for its projection."""
    return fused_logprobs.compute(targets, logits, lambda rows: rows, num_top, limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "stride"),
    [(1, 1), (7, 64), (129, 192), (TILE, TILE), (2 * TILE + 1, 2 * TILE + 64)],
)
def test_random_rows(dtype: torch.dtype, vocab: int, stride: int):
    generator = torch.Generator().manual_seed(vocab)
    rows = 3
    logits = random_logits(rows, vocab, stride, dtype, seed=vocab)
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[0], targets[1] = 0, vocab - 1
    for num_top in {0, 1, min(20, vocab), min(fused_logprobs.MAX_TOP, vocab)}:
        check(logits, targets, scored(logits, targets, num_top))


@pytest.mark.parametrize("tiling", [Tiling(16, 4, 1, 1), Tiling(64, 8, 2, 3), Tiling(32, 1, 1, 1)])
def test_tilings(tiling: Tiling):
    """Many tiles to a row, and few entries to a tile."""
    logits = random_logits(5, 777, 800, torch.bfloat16, seed=3)
    targets = torch.tensor([0, 776, 100, 31, 512])
    for num_top in (0, 1, 9):
        reduced = ReducedRows.empty(5, num_top, torch.device("cpu"))
        triton_kernels.take_targets(logits, targets, 0, 777, reduced)
        triton_kernels.reduce_rows(logits, 0, 777, reduced, tiling=tiling)
        check(logits, targets, (reduced.tokens, reduced.logprobs(), reduced.ranks))


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_ties(num_top: int):
    """Logits of few different values: ranks count all that are as high."""
    values = torch.tensor([-3.0, 0.5, 2.0])
    logits = values[torch.randint(3, (8, 9001), generator=torch.Generator().manual_seed(1))].bfloat16()
    logits[0] = 1.5
    targets = torch.arange(8) * 1100
    scores = scored(logits, targets, num_top)
    check(logits, targets, scores)
    assert scores[2][0] == 9001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [1, 20])
def test_masked_entries(dtype: torch.dtype, num_top: int):
    vocab = TILE + 100
    logits = random_logits(6, vocab, vocab + 28, dtype, seed=5)
    logits[0, 10:] = -math.inf  # fewer entries than the top 20 has, and none in the last tile
    logits[1, :-10] = -math.inf
    logits[2, ::2] = -math.inf
    logits[3, : TILE - 1] = -math.inf
    logits[4] = -math.inf
    logits[5, : TILE // 2] = torch.finfo(dtype).min
    targets = torch.tensor([vocab - 1, 0, 4, vocab - 1, 7, 5])
    scores = scored(logits, targets, num_top)
    check(logits, targets, scores)
    assert scores[1][:3, 0].tolist() == [-math.inf] * 3
    assert scores[1][4].isnan().all()
    assert scores[2][[0, 4]].tolist() == [vocab, vocab]


@pytest.mark.parametrize(("dtype", "num_top"), [(torch.bfloat16, 0), (torch.float16, 1), (torch.float32, 5)])
def test_nan_is_never_a_number(dtype: torch.dtype, num_top: int):
    vocab = TILE + 9
    logits = random_logits(8, vocab, vocab, dtype, seed=6)
    for row, column in enumerate((0, 1, 777, TILE - 1, TILE, vocab - 1)):
        logits[row, column] = math.nan
    logits[6] = math.nan
    tokens, logprobs, _ = scored(logits, torch.full((8,), 777), num_top)
    assert logprobs[:7].isnan().all()
    assert not logprobs[7].isnan().any()
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_infinity_is_no_number():
    logits = random_logits(2, 300, 300, torch.float16, seed=7)
    logits[0, 5] = math.inf
    logprobs = scored(logits, torch.tensor([5, 5]), 1)[1]
    assert logprobs[0].isnan().all()
    assert logprobs[1].isfinite().all()


def test_a_token_outside_the_vocabulary_has_no_probability():
    logprobs = scored(random_logits(2, 300, 320, torch.float16, seed=7), torch.tensor([300, -1]), 0)[1]
    assert logprobs.tolist() == [[-math.inf], [-math.inf]]


def test_rows_beyond_two_to_the_thirty_one_entries():
    """Offsets of entries do not fit in 32 bits; the memory between the rows is never touched."""
    stride = 2**30 + 64
    memory = torch.empty(2 * stride + 100, dtype=torch.bfloat16)
    logits = memory.as_strided((3, 100), (stride, 1))
    logits.copy_(random_logits(3, 100, 100, torch.bfloat16, seed=8))
    targets = torch.tensor([3, 50, 99])
    for num_top in (1, 4):
        check(logits, targets, scored(logits, targets, num_top))


def test_logits_that_are_no_rows_are_refused():
    with pytest.raises(ValueError, match="rows"):
        scored(torch.zeros(6, 5).T, torch.zeros(5, dtype=torch.int64), 0)


@pytest.mark.parametrize("limit", [1, 3, 7, 8])
def test_chunks(limit: int):
    sizes: list[int] = []

    def project(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows

    logits = random_logits(8, 400, 400, torch.bfloat16, seed=9)
    targets = torch.arange(8)
    check(logits, targets, fused_logprobs.compute(targets, logits, project, 4, limit))
    assert sum(sizes) == 8
    assert max(sizes) == limit


def test_no_rows():
    tokens, logprobs, ranks = scored(torch.zeros(0, 400), torch.zeros(0, dtype=torch.int64), 2)
    assert (tokens.shape, logprobs.shape, ranks.shape) == ((0, 3), (0, 3), (0,))


STEPS = [{"whole": 12, "parts": 5}, {"parts": 6, "plain": 3}, {"whole": 1, "parts": 5, "short": 2}]
LENGTHS = {"whole": 12, "parts": 16, "plain": 3, "short": 2}
TOPS = {"whole": 0, "parts": 4, "plain": None, "short": 1}
MAX_LENGTH, VOCAB, HIDDEN = 32, 300, 16


def token_ids(num_tokens: int, starts: Any, mapping: Any, computed: Any, all_tokens: torch.Tensor) -> torch.Tensor:
    """What vLLM's kernel of the same purpose gives; vLLM turns Triton off where there is no GPU."""
    out = torch.zeros(num_tokens, dtype=torch.int64)
    for row, request in enumerate(mapping.tolist()):
        length = int(starts[row + 1] - starts[row])
        first = int(computed[request]) + 1
        out[starts[row] : starts[row + 1]] = all_tokens[request, first : first + length]
    return out


def test_in_vllms_worker(monkeypatch):
    """vLLM's own cutting and merging of requests and steps, with our function in the place of its own."""
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(HIDDEN, VOCAB, generator=generator)
    states = {name: torch.randn(length, HIDDEN, generator=generator) for name, length in LENGTHS.items()}
    all_tokens = torch.randint(VOCAB, (len(LENGTHS), MAX_LENGTH), generator=generator)
    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", token_ids)
    alone = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    monkeypatch.setattr(runner_v2, "get_tp_group", lambda: alone)
    compute = PromptLogprobs(VOCAB * 4 * 2 * 6, prompt_logprob.compute_prompt_logprobs_with_chunking)
    compute.load(LogitsShape(VOCAB, 4))
    monkeypatch.setattr(prompt_logprob, "compute_prompt_logprobs_with_chunking", compute)
    worker = prompt_logprob.PromptLogprobsWorker(len(LENGTHS), torch.device("cpu"))
    for index, name in enumerate(LENGTHS):
        worker.add_request(name, index, SimpleNamespace(prompt_logprobs=TOPS[name], prompt_logprob_token_ids=None))
    computed = dict.fromkeys(LENGTHS, 0)
    results: dict[str, Any] = {}
    for step in STEPS:
        names, indices = list(step), [list(LENGTHS).index(name) for name in step]
        starts = np.cumsum([0, *step.values()])
        batch = SimpleNamespace(
            req_ids=names,
            idx_mapping=torch.tensor(indices),
            idx_mapping_np=np.array(indices),
            num_computed_prefill_tokens_np=np.array([computed[name] for name in names]),
            prefill_len_np=np.array([LENGTHS[name] for name in names]),
            num_scheduled_tokens=np.array(list(step.values())),
            num_tokens=int(starts[-1]),
            query_start_loc=torch.tensor(starts),
            query_start_loc_np=starts,
        )
        hidden = torch.cat(
            [
                torch.cat((states[name], torch.zeros(1, HIDDEN)))[computed[name] : computed[name] + count]
                for name, count in step.items()
            ]
        )
        lengths = np.array(list(LENGTHS.values()))
        now = torch.tensor(list(computed.values()))
        results |= worker.compute_prompt_logprobs(lambda rows: rows @ weight, hidden, batch, all_tokens, now, lengths)
        for name, count in step.items():
            computed[name] += count
    assert results.keys() == {"whole", "parts", "short"}
    for index, (name, length) in enumerate(LENGTHS.items()):
        if name in results:
            assert results[name].logprobs.shape == (length - 1, TOPS[name] + 1)
            check(states[name][:-1] @ weight, all_tokens[index, 1:length], tuple(results[name][:3]))
