"""Score mode on a `vllm.LLM`, without a server. Exactness is tested with bounded memory."""

import pytest
from vllm import LLM

from scoremode_server import score
from scoremode_server.errors import RequestError
from tests.engine.conftest import LENGTH, MAX_LOGPROBS


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
