"""Windows and ordinary requests in the steps of vLLM's V2 runner. `kernels/test_triton_kernels.py` runs these."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample import prompt_logprob

from scoremode_server.kernels.working_memory import LogitsShape
from scoremode_server.references.directory import ReferenceDirectory
from scoremode_server.vllm_patches import runner_v2
from scoremode_server.vllm_patches import windows as windows_module
from scoremode_server.vllm_patches.reference_head import ReferenceHead
from scoremode_server.vllm_patches.reference_windows import ReferenceWindows, WindowMark
from scoremode_server.vllm_patches.scored_windows import ScoredMark
from tests.unit.server.references.reference_setup import HIDDEN, create

VOCAB = 100
CPU = torch.device("cpu")
LENGTHS = {"ordinary": 12, "recorded": 9, "other": 7, "compared": 9}
"""Tokens that are fed; of the windows there is one more, which is not."""
FIRST = 4
"""The windows' first target."""
STEPS = [
    {"recorded": 9, "ordinary": 5},
    {"ordinary": 4, "compared": 2},
    # A step of windows alone, in which vLLM has nothing to do.
    {"compared": 3},
    {"other": 7, "compared": 4, "ordinary": 3},
    # Decoding.
    {"ordinary": 1, "other": 1},
]
TOP = 2


def token_ids(num_tokens: int, starts: torch.Tensor, mapping: torch.Tensor, computed: torch.Tensor, tokens: Any) -> Any:
    """vLLM's kernel in PyTorch: the token after each."""
    result = torch.zeros(num_tokens, dtype=torch.int64)
    for place, index in enumerate(mapping.tolist()):
        for position in range(int(starts[place]), int(starts[place + 1])):
            target = int(computed[index]) + 1 + position - int(starts[place])
            result[position] = tokens[index, min(target, tokens.shape[1] - 1)]
    return result


def window_params(action: Any, index: int, last_token: int) -> SamplingParams:
    mark = WindowMark(action, "base", "one", index, FIRST, 9 + 1 - FIRST, last_token, TOP)
    return SamplingParams(prompt_logprobs=0, extra_args=mark.as_extra_args())


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReferenceWindows:
    create(tmp_path)
    alone = SimpleNamespace(world_size=1, rank_in_group=0, device=CPU)
    for module in (runner_v2, windows_module):
        monkeypatch.setattr(module, "get_tp_group", lambda: alone)
    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", token_ids)
    for name in ("add_request", "remove_request", "compute_prompt_logprobs"):
        monkeypatch.setattr(
            prompt_logprob.PromptLogprobsWorker, name, getattr(prompt_logprob.PromptLogprobsWorker, name)
        )
    windows = ReferenceWindows(ReferenceDirectory(tmp_path))
    compute = runner_v2.PromptLogprobs(VOCAB * 4 * 2 * 6, prompt_logprob.compute_prompt_logprobs_with_chunking)
    compute.load(LogitsShape(VOCAB, 4))
    monkeypatch.setattr(prompt_logprob, "compute_prompt_logprobs_with_chunking", compute)
    runner_v2._patch_windows(compute, windows)
    return windows


