"""What marks a scoring request, and what vLLM's output processing does with one."""

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.logprobs import LogprobsProcessor

from scoremode_server.offline import score_params
from scoremode_server.rows import PromptLogprobs
from scoremode_server.vllm_patches import output_processor


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


def test_patching_twice_is_patching_once(patched: None):
    before = LogprobsProcessor._update_prompt_logprobs
    output_processor.patch()
    assert LogprobsProcessor._update_prompt_logprobs is before
