"""Marked requests in a worker: which rows they get, in one step or several, with which candidates."""

from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams

from scoremode_server.kernels import fused_logprobs
from scoremode_server.vllm_patches.scored_windows import ScoredMark, ScoredWindows
from scoremode_server.vllm_patches.windows import Projections

CPU = torch.device("cpu")
VOCAB = 50
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8]
"""The last one is not fed."""


class Logits(Projections):
    """Hidden states are logits."""

    shard = None

    def __init__(self) -> None:
        self.rows = 0

    def score(
        self,
        targets: torch.Tensor,
        hidden_states: torch.Tensor,
        num_top: int = 0,
        candidates: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[torch.Tensor, ...]:
        self.rows += len(targets)
        return fused_logprobs.compute(
            targets, hidden_states, lambda rows: rows, num_top, 3, candidates=candidates, temperature=temperature
        )

    def compared_rows(self, num_top: int, reference_logit_bytes: int) -> int:
        return 3


def mark(first: int = 1, candidates: np.ndarray | None = None, **changes: Any) -> ScoredMark:
    fields: dict[str, Any] = {"num_top": 2, "temperature": 1.0, **changes}
    return ScoredMark(
        first=first,
        last_token=TOKENS[-1],
        num_candidates=0 if candidates is None else candidates.shape[-1],
        candidates=b"" if candidates is None else candidates.astype(np.int32).tobytes(),
        **fields,
    )


def run(marked: ScoredMark, steps: list[int], start: int = 0) -> tuple[Any, Logits, torch.Tensor]:
    """The rows that a request gets whose tokens from `start` on are computed in such steps; all logits."""
    windows, projections = ScoredWindows(), Logits()
    params = SamplingParams(prompt_logprobs=0, extra_args=marked.as_extra_args())
    assert windows.add("request", params, writes=False, device=CPU) is windows.get("request")
    window = windows.get("request")
    assert window is not None
    logits = torch.randn(len(TOKENS) - 1, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    tokens, rows = torch.tensor(TOKENS[:-1]), None
    for length in steps:
        assert rows is None
        rows = window.step(start, logits[start : start + length], tokens, len(tokens), projections)
        start += length
    return rows, projections, logits


@pytest.mark.parametrize("steps", [[7], [3, 4], [1] * 7])
@pytest.mark.parametrize("first", [1, 4, 7])
def test_rows_from_the_first_target_on_with_candidates_of_their_own(steps: list[int], first: int):
    chosen = np.random.default_rng(0).integers(0, VOCAB, (len(TOKENS) - first, 3))
    rows, projections, logits = run(mark(first, chosen, temperature=0.5), steps)
    exact = (logits.double() / 0.5).log_softmax(-1).numpy()[first - 1 :]
    assert projections.rows == len(TOKENS) - first
    assert rows.logprob_token_ids[:, 0].tolist() == TOKENS[first:]
    assert np.array_equal(rows.logprob_token_ids[:, 1:4], chosen)
    assert np.allclose(rows.logprobs[:, 1:4], np.take_along_axis(exact, chosen, 1), atol=2e-5)
    assert np.allclose(rows.logprobs[:, 4:], np.sort(exact)[:, ::-1][:, :2], atol=2e-5)


def test_one_list_of_candidates_serves_all_rows():
    rows, _, logits = run(mark(candidates=np.array([7, 9])), [5, 2])
    exact = logits.double().log_softmax(-1)
    assert torch.allclose(rows.logprobs[:, 1:3].double(), exact[:, [7, 9]], atol=1e-5)


def test_rows_of_cached_positions_are_left_out():
    rows, projections, _ = run(mark(first=3), [3], start=4)
    assert projections.rows == 3
    assert rows.logprob_token_ids[:, 0].tolist() == TOKENS[5:]


def test_the_identity_has_all_that_decides_rows_but_not_num_top():
    shared, own = np.array([1, 2]), np.array([[1, 2]] * 7)
    plain = mark()
    assert mark(num_top=9).identity == plain.identity
    assert mark(first=5).identity == plain.identity
    assert mark(1, own).identity != mark(2, own[1:]).identity
    several = [plain, mark(temperature=0.5), mark(1, shared), mark(1, shared[::-1].copy()), mark(1, own)]
    assert len({each.identity for each in several}) == len(several)


def test_a_request_without_a_mark_has_no_window():
    windows = ScoredWindows()
    for params in (SamplingParams(), SamplingParams(extra_args={"other": 1}), None):
        assert windows.add("request", params, writes=False, device=CPU) is None
    assert windows.get("request") is None
