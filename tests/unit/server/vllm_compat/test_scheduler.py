"""How many tokens of a request vLLM's scheduler gives to a step."""

from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from scoremode_server.vllm_compat.scheduler import has_lanes, within_lane
from scoremode_server.worker.row_spec import RowSpec


@pytest.mark.parametrize(
    ("spec", "num_computed", "num_new", "given"),
    [
        (RowSpec(chunk=1), 0, 100, 1),
        (RowSpec(chunk=1, context=40), 0, 100, 40),
        # A step had space for half of the context.
        (RowSpec(chunk=1, context=40), 0, 20, 20),
        (RowSpec(chunk=1, context=40), 20, 80, 20),
        (RowSpec(chunk=1, context=40), 40, 60, 1),
        (RowSpec(chunk=4), 98, 2, 2),
        # One token of a prompt and placeholders for drafts: vLLM needs all of them.
        (RowSpec(chunk=1), 99, 4, 4),
        (RowSpec(num_top=5), 0, 100, 100),
        (None, 0, 100, 100),
    ],
)
def test_a_step_gets_the_context_and_then_a_chunk(spec: RowSpec | None, num_computed: int, num_new: int, given: int):
    params = SamplingParams(extra_args=None if spec is None else spec.as_extra_args())
    assert within_lane(SimpleNamespace(sampling_params=params, num_prompt_tokens=100), num_computed, num_new) == given


@pytest.mark.parametrize(
    ("architecture", "has_state", "graphs", "is_v2", "expected"),
    [
        ("LlamaForCausalLM", False, CUDAGraphMode.FULL_AND_PIECEWISE, False, True),
        ("Mamba2ForCausalLM", True, CUDAGraphMode.FULL_AND_PIECEWISE, False, False),
        ("Mamba2ForCausalLM", True, CUDAGraphMode.PIECEWISE, False, True),
        ("Mamba2ForCausalLM", True, CUDAGraphMode.FULL_AND_PIECEWISE, True, True),
        ("BailingMoeV2_5ForCausalLM", True, CUDAGraphMode.NONE, True, False),
    ],
)
def test_models_whose_state_one_token_does_not_begin_have_no_lanes(architecture, has_state, graphs, is_v2, expected):
    config = SimpleNamespace(
        model_config=SimpleNamespace(architecture=architecture, has_inner_state=has_state),
        compilation_config=SimpleNamespace(cudagraph_mode=graphs),
        scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: Scheduler),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1),
        use_v2_model_runner=is_v2,
    )
    assert has_lanes(config) == expected
