"""Rows in a worker: which a request gets, in one step or several, alone or grouped with others, and what memory they
take."""

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode_server.kernels.working_memory import LogitsShape
from scoremode_server.worker.request_rows import StepPart
from scoremode_server.worker.row_scorer import RowScorer
from scoremode_server.worker.row_spec import RowSpec
from scoremode_server.worker.sinks import Sink, SinkMaker
from tests.unit.server.worker.linear_scorer import ALONE, LinearWorker, check_rows, make_scorer, rows_of

VOCAB, HIDDEN = 50, 16
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8]
"""The last one is not fed."""
NUM_FED = len(TOKENS) - 1
GENERATOR = torch.Generator().manual_seed(1)
STATES = torch.randn(NUM_FED, HIDDEN, generator=GENERATOR)
WEIGHT = torch.randn(HIDDEN, VOCAB, generator=GENERATOR)
OWN = np.random.default_rng(0).integers(0, VOCAB, (NUM_FED, 3)).astype(np.int32)


def project(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states @ WEIGHT


def check(rows: Any, spec: RowSpec, first: int) -> None:
    """Compare the rows of the targets from a position on with float64."""
    targets = TOKENS[first:] if spec.last_token is not None else TOKENS[first:-1]
    check_rows(rows, spec, project(STATES[first - 1 :][: len(targets)]), targets)


def candidates_from(first: int, **fields: Any) -> RowSpec:
    """A specification with candidates of each row's own."""
    return RowSpec(first, TOKENS[-1], num_candidates=3, candidates=OWN[first - 1 :].tobytes(), **fields)


@pytest.mark.parametrize("lengths", [[7], [3, 4], [1] * 7, [5, 4]], ids=str)
@pytest.mark.parametrize("first", [1, 4, 7])
def test_rows_from_the_first_target_on_however_the_prompt_is_split(lengths: list[int], first: int):
    """After the last split, placeholders for drafts follow the prompt."""
    worker, spec = LinearWorker(make_scorer(VOCAB), project), candidates_from(first, num_top=2, temperature=0.5)
    worker.scorer.begin("one", spec)
    start, rows = 0, None
    for length in lengths:
        assert rows is None
        states = torch.cat((STATES, torch.full((2, HIDDEN), torch.nan)))[start : start + length]
        rows = worker.step("one", start, states, torch.tensor(TOKENS[:-1]), NUM_FED)
        start += length
    check(rows, spec, first)
    assert np.array_equal(rows.token_ids[:, 1:4], OWN[first - 1 :])
    assert not worker.scorer.requests


SPECS = {
    "prompt": RowSpec(num_top=2),
    "plain": RowSpec(1, TOKENS[-1]),
    "more": RowSpec(3, TOKENS[-1], 4),
    "warm": RowSpec(1, TOKENS[-1], 1, temperature=2.0),
    "shared": RowSpec(2, TOKENS[-1], num_candidates=2, candidates=np.array([7, 9], np.int32).tobytes()),
    "own": candidates_from(5),
}


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_requests_of_one_step_are_computed_in_groups(chunk: int):
    """Next to each other and not, with the tokens of other requests between."""
    worker = LinearWorker(make_scorer(VOCAB, chunk=chunk), project)
    found = worker.together(SPECS, STATES, TOKENS[:-1])
    assert found.keys() == SPECS.keys()
    for name, spec in SPECS.items():
        check(found[name], spec, spec.first)
    # All rows of the plain group but two are wanted; these two come before `more`'s first target.
    if chunk == 1000:
        assert worker.num_projected == [7 + 5 + 7, 7, 6, 3]
    assert max(worker.num_projected) <= chunk


class WideSink(Sink):
    def chunk_rows(self, *_: Any) -> int:
        return 1000


def test_a_sink_may_not_enlarge_chunks():
    worker = LinearWorker(make_scorer(VOCAB, {"wide": SinkMaker(WideSink)}), project)
    worker.whole(RowSpec(1, TOKENS[-1], sinks={"wide": None}), STATES, TOKENS[:-1])
    assert worker.num_projected == [3, 3, 1]


@pytest.mark.parametrize("num_top", [-1, 300])
def test_more_top_tokens_than_the_kernels_find(num_top: int):
    vocab = 400
    weight = torch.randn(HIDDEN, vocab, generator=torch.Generator().manual_seed(2))
    worker = LinearWorker(make_scorer(vocab, chunk=30), lambda states: states @ weight)
    rows = worker.whole(RowSpec(num_top=num_top, is_packed=False), STATES, TOKENS[:-1])
    expected = (STATES @ weight)[:-1].double().log_softmax(1)
    targets = torch.tensor(TOKENS[1:-1])[:, None]
    logprobs = torch.tensor(rows.logprobs).double()
    assert logprobs.shape == (NUM_FED - 1, 1 + (vocab if num_top < 0 else num_top))
    assert torch.allclose(logprobs[:, :1], expected.gather(1, targets), atol=1e-4)
    assert torch.allclose(logprobs[:, 1:], expected.topk(logprobs.shape[1] - 1).values, atol=1e-4)


def resident(field: str) -> int:
    """Bytes of this process: VmRSS of now, or VmHWM of the peak."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def test_a_large_vocabulary_stays_within_the_budget():
    """An unbounded scorer is the contrast: the logits of 128 rows and 262,144 tokens are 128 MiB."""
    num_rows, vocab, mebibyte = 128, 262_144, 1024**2
    weight, states = torch.randn(HIDDEN, vocab), torch.randn(num_rows, HIDDEN)
    token_ids = torch.randint(vocab, (num_rows,)).tolist()
    found, growth = [], []
    for budget in (32 * mebibyte, 1 << 60):
        worker = LinearWorker(RowScorer(budget, LogitsShape(vocab, 4), ALONE), lambda hidden: hidden @ weight)
        # Memory that only a first request allocates.
        worker.whole(RowSpec(num_top=5), states[:3], token_ids[:3])
        # Free pages that are resident would hide growth.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        found.append(worker.whole(RowSpec(num_top=5), states, token_ids).logprobs)
        growth.append(resident("VmHWM") - before)
    # Results, and what top k keeps for each thread, are not working memory.
    assert growth[0] < 64 * mebibyte < growth[1], growth
    assert np.allclose(*found, rtol=0, atol=1e-5)


LANES = {
    "lane": RowSpec(2, TOKENS[-1], 2, chunk=1),
    "own": candidates_from(4, num_top=2, chunk=1),
    "drafts": RowSpec(2, chunk=3),
    "every": RowSpec(2, TOKENS[-1], -1, chunk=1, is_packed=False),
}
"""Rows with all top tokens do not wait."""
LANE_STEPS: tuple[dict[str, int], ...] = (
    {"lane": 1, "own": 3, "drafts": 1},
    {"lane": 1, "drafts": 3, "every": 4},
    {"own": 2, "drafts": 3, "lane": 1},
    {"lane": 4, "own": 1, "every": 2},
    {"own": 1, "every": 1},
)


class LaneWorker(LinearWorker):
    """Feeds parts of several requests in a step."""

    def __init__(self, max_waiting_rows: int) -> None:
        super().__init__(make_scorer(VOCAB, chunk=100), project)
        shape = self.scorer.shape
        self.scorer.waiting.max_bytes = max_waiting_rows * shape.padded * shape.logit_bytes
        self.fed: dict[str, int] = {}

    def begin(self, name: str) -> None:
        self.scorer.begin(name, LANES[name])
        self.fed[name] = 0

    def feed(self, scheduled: dict[str, int], *, is_projected: bool = False) -> dict[str, Any]:
        parts, states, targets = [], [], []
        for name, num_tokens in scheduled.items():
            if name not in self.fed:
                self.begin(name)
            start = self.fed[name]
            parts.append(StepPart(name, start, len(targets), num_tokens, NUM_FED))
            states.append(STATES[start : start + num_tokens])
            targets += [*TOKENS[:-1], 0][start + 1 : start + 1 + num_tokens]
            self.fed[name] = start + num_tokens
        joined = torch.cat(states)
        logits = project(joined) if is_projected else None
        found = self.scorer.score(parts, joined, torch.tensor(targets), self.logits_fn, logits)
        return {name: rows_of(rows, LANES[name]) for name, rows in found.items()}


@pytest.mark.parametrize("max_waiting_rows", [0, 3, 8, 1000])
@pytest.mark.parametrize("is_projected", [False, True])
def test_rows_of_lanes_wait_for_those_of_later_steps(max_waiting_rows: int, *, is_projected: bool):
    """Logits are those of their own step, so that all is equal bit for bit where the worker projects the same rows."""
    worker, alone = LaneWorker(max_waiting_rows), LaneWorker(0)
    found: dict[str, Any] = {}
    for number, step in enumerate(LANE_STEPS):
        results, expected = worker.feed(step, is_projected=is_projected), alone.feed(step)
        assert results.keys() == expected.keys()
        found |= results
        for name, rows in results.items():
            assert is_projected or np.array_equal(rows.table, expected[name].table)
        if max_waiting_rows == 1000 and number == 1:
            # Only rows with all top tokens are scored from the second step.
            assert [len(request.parts) for request in worker.scorer.requests.values()] == [0, 0, 0, 1]
    assert found.keys() == LANES.keys()
    for name in LANES.keys() - {"every"}:
        check(found[name], LANES[name], LANES[name].first)
    if max_waiting_rows == 1000 and is_projected:
        assert not worker.scorer.waiting.num_bytes


@pytest.mark.parametrize("ends", ["aborted", "begun again"])
def test_rows_that_wait_are_dropped_with_their_request(ends: str):
    worker = LaneWorker(1000)
    worker.feed({"lane": 3, "drafts": 3})
    dropped = worker.scorer.requests.pop("drafts")
    if ends == "begun again":
        worker.begin("drafts")
    rows = worker.feed({"lane": 4})["lane"]
    check(rows, LANES["lane"], 2)
    assert not dropped.parts


def test_what_waits_holds_no_more_memory_than_is_counted():
    """The step's other rows are of lanes that are still in their context, or of other groups."""
    worker = LaneWorker(1000)
    worker.feed({"lane": 1, "own": 1, "drafts": 1}, is_projected=True)
    for _ in range(2):
        worker.feed({"own": 1, "lane": 1, "drafts": 1}, is_projected=True)
    tensors = [each for rows in worker.scorer.waiting._groups.values() for each in rows.logits]
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    assert 0 < sum(held.values()) <= worker.scorer.waiting.num_bytes
    # Both are aborted.
    worker.scorer.requests.clear()
    worker.whole(RowSpec(), STATES, TOKENS[:-1])
    assert worker.scorer.waiting.num_bytes == 0
