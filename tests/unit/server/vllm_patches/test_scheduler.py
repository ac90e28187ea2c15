"""How many tokens of a request vLLM's scheduler gives to a step."""

from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams

from scoremode_server.vllm_patches.row_spec import RowSpec
from scoremode_server.vllm_patches.scheduler import within_lane


@pytest.mark.parametrize(
    ("spec", "num_computed", "num_new", "given"),
    [
        (RowSpec(chunk=1), 0, 100, 1),
        (RowSpec(chunk=1), 99, 1, 1),
        (RowSpec(chunk=1, context=40), 0, 100, 40),
        # A step had space for half of the context.
        (RowSpec(chunk=1, context=40), 0, 20, 20),
        (RowSpec(chunk=1, context=40), 20, 80, 20),
        (RowSpec(chunk=1, context=40), 40, 60, 1),
        (RowSpec(chunk=4), 0, 100, 4),
        (RowSpec(chunk=4), 98, 2, 2),
        # One token of a prompt and placeholders for drafts: vLLM needs all of them.
        (RowSpec(chunk=1), 99, 4, 4),
        (RowSpec(num_top=5), 0, 100, 100),
        (None, 0, 100, 100),
    ],
)
def test_a_step_gets_the_context_and_then_a_chunk(spec: RowSpec | None, num_computed: int, num_new: int, given: int):
    params = SamplingParams(extra_args=None if spec is None else spec.as_extra_args())
    request = SimpleNamespace(sampling_params=params, num_prompt_tokens=100)
    assert within_lane(request, num_computed, num_new) == given


def test_pooling_requests_have_no_lane():
    assert within_lane(SimpleNamespace(sampling_params=None, num_prompt_tokens=100), 0, 100) == 100
