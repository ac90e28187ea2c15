"""vLLM's V2 runner, patched: which rows of a step are whose, and what is left to vLLM."""

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
from scoremode_server.vllm_patches import runners
from scoremode_server.vllm_patches.reference_windows import ReferenceWindows
from scoremode_server.vllm_patches.row_spec import RowSpec
from tests.unit.server.vllm_patches.linear_scorer import ALONE, make_scorer

MEBIBYTE = 1024**2
VOCAB, HIDDEN = 100, 8
CPU = torch.device("cpu")
LENGTHS = {"ordinary": 12, "scored": 9, "other": 7, "plain": 3, "short": 2}
"""Tokens that are fed; of `scored` there is one more, which is not."""
CHOSEN = np.array([2, 40], np.int32)
SCORED = RowSpec(4, 51, 2, 0.5, len(CHOSEN), CHOSEN.tobytes())
TOPS = {"ordinary": 4, "other": 0, "short": 1}
STEPS = [
    {"scored": 3, "ordinary": 5, "plain": 3},
    {"ordinary": 4, "scored": 2},
    {"other": 7, "scored": 4, "ordinary": 3, "short": 2},
    # Decoding.
    {"ordinary": 1, "other": 1},
]


def token_ids(num_tokens: int, starts: torch.Tensor, mapping: torch.Tensor, computed: torch.Tensor, tokens: Any) -> Any:
    """vLLM's kernel in PyTorch: the token after each."""
    result = torch.zeros(num_tokens, dtype=torch.int64)
    for place, index in enumerate(mapping.tolist()):
        for position in range(int(starts[place]), int(starts[place + 1])):
            target = int(computed[index]) + 1 + position - int(starts[place])
            result[position] = tokens[index, min(target, tokens.shape[1] - 1)]
    return result


class Engine:
    """As much of the V2 runner as calls prompt logprobs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(HIDDEN, VOCAB, generator=generator)
        # And placeholders for drafts.
        self.states = {name: torch.randn(length + 3, HIDDEN, generator=generator) for name, length in LENGTHS.items()}
        self.tokens = torch.randint(VOCAB, (len(LENGTHS), 14), generator=generator).int()
        self.worker = prompt_logprob.PromptLogprobsWorker(len(LENGTHS), CPU)
        self.worker._scoremode_scorer = make_scorer(VOCAB, chunk=6)
        self.computed = dict.fromkeys(LENGTHS, 0)
        self.prefill = dict(LENGTHS)
        for name in LENGTHS:
            self.add(name)

    def add(self, name: str) -> None:
        self.computed[name] = 0
        params = SamplingParams(prompt_logprobs=TOPS.get(name))
        if name == "scored":
            params = SamplingParams(prompt_logprobs=0, extra_args=SCORED.as_extra_args())
        self.worker.add_request(name, list(LENGTHS).index(name), params)

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
        hidden = [
            self.states[name][(start := self.computed[name]) : start + count] for name, count in scheduled.items()
        ]
        results = self.worker.compute_prompt_logprobs(
            lambda rows: rows @ self.weight,
            # The runner's buffer is longer than the step.
            torch.cat((*hidden, torch.full((5, HIDDEN), torch.nan))),
            batch,
            self.tokens,
            torch.tensor(list(self.computed.values())),
            np.array(list(LENGTHS.values())),
        )
        for name, count in scheduled.items():
            self.computed[name] += count
        return results

    def check(self, results: dict[str, Any]) -> None:
        """Compare with float64."""
        assert not self.worker._scoremode_scorer.requests.keys() & results.keys()
        for name, rows in results.items():
            spec, length = SCORED if name == "scored" else RowSpec(num_top=TOPS[name]), LENGTHS[name]
            targets = self.tokens[list(LENGTHS).index(name), spec.first : length].tolist()
            targets += [] if spec.last_token is None else [spec.last_token]
            logits = (self.states[name][spec.first - 1 :][: len(targets)] @ self.weight).double()
            exact = (logits / spec.temperature).log_softmax(1)
            named = rows.logprob_token_ids.long()
            assert rows.logprobs.shape == (len(targets), spec.num_columns)
            assert named[:, 0].tolist() == targets
            assert torch.allclose(rows.logprobs.double(), exact.gather(1, named), atol=1e-5)
            top = rows.logprobs[:, 1 + spec.num_candidates :].double()
            assert torch.allclose(top, exact.topk(spec.num_top).values, atol=1e-5)
            assert torch.equal(rows.selected_token_ranks.long(), (exact >= exact.gather(1, named[:, :1])).sum(1))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", token_ids)
    worker_class = prompt_logprob.PromptLogprobsWorker
    for name in ("add_request", "remove_request", "compute_prompt_logprobs"):
        monkeypatch.setattr(worker_class, name, getattr(worker_class, name))
    runners._patch_worker(worker_class)
    return Engine()


def test_specifications_and_ordinary_requests_in_one_batch(engine: Engine):
    results: dict[str, Any] = {}
    for step in STEPS:
        finished = engine.step(step)
        assert not finished.keys() & results.keys()
        results |= finished
    assert results.keys() == LENGTHS.keys() - {"plain"}
    engine.check(results)


def test_a_preempted_request_starts_again_unless_its_prompt_was_over(engine: Engine):
    assert not engine.step({"scored": 6})
    engine.worker.remove_request("scored")
    assert "scored" not in engine.worker._scoremode_scorer.requests
    engine.add("scored")
    assert not engine.step({"scored": 2})
    engine.check(found := engine.step({"scored": 7}))
    assert found.keys() == {"scored"}
    # vLLM does not return prompt logprobs twice either.
    engine.prefill["other"] += 1
    assert not engine.step({"other": 8})


@pytest.mark.parametrize("first_step", [{}, {"other": 6, "short": 1, "scored": 8}], ids=["whole", "one token left"])
def test_placeholders_for_drafts_have_no_rows(engine: Engine, first_step: dict[str, int]):
    """vLLM adds them to a prompt of which one token is left."""
    results = engine.step(first_step) if first_step else {}
    results |= engine.step({name: LENGTHS[name] - first_step.get(name, 0) + 3 for name in ("other", "short", "scored")})
    engine.check(results)
    assert results.keys() == {"other", "short", "scored"}


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
    monkeypatch.setattr(runners, "get_tp_group", lambda: ALONE)
    windows = ReferenceWindows(ReferenceDirectory(tmp_path))
    runners.patch_v2(256 * MEBIBYTE, windows)
    # `ReferenceWorker` looks for them there.
    assert GPUModelRunner._scoremode_windows is windows
    model = SimpleNamespace(get_vocab_size=lambda: 128_256, head_dtype=torch.bfloat16, logprobs_mode="raw_logprobs")
    # The last pipeline rank, and another.
    for worker in (worker_class(1, CPU), None):
        parallel = SimpleNamespace(tensor_parallel_size=1)
        runner = SimpleNamespace(model_config=model, parallel_config=parallel, prompt_logprobs_worker=worker)
        GPUModelRunner.load_model(runner)
        assert loaded.pop() is runner
        assert prompt_logprob.CHUNK_SIZE == 512
        assert worker is None or worker._scoremode_scorer._budget_bytes == 256 * MEBIBYTE
