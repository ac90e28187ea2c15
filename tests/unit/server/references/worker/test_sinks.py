"""Windows in an engine worker: hidden states of steps in, files and rows out; and what a worker reserves or refuses."""

import math
import os
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from cachetools import FIFOCache
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

from scoremode.wire.references import ReferenceRoutes
from scoremode_server.references.files import tensors
from scoremode_server.references.files.directory import ReferenceDirectory, StoredReference
from scoremode_server.references.worker import sinks
from scoremode_server.references.worker.heads import ReferenceHead
from scoremode_server.references.worker.orders import (
    SINK,
    Forget,
    Order,
    ReadWindow,
    WindowMark,
    sink_columns,
)
from scoremode_server.references.worker.sinks import WorkerWindows
from scoremode_server.rows import Rows
from scoremode_server.vllm_compat import install
from scoremode_server.worker.lm_head import LMHead
from scoremode_server.worker.row_spec import RowSpec
from scoremode_server.worker.sinks import Sink
from tests.unit.server.references.reference_setup import HIDDEN, create, full_disk, let_all_be_written, random_shard
from tests.unit.server.worker.linear_scorer import ALONE, LinearWorker, make_scorer

VOCAB = 100
CPU = torch.device("cpu")
TOKENS = torch.randint(VOCAB, (8,), generator=torch.Generator().manual_seed(1)).tolist()
NUM_FED = len(TOKENS) - 1
WEIGHT = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(2))
REFERENCE_WEIGHT = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(3))
STATES = torch.randn(NUM_FED, HIDDEN, generator=torch.Generator().manual_seed(4))
REFERENCE_STATES = torch.randn(NUM_FED, HIDDEN, generator=torch.Generator().manual_seed(5))
FIRSTS = [1, 2, 4, NUM_FED - 1, NUM_FED]
"""Every target, all but the first, half of them, the last two, and the last one, which is not fed."""

SPLITS = [(first, second) for first in range(NUM_FED) for second in range(first, NUM_FED)]
"""Where a prompt's first and second step of three end; fewer steps among them."""


ROUTES = ReferenceRoutes(layers=["first", "second"], num_experts=4, top_k=1)
HEAD = ReferenceHead(lambda hidden_states: hidden_states @ REFERENCE_WEIGHT, 4)
ROOM = SimpleNamespace(progress=lambda key: None, find=lambda key, local: HEAD)
"""A head that is there at once."""


def spec(action: Any, first: int, index: int = 0, num_top: int = 0, identity: str = "one") -> RowSpec:
    mark = WindowMark(action, "base", identity, index, len(TOKENS) - first, ticket=f"{identity} {index}")
    return with_mark(mark, first, num_top)


def with_mark(mark: WindowMark, first: int = 1, num_top: int = 0) -> RowSpec:
    columns = sink_columns(mark, num_top, VOCAB)
    return RowSpec(first, TOKENS[-1], num_top, sinks={SINK: msgspec.to_builtins(mark)}, sink_columns=columns)


def routed(action: Any, first: int, index: int = 0) -> RowSpec:
    """A window whose experts are recorded or compared in the layers of `ROUTES`."""
    mark = WindowMark(action, "base", "one", index, len(TOKENS) - first, "routed", "", NUM_FED, num_routed_layers=2)
    return replace(with_mark(mark, first), chunk=1)


