"""vLLM's V2 runner, patched: windows and ordinary requests in the same steps, and what is left to vLLM."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample import prompt_logprob

from scoremode_server.references.directory import ReferenceDirectory
from scoremode_server.vllm_patches import runner_v2
from scoremode_server.vllm_patches.reference_head import ReferenceHead
from scoremode_server.vllm_patches.reference_windows import ReferenceWindows
from scoremode_server.vllm_patches.row_spec import RowSpec, WindowMark
from tests.unit.server.references.reference_setup import HIDDEN, create
from tests.unit.server.vllm_patches.linear_scorer import ALONE, make_scorer
from tests.unit.server.vllm_patches.written import let_all_be_written

MEBIBYTE = 1024**2
VOCAB = 100
CPU = torch.device("cpu")
LENGTHS = {"ordinary": 12, "recorded": 9, "other": 7, "compared": 9, "plain": 3, "short": 2}
"""Tokens that are fed; of the windows there is one more, which is not."""
FIRST = 4
"""The windows' first target."""
STEPS = [
    {"recorded": 9, "ordinary": 5, "plain": 3},
    {"ordinary": 4, "compared": 2},
    # A step of windows alone, in which vLLM has nothing to do.
    {"compared": 3},
    {"other": 7, "compared": 4, "ordinary": 3, "short": 2},
    # Decoding.
    {"ordinary": 1, "other": 1},
]
TOPS = {"ordinary": 4, "other": 0, "short": 1}
TOP = 2
"""Of the windows."""


def token_ids(num_tokens: int, starts: torch.Tensor, mapping: torch.Tensor, computed: torch.Tensor, tokens: Any) -> Any:
    """vLLM's kernel in PyTorch: the token after each."""
    result = torch.zeros(num_tokens, dtype=torch.int64)
    for place, index in enumerate(mapping.tolist()):
        for position in range(int(starts[place]), int(starts[place + 1])):
            target = int(computed[index]) + 1 + position - int(starts[place])
            result[position] = tokens[index, min(target, tokens.shape[1] - 1)]
    return result


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReferenceWindows:
    create(tmp_path)
    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", token_ids)
    worker_class = prompt_logprob.PromptLogprobsWorker
    for name in ("add_request", "remove_request", "compute_prompt_logprobs"):
        monkeypatch.setattr(worker_class, name, getattr(worker_class, name))
    windows = ReferenceWindows(ReferenceDirectory(tmp_path))
    runner_v2._patch_worker(worker_class)
    return windows


class Engine:
    """As much of the V2 runner as calls prompt logprobs."""

    def __init__(self, windows: ReferenceWindows) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(HIDDEN, VOCAB, generator=generator)
        self.states = {name: torch.randn(length + 1, HIDDEN, generator=generator) for name, length in LENGTHS.items()}
        self.tokens = torch.randint(VOCAB, (len(LENGTHS), 14), generator=generator).int()
        self.worker = prompt_logprob.PromptLogprobsWorker(len(LENGTHS), CPU)
        self.worker._scoremode_scorer = make_scorer(VOCAB, windows, chunk=6)
        self.computed = dict.fromkeys(LENGTHS, 0)
        self.prefill = dict(LENGTHS)

    def add(self, name: str, spec: RowSpec | None = None, prompt_logprobs: int | None = 0) -> None:
        self.computed[name] = 0
        extra_args = spec and spec.as_extra_args()
        params = SamplingParams(prompt_logprobs=prompt_logprobs, extra_args=extra_args)
        self.worker.add_request(name, list(LENGTHS).index(name), params)

    def add_window(self, name: str, action: Any, index: int) -> None:
        mark = WindowMark(action, "base", "one", index, 9 + 1 - FIRST, str(index))
        self.add(name, RowSpec(FIRST, self.last_token(name), TOP, window=mark))

    def last_token(self, name: str) -> int:
        return 50 + list(LENGTHS).index(name)

    def step(self, scheduled: dict[str, int]) -> dict[str, Any]:
        names, indices = list(scheduled), [list(LENGTHS).index(name) for name in scheduled]
        starts = np.cumsum([0, *scheduled.values()])
        batch = SimpleNamespace(
            req_ids=names,
            idx_mapping=torch.tensor(indices),
            idx_mapping_np=np.array(indices),
            num_computed_prefill_tokens_np=np.array([min(self.computed[name], self.prefill[name]) for name in names]),
            prefill_len_np=np.array([self.prefill[name] for name in names]),
            num_scheduled_tokens=np.array(list(scheduled.values())),
            num_tokens=int(starts[-1]),
            query_start_loc=torch.tensor(starts),
            query_start_loc_np=starts,
        )
        hidden = torch.cat(
            [self.states[name][self.computed[name] : self.computed[name] + count] for name, count in scheduled.items()]
        )
        results = self.worker.compute_prompt_logprobs(
            lambda rows: rows @ self.weight,
            # The runner's buffer is longer than the step.
            torch.cat((hidden, torch.full((5, HIDDEN), torch.nan))),
            batch,
            self.tokens,
            torch.tensor(list(self.computed.values())),
            np.array(list(LENGTHS.values())),
        )
        for name, count in scheduled.items():
            self.computed[name] += count
        return results

    def check(self, name: str, rows: Any, first: int, *last: int) -> None:
        """Compare the rows of the targets from a position on with float64."""
        length, num_top = LENGTHS[name], TOPS.get(name, 0)
        targets = torch.tensor([*self.tokens[list(LENGTHS).index(name), first:length].tolist(), *last])[:, None]
        exact = (self.states[name][first - 1 : first - 1 + len(targets)] @ self.weight).double().log_softmax(1)
        of_targets = exact.gather(1, targets)
        assert torch.equal(rows.logprob_token_ids[:, :1].long(), targets)
        assert torch.equal(rows.selected_token_ranks.long(), (exact >= of_targets).sum(1))
        assert torch.allclose(rows.logprobs[:, :1].double(), of_targets, atol=1e-5)
        if last == ():
            assert torch.allclose(rows.logprobs[:, 1:].double(), exact.topk(num_top).values, atol=1e-5)