class Engine:
    """As much of the V2 runner as calls prompt logprobs."""

    def __init__(self, weight: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weight = weight
        self.states = {name: torch.randn(length + 1, HIDDEN, generator=generator) for name, length in LENGTHS.items()}
        self.tokens = torch.randint(VOCAB, (len(LENGTHS), 14), generator=generator).int()
        self.worker = prompt_logprob.PromptLogprobsWorker(len(LENGTHS), CPU)
        self.computed = dict.fromkeys(LENGTHS, 0)
        self.prefill = dict(LENGTHS)

    def add(self, name: str, params: SamplingParams) -> None:
        self.computed[name] = 0
        self.worker.add_request(name, list(LENGTHS).index(name), params)

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

    def logprobs(self, name: str, first: int, *last: int) -> torch.Tensor:
        """Of the targets from a position on."""
        length = LENGTHS[name]
        targets = [*self.tokens[list(LENGTHS).index(name), first:length].tolist(), *last]
        logits = self.states[name][first - 1 : first - 1 + len(targets)] @ self.weight
        return logits.log_softmax(1).gather(1, torch.tensor(targets)[:, None])[:, 0]


def test_windows_and_ordinary_requests_in_one_batch(windows: ReferenceWindows):
    generator = torch.Generator().manual_seed(8)
    weight, reference_weight = torch.randn(2, HIDDEN, VOCAB, generator=generator)
    slot = SimpleNamespace(
        load=lambda reference, local: ReferenceHead(lambda hidden_states: hidden_states @ reference_weight, 4)
    )
    windows.slot = slot  # type: ignore[assignment]
    reference = windows.root.open("base")
    kept = torch.randn(9 + 1 - FIRST, HIDDEN, generator=generator)
    reference.write_shard(1, kept, torch.zeros(len(kept)))
    engine = Engine(weight)
    engine.add("ordinary", SamplingParams(prompt_logprobs=TOP))
    engine.add("other", SamplingParams(prompt_logprobs=0))
    engine.add("recorded", window_params("record", 0, engine.last_token("recorded")))
    engine.add("compared", window_params("compare", 1, engine.last_token("compared")))

    results: dict[str, Any] = {}
    for step in STEPS:
        finished = engine.step(step)
        assert not finished.keys() & results.keys()
        results |= finished
    assert results.keys() == LENGTHS.keys()
    assert not windows._windows
    windows._threads.shutdown()

    # vLLM's have the rows of all prompt tokens but the first.
    for name, columns in (("ordinary", TOP + 1), ("other", 1)):
        assert results[name].logprobs.shape == (LENGTHS[name] - 1, columns)
        assert torch.allclose(results[name].logprobs[:, 0], engine.logprobs(name, 1), atol=1e-5)
    expected = engine.logprobs("recorded", FIRST, engine.last_token("recorded"))
    assert torch.allclose(results["recorded"].logprobs[:, 0], expected, atol=1e-5)
    hidden_states, logprobs = reference.read_shard(0)
    assert torch.equal(hidden_states, engine.states["recorded"][FIRST - 1 : 9])
    assert torch.allclose(logprobs, expected, atol=1e-5)

    served = results["compared"].logprobs[:, 0]
    assert torch.allclose(served, engine.logprobs("compared", FIRST, engine.last_token("compared")), atol=1e-5)
    p = (kept @ reference_weight).double().log_softmax(1)
    q = (engine.states["compared"][FIRST - 1 : 9] @ weight).double().log_softmax(1)
    kld = (p.exp() * (p - q)).sum(1)
    assert torch.allclose(results["compared"].logprobs[:, -3].double(), kld, atol=1e-5)


def test_a_preempted_window_begins_again(windows: ReferenceWindows):
    engine = Engine(torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(8)))
    params = window_params("record", 0, engine.last_token("recorded"))
    engine.add("recorded", params)
    assert not engine.step({"recorded": 6})
    engine.worker.remove_request("recorded")
    assert not windows._windows
    engine.add("recorded", params)
    assert not engine.step({"recorded": 2})
    assert engine.step({"recorded": 7}).keys() == {"recorded"}
    windows._threads.shutdown()
    assert torch.equal(windows.root.open("base").read_shard(0)[0], engine.states["recorded"][FIRST - 1 : 9])


def test_a_window_that_was_preempted_after_its_prompt_is_not_returned_again(windows: ReferenceWindows):
    """vLLM does not return prompt logprobs twice either."""
    engine = Engine(torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(8)))
    engine.add("recorded", window_params("record", 0, engine.last_token("recorded")))
    engine.prefill["recorded"] += 1
    assert not engine.step({"recorded": 10})
    windows._threads.shutdown()
    assert windows.root.open("base").recorded() == set()


def test_a_request_that_asks_for_candidates_at_a_temperature(windows: ReferenceWindows):
    engine = Engine(torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(8)))
    last_token, chosen = engine.last_token("other"), np.array([2, 40], np.int32)
    mark = ScoredMark(FIRST, last_token, TOP, 0.5, len(chosen), chosen.tobytes())
    engine.add("other", SamplingParams(prompt_logprobs=0, extra_args=mark.as_extra_args()))
    length = LENGTHS["other"]
    assert not engine.step({"other": 3})
    (rows,) = engine.step({"other": length - 3}).values()
    exact = ((engine.states["other"][FIRST - 1 : length] @ engine.weight).double() / 0.5).log_softmax(1)
    assert rows.logprobs.shape == (length + 1 - FIRST, 1 + len(chosen) + TOP)
    assert rows.logprob_token_ids[-1, 0] == last_token
    assert torch.allclose(rows.logprobs.double(), exact.gather(1, rows.logprob_token_ids.long()), atol=1e-5)
    assert torch.equal(rows.logprob_token_ids[:, 1:3], torch.tensor(chosen).expand(len(rows.logprobs), -1))
    assert not windows._windows