def project(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states @ WEIGHT


def order(windows: WorkerWindows, *orders: Order, tickets: tuple[str, ...] = ()) -> dict[str, str | None]:
    return windows.exchange(msgspec.to_builtins(orders), list(tickets))["outcomes"]


def read(windows: WorkerWindows, *specs: RowSpec) -> None:
    """As the API server has it, which sends a window once it was read, or could not be."""
    marks = [msgspec.convert(wanted.sinks[SINK], WindowMark) for wanted in specs]
    order(windows, *map(ReadWindow, marks))
    while any(windows._outcome(mark.ticket) is None for mark in marks):
        time.sleep(0.001)


def add(windows: WorkerWindows, wanted: RowSpec, name: str = "request", group: Any = ALONE) -> LinearWorker:
    if wanted.sinks[SINK]["action"] == "compare":
        read(windows, wanted)
    worker = LinearWorker(make_scorer(VOCAB, {SINK: windows}, chunk=5, group=group), project)
    worker.scorer.begin(name, wanted)
    return worker


def steps(worker: LinearWorker, *ends: int, states: torch.Tensor = STATES) -> Rows | None:
    """Feed the prompt up to each of `ends`; the rows of the last step."""
    # The V2 runner's row of tokens is longer than the prompt.
    token_ids = torch.tensor([*TOKENS[:-1], 77, 78], dtype=torch.int32)
    rows = None
    for start, end in zip([0, *ends], ends, strict=False):
        if start < end:
            assert rows is None
            rows = worker.step("request", start, states[start:end], token_ids, NUM_FED)
    return rows


def let_wait(worker: LinearWorker, num_rows: int) -> LinearWorker:
    shape = worker.scorer.shape
    worker.scorer.waiting.max_bytes = num_rows * shape.padded * shape.logit_bytes
    return worker


@pytest.fixture
def windows(tmp_path: Path) -> WorkerWindows:
    """Windows of a worker, with a head that is there at once."""
    windows = WorkerWindows(ReferenceDirectory(tmp_path))
    windows.leased = ROOM
    return windows


def scores(states: torch.Tensor, weight: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, the logprobs [rows, vocabulary] of one side, and those of the targets [rows, 1]."""
    logprobs, targets = (states[first - 1 :] @ weight).double().log_softmax(1), torch.tensor(TOKENS[first:])[:, None]
    return logprobs, logprobs.gather(1, targets)


def check_scores(rows: Rows, first: int) -> None:
    logprobs, actual = scores(STATES, WEIGHT, first)
    assert rows.token_ids[:, 0].tolist() == TOKENS[first:]
    assert np.allclose(rows.logprobs[:, :1], actual, rtol=1e-5, atol=1e-6)
    assert rows.ranks.tolist() == (logprobs >= actual).sum(1).tolist()


@pytest.fixture
def reference(tmp_path: Path) -> StoredReference:
    """A reference with each window of `FIRSTS` recorded, from `REFERENCE_STATES`."""
    reference = create(tmp_path)
    reference = reference.save(reference.manifest.model_copy(update={"routes": ROUTES}))
    for index, first in enumerate(FIRSTS):
        states = REFERENCE_STATES[first - 1 :].contiguous()
        reference.write_shard(index, states, torch.zeros(len(states)))
    return reference


@pytest.mark.parametrize("first", FIRSTS)
def test_a_recorded_window_is_the_same_however_its_prompt_is_split(windows: WorkerWindows, first: int):
    reference = create(windows.root.root)
    for index, split in enumerate(SPLITS):
        rows = steps(add(windows, spec("record", first, index)), *split, NUM_FED)
        check_scores(rows, first)
    let_all_be_written(windows)
    assert reference.recorded_windows() == set(range(len(SPLITS)))
    for index in range(len(SPLITS)):
        hidden_states, logprobs = reference.read_shard(index)
        assert torch.equal(hidden_states, STATES[first - 1 :])
        assert torch.allclose(logprobs.double(), scores(STATES, WEIGHT, first)[1][:, 0])


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("first", FIRSTS)
def test_a_compared_window_is_the_same_however_its_prompt_is_split(
    windows: WorkerWindows, reference: StoredReference, first: int, num_top: int
):
    """And however many of its rows wait for those of later steps, in a lane."""
    served, target = scores(STATES, WEIGHT, first)
    recorded, recorded_target = scores(REFERENCE_STATES, REFERENCE_WEIGHT, first)
    for split, max_waiting_rows in zip(SPLITS, cycle((0, 3, 100, 1)), strict=False):
        wanted = replace(spec("compare", first, FIRSTS.index(first), num_top), chunk=1)
        worker = let_wait(add(windows, wanted), max_waiting_rows)
        rows = steps(worker, *split, NUM_FED)
        check_scores(rows, first)
        of_both = {
            "logprobs": torch.cat((target, served.topk(num_top).values), 1),
            "reference_logprobs": torch.cat((recorded_target, recorded.topk(num_top).values), 1),
            "kld": (recorded.exp() * (recorded - served)).sum(1),
            "reverse_kld": (served.exp() * (served - recorded)).sum(1),
            "acceptance": torch.minimum(served.exp(), recorded.exp()).sum(1),
        }
        for name, expected in of_both.items():
            assert np.allclose(rows.column(name), expected, rtol=1e-5, atol=2e-6), name
        assert np.array_equal(rows.column("reference_token_ids")[:, 1:], recorded.topk(num_top).indices)
        assert rows.column("reference_ranks").tolist() == (recorded >= recorded_target).sum(1).tolist()


@pytest.mark.parametrize("first", FIRSTS)
def test_a_rows_agreement_of_experts_is_that_of_its_token(windows: WorkerWindows, reference: StoredReference, first):
    """However the prompt is split, and however many rows wait."""
    generator = torch.Generator().manual_seed(6)
    agreement = torch.randint(9, (NUM_FED, 2, 2), dtype=torch.int16, generator=generator)
    reference.write_experts(FIRSTS.index(first), torch.zeros((NUM_FED, 2, 1), dtype=torch.uint8))
    for split, max_waiting_rows in zip(SPLITS, cycle((0, 3, 100, 1)), strict=False):
        worker = let_wait(add(windows, routed("compare", first, FIRSTS.index(first))), max_waiting_rows)
        window, ends = worker.scorer.requests["request"].sinks[SINK], sorted({*split, NUM_FED} - {0})
        for start, end in zip([0, *ends], ends, strict=False):
            window.store_routes(start, agreement[start:end])
            rows = worker.step("request", start, STATES[start:end], torch.tensor(TOKENS[:-1]), NUM_FED)
        agreeing = rows.column("expert_agreement").view(np.int16).reshape(-1, 2, 2)
        assert agreeing.tolist() == agreement[first - 1 :].tolist()


def test_windows_without_all_their_experts_fail_alone(windows: WorkerWindows, reference: StoredReference):
    """Files that are missing, of another shape or with an id of no expert, and tokens that passed no router."""
    add(windows, routed("compare", 1))
    assert "routes/000000.safetensors is missing" in windows._outcome("routed")
    wrong_id = torch.full((NUM_FED, 2, 1), ROUTES.num_experts)
    for experts, reason in ((torch.zeros((NUM_FED, 2, 2)), "has experts (7, 2, 2)"), (wrong_id, "has expert 4")):
        reference.write_experts(0, experts.to(torch.uint8))
        add(windows, routed("compare", 1))
        assert windows._outcome("routed").endswith(reason)
    reference.write_experts(0, torch.zeros((NUM_FED, 2, 1), dtype=torch.uint8))
    assert steps(add(windows, routed("compare", 1)), NUM_FED).has_nan.all()
    steps(add(windows, routed("record", 1)), NUM_FED)
    let_all_be_written(windows)
    assert windows._outcome("routed") == "0 of 7 tokens passed all routers of experts"


def test_the_references_rows_of_several_steps_are_projected_at_once(windows: WorkerWindows, reference: StoredReference):
    """The served model's rows are projected in their own step."""
    num_rows: list[int] = []

    def logits_fn(hidden_states: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden_states))
        return hidden_states @ REFERENCE_WEIGHT

    windows.leased = SimpleNamespace(**{**vars(ROOM), "find": lambda key, local: ReferenceHead(logits_fn, 4)})
    worker = let_wait(add(windows, replace(spec("compare", 1), chunk=1)), 4)
    steps(worker, *range(1, NUM_FED + 1))
    assert (num_rows, worker.num_projected) == ([4, NUM_FED - 4], [1] * NUM_FED)
    # A step without the head ends what waits: rows after it are those of their own positions.
    worker = let_wait(add(windows, replace(spec("compare", 1), chunk=1)), 100)
    steps(worker, 1, 2)
    there, windows.leased = windows.leased, SimpleNamespace(**{**vars(ROOM), "find": lambda key, local: None})
    window = worker.scorer.requests["request"].sinks[SINK]
    window.leased = windows.leased
    token_ids = torch.tensor(TOKENS[:-1])
    worker.step("request", 2, STATES[2:3], token_ids, NUM_FED)
    window.leased = windows.leased = there
    rest = worker.step("request", 3, STATES[3:], token_ids, NUM_FED)
    whole = steps(add(windows, spec("compare", 1)), NUM_FED)
    assert np.allclose(rest.column("kld")[1:], whole.column("kld")[3:])
    # Another reference is held, while rows of a window that nobody wants any more wait with a score's.
    worker = let_wait(add(windows, replace(spec("compare", 1), chunk=1)), 100)
    steps(worker, 1, 2)
    windows.leased = SimpleNamespace(**{**vars(ROOM), "find": lambda key, local: None})
    worker.scorer.begin("score", RowSpec(1, TOKENS[-1], chunk=1))
    assert worker.step("score", 0, STATES, torch.tensor(TOKENS[:-1]), NUM_FED) is not None


def test_hidden_states_are_stored_as_they_were_when_they_came(windows: WorkerWindows):
    """The runner writes those of the next step into the same memory."""
    reference, buffer = create(windows.root.root), torch.empty(NUM_FED, HIDDEN)
    window = add(windows, spec("record", 1))
    for start in range(NUM_FED):
        buffer[0] = STATES[start]
        window.step("request", start, buffer[:1], torch.tensor(TOKENS[:-1]), NUM_FED)
        buffer.fill_(math.nan)
    let_all_be_written(windows)
    assert torch.equal(reference.read_shard(0)[0], STATES)


def test_nan_is_returned_and_not_written(windows: WorkerWindows):
    reference = create(windows.root.root)
    window = add(windows, spec("record", 1))
    states = STATES.clone()
    states[4] = math.nan
    rows = steps(window, NUM_FED, states=states)
    assert np.isnan(rows.logprobs[:, 0]).tolist() == [row == 4 for row in range(NUM_FED)]
    let_all_be_written(windows)
    assert reference.recorded_windows() == set()
    assert windows._outcome("one 0") == "the model computed NaN"
    # Only one of several ranks writes.
    wanted = spec("record", 1)
    assert type(windows.begin(wanted, wanted.sinks[SINK], writes=False)) is Sink


def test_all_ranks_compare_or_none_does(windows: WorkerWindows, reference: StoredReference):
    """A rank that has all its files, next to one that lacks those of one window."""

    others = SimpleNamespace(
        world_size=2,
        rank_in_group=0,
        device=CPU,
        all_gather=lambda answers, dim: torch.cat((answers, torch.tensor([1.0, 0.0]))),
    )
    specs = {"first": spec("compare", 1, num_top=3), "second": spec("compare", 2, 1, num_top=3)}
    read(windows, *specs.values())
    worker = LinearWorker(make_scorer(VOCAB, {SINK: windows}, group=others), project)
    worker.scorer._logits_fn, worker.scorer._lm_head = worker.logits_fn, LMHead(project, project, 1, None, None)
    found = worker.together(specs, STATES, TOKENS[:-1])
    assert not found["first"].has_nan.any()
    assert found["second"].has_nan.all()


def test_windows_of_one_reference_are_compared_together(windows: WorkerWindows, reference: StoredReference):
    specs = {str(index): spec("compare", first, index) for index, first in enumerate(FIRSTS)}
    alone = [steps(add(windows, wanted), NUM_FED) for wanted in specs.values()]
    worker = LinearWorker(make_scorer(VOCAB, {SINK: windows}, chunk=1000), project)
    found = worker.together(specs, STATES, TOKENS[:-1])
    assert worker.num_projected == [7 + 6 + 4 + 2 + 1]
    for rows, expected in zip(found.values(), alone, strict=True):
        assert np.allclose(rows.column("kld"), expected.column("kld"), rtol=1e-5, atol=1e-6)
        assert np.allclose(rows.logprobs, expected.logprobs, rtol=1e-5, atol=1e-6)


# Memory is bounded, and neither a step nor a call waits for a file

WINDOW_BYTES = 5 * HIDDEN * 4


def mark(action: Any, index: int) -> WindowMark:
    return WindowMark(action, "base", "one", index, 5, ticket=str(index))


def finish(windows: WorkerWindows, index: int) -> None:
    """End a recorded window, as a step does with its last rows."""
    wanted = with_mark(mark("record", index))
    window = windows.begin(wanted, wanted.sinks[SINK], writes=True)
    window.hidden_states, window.logprobs = [torch.zeros(5, HIDDEN)], [torch.zeros(5)]
    window.finish()


def told(windows: WorkerWindows, *tickets: str) -> list[str | None]:
    return list(order(windows, tickets=tickets).values())


def test_a_step_does_not_wait_for_the_disk(windows: WorkerWindows, monkeypatch: pytest.MonkeyPatch):
    create(windows.root.root)
    let_go, write_shard = Event(), StoredReference.write_shard
    monkeypatch.setattr(StoredReference, "write_shard", lambda *each: (let_go.wait(), write_shard(*each)))
    monkeypatch.setattr(sinks, "MAX_UNWRITTEN_BYTES", 40 * WINDOW_BYTES)
    for index in range(50):
        finish(windows, index)
    assert told(windows, "0", "39", "40", "49") == [
        None,
        None,
        *2 * [f"{40 * WINDOW_BYTES} bytes already wait to be written to disk"],
    ]
    let_go.set()
    let_all_be_written(windows)
    assert windows.root.open("base").recorded_windows() == set(range(40))
    assert told(windows, "0", "39") == ["", ""]


def test_of_files_that_nobody_asks_for_the_last_are_known(windows: WorkerWindows, monkeypatch: pytest.MonkeyPatch):
    create(windows.root.root)
    monkeypatch.setattr(tensors, "save_file", full_disk)
    windows._writes = FIFOCache(10)
    for index in range(30):
        finish(windows, index)
        let_all_be_written(windows)
    assert len(windows._writes) == 10
    assert told(windows, "19", "29") == [None, "[Errno 28] No space left on device"]


def test_the_state_of_the_lm_head_outlasts_any_number_of_windows(windows: WorkerWindows):
    create(windows.root.root)
    windows._writes = FIFOCache(10)
    windows.write_head_later("name", "one", "head", [torch.ones(3, 4)])
    for index in range(30):
        finish(windows, index)
        let_all_be_written(windows)
        assert told(windows, str(index)) != [None]
    assert told(windows, "head") != [None]


def test_a_call_does_not_wait_for_a_file(windows: WorkerWindows):
    reference = create(windows.root.root)
    os.mkfifo(reference.shard(0))
    reference.write_shard(1, *random_shard(5))
    assert order(windows, *(ReadWindow(mark("compare", index)) for index in (0, 1)), tickets=("0",)) == {"0": None}
    while told(windows, "1") == [None]:
        pass
    assert told(windows, "0", "1") == [None, ""]
    # Nobody waits for it any more.
    order(windows, Forget("0"), Forget("1"))
    assert not len(windows.reads)
    os.close(os.open(reference.shard(0), os.O_RDWR))


def test_a_file_of_another_size_is_not_read(windows: WorkerWindows):
    create(windows.root.root).write_shard(1, *random_shard(4))
    order(windows, ReadWindow(mark("compare", 1)))
    while told(windows, "1") == [None]:
        pass
    assert "000001.safetensors has hidden states (4, 8)" in str(told(windows, "1"))


def test_an_adapter_for_the_lm_head_is_refused_when_it_is_loaded(monkeypatch):
    monkeypatch.setattr(LogitsProcessorWithLoRA, "set_lora", LogitsProcessorWithLoRA.set_lora)
    install.refuse_adapters_of_heads()
    layer = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.lora_a_stacked, layer.lora_b_stacked = torch.ones(1, 1, 8, 16), torch.ones(1, 1, 32, 8)
    with pytest.raises(ValueError, match="weights for the LM head"):
        layer.set_lora(0, torch.zeros(8, 16), torch.ones(32, 8))
    # As vLLM's own, with which it warms up: a server would not start.
    layer.set_lora(0, torch.zeros(8, 16), torch.zeros(32, 8))
    assert not layer.lora_b_stacked.any()