def test_windows_and_ordinary_requests_in_one_batch(windows: ReferenceWindows):
    engine, generator = Engine(windows), torch.Generator().manual_seed(8)
    reference_weight = torch.randn(HIDDEN, VOCAB, generator=generator)
    head = ReferenceHead(lambda hidden_states: hidden_states @ reference_weight, 4)
    windows.heads = SimpleNamespace(find=lambda key, local: head)  # type: ignore[assignment]
    reference = windows.root.open("base")
    kept = torch.randn(9 + 1 - FIRST, HIDDEN, generator=generator)
    windows._read["1"] = Future()
    windows._read["1"].set_result(kept)
    for name in ("ordinary", "other", "short", "plain"):
        engine.add(name, prompt_logprobs=TOPS.get(name))
    engine.add_window("recorded", "record", 0)
    engine.add_window("compared", "compare", 1)

    results: dict[str, Any] = {}
    for step in STEPS:
        finished = engine.step(step)
        assert not finished.keys() & results.keys()
        results |= finished
    assert results.keys() == LENGTHS.keys() - {"plain"}
    assert not any(map(engine.worker._scoremode_scorer.get, LENGTHS))
    let_all_be_written(windows)

    # vLLM's have the rows of all prompt tokens but the first.
    for name, num_top in TOPS.items():
        assert results[name].logprobs.shape == (LENGTHS[name] - 1, num_top + 1)
        engine.check(name, results[name], 1)
    for name in ("recorded", "compared"):
        engine.check(name, results[name], FIRST, engine.last_token(name))
    hidden_states, logprobs = reference.read_shard(0)
    assert torch.equal(hidden_states, engine.states["recorded"][FIRST - 1 : 9])
    assert torch.equal(logprobs, results["recorded"].logprobs[:, 0])
    p = (kept @ reference_weight).double().log_softmax(1)
    q = (engine.states["compared"][FIRST - 1 : 9] @ engine.weight).double().log_softmax(1)
    kld = (p.exp() * (p - q)).sum(1)
    assert torch.allclose(results["compared"].logprobs[:, -3].double(), kld, atol=1e-5)


def test_a_preempted_window_starts_again(windows: ReferenceWindows):
    engine = Engine(windows)
    engine.add_window("recorded", "record", 0)
    assert not engine.step({"recorded": 6})
    engine.worker.remove_request("recorded")
    assert not any(map(engine.worker._scoremode_scorer.get, LENGTHS))
    engine.add_window("recorded", "record", 0)
    assert not engine.step({"recorded": 2})
    assert engine.step({"recorded": 7}).keys() == {"recorded"}
    let_all_be_written(windows)
    assert torch.equal(windows.root.open("base").read_shard(0)[0], engine.states["recorded"][FIRST - 1 : 9])


