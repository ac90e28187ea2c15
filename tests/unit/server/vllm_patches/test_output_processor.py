"""What marks a scoring request, and what vLLM's output processing does with one."""

import pytest
from vllm import SamplingParams
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from scoremode_server.offline import score_params
from scoremode_server.rows import PromptLogprobs
from scoremode_server.vllm_patches import output_processor
from scoremode_server.vllm_patches.row_spec import RowSpec
from scoremode_server.vllm_patches.scoring_params import ScoringParams


def engine_request(params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="id",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_scoring_requests_keep_arrays_and_all_others_vllms_objects(patched: None):
    plain = SamplingParams(prompt_logprobs=0)
    assert isinstance(
        LogprobsProcessor.from_new_request(None, engine_request(score_params([1, 2, 3]))).prompt_logprobs,
        PromptLogprobs,
    )
    assert not isinstance(
        LogprobsProcessor.from_new_request(None, engine_request(plain)).prompt_logprobs, PromptLogprobs
    )


@pytest.mark.parametrize("name", ["scoremode_packed", "scoremode_no_cache", "ScoringParams"])
def test_no_client_can_send_what_marks_a_scoring_request(patched: None, name: str):
    request = CompletionRequest(prompt=[1, 2], prompt_logprobs=1, vllm_xargs={name: 1})
    params = request.to_sampling_params(1, {})
    assert params.extra_args == {name: 1}
    processor = LogprobsProcessor.from_new_request(None, engine_request(params))
    assert not isinstance(processor.prompt_logprobs, PromptLogprobs)


def test_the_mark_stays_on_copies_and_never_reaches_the_engine():
    params = ScoringParams.of(
        SamplingParams(n=3, temperature=0.5, logprobs=2, prompt_logprobs=2, stop=["x"]), RowSpec()
    )
    assert isinstance(params.clone(), ScoringParams)
    received = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    assert type(received) is SamplingParams
    extra_args = RowSpec().as_extra_args()
    assert received == SamplingParams(
        n=3, temperature=0.5, logprobs=2, prompt_logprobs=2, stop=["x"], extra_args=extra_args
    )


def test_patching_twice_is_patching_once(patched: None):
    before = LogprobsProcessor._update_prompt_logprobs
    output_processor.patch()
    assert LogprobsProcessor._update_prompt_logprobs is before