def test_a_window_preempted_after_its_prompt_is_not_returned_again(windows: ReferenceWindows):
    """vLLM does not return prompt logprobs twice either."""
    engine = Engine(windows)
    engine.add_window("recorded", "record", 0)
    engine.prefill["recorded"] += 1
    assert not engine.step({"recorded": 10})
    let_all_be_written(windows)
    assert windows.root.open("base").recorded() == set()


def test_candidates_at_a_temperature(windows: ReferenceWindows):
    engine, length = Engine(windows), LENGTHS["other"]
    last_token, chosen = engine.last_token("other"), np.array([2, 40], np.int32)
    engine.add("other", RowSpec(FIRST, last_token, TOP, 0.5, len(chosen), chosen.tobytes()))
    assert not engine.step({"other": 3})
    (rows,) = engine.step({"other": length - 3}).values()
    exact = ((engine.states["other"][FIRST - 1 : length] @ engine.weight).double() / 0.5).log_softmax(1)
    assert rows.logprobs.shape == (length + 1 - FIRST, 1 + len(chosen) + TOP)
    assert rows.logprob_token_ids[-1, 0] == last_token
    assert torch.allclose(rows.logprobs.double(), exact.gather(1, rows.logprob_token_ids.long()), atol=1e-5)
    assert torch.equal(rows.logprob_token_ids[:, 1:3], torch.tensor(chosen).expand(len(rows.logprobs), -1))
    assert not any(map(engine.worker._scoremode_scorer.get, LENGTHS))


def test_the_patch_replaces_what_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    worker_class = prompt_logprob.PromptLogprobsWorker
    for owner, name in (
        (GPUModelRunner, "load_model"),
        (worker_class, "add_request"),
        (worker_class, "remove_request"),
        (worker_class, "compute_prompt_logprobs"),
        (GPUModelRunner, "_dummy_sampler_run"),
        (prompt_logprob, "CHUNK_SIZE"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    loaded = []
    monkeypatch.setattr(GPUModelRunner, "load_model", lambda self, **options: loaded.append(self))
    monkeypatch.setattr(GPUModelRunner, "_scoremode_windows", None, raising=False)
    monkeypatch.setattr(runner_v2, "get_tp_group", lambda: ALONE)
    windows = ReferenceWindows(ReferenceDirectory(tmp_path))
    runner_v2.patch(256 * MEBIBYTE, windows)
    # `ReferenceWorker` looks for them there.
    assert GPUModelRunner._scoremode_windows is windows
    # The last pipeline rank, and another.
    for worker in (worker_class(1, CPU), None):
        runner = SimpleNamespace(
            model_config=SimpleNamespace(
                get_vocab_size=lambda: 128_256, head_dtype=torch.bfloat16, logprobs_mode="raw_logprobs"
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            prompt_logprobs_worker=worker,
        )
        GPUModelRunner.load_model(runner)
        assert loaded.pop() is runner
        assert prompt_logprob.CHUNK_SIZE == 512
        assert worker is None or worker._scoremode_scorer._budget_bytes == 256 * MEBIBYTE


@pytest.mark.parametrize("first_step", [{}, {"other": 6, "short": 1, "recorded": 8}], ids=["whole", "one token left"])
def test_placeholders_for_drafts_have_no_rows(windows: ReferenceWindows, first_step: dict[str, int]):
    """vLLM adds them to a prompt of which one token is left."""
    engine, num_drafts = Engine(windows), 3
    for name in ("other", "short"):
        engine.add(name, prompt_logprobs=TOPS[name])
    engine.add_window("recorded", "record", 0)
    for name in LENGTHS:
        engine.states[name] = torch.cat((engine.states[name], torch.randn(num_drafts, HIDDEN)))
    results = engine.step(first_step) if first_step else {}
    left = {name: LENGTHS[name] - first_step.get(name, 0) + num_drafts for name in ("other", "short", "recorded")}
    results |= engine.step(left)
    let_all_be_written(windows)
    for name in ("other", "short"):
        assert len(results[name].logprobs) == LENGTHS[name] - 1
        engine.check(name, results[name], 1)
    engine.check("recorded", results["recorded"], FIRST, engine.last_token("recorded"))
    hidden_states, _ = windows.root.open("base").read_shard(0)
    assert torch.equal(hidden_states, engine.states["recorded"][FIRST - 1 : 9])
