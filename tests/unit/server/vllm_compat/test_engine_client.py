"""vLLM's output processing and queue limits treat scoring requests as they should."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.admission_control import SharedAdmissionStats
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor

from scoremode_server.offline import score_params
from scoremode_server.rows import PromptLogprobs
from scoremode_server.vllm_compat import output_processor
from scoremode_server.vllm_compat.engine_client import bound_generation_alone, exempt_from_queue_bounds


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM patched for one test, also where an engine of an earlier one has patched it already."""
    for owner, name in (
        (LogprobsProcessor, "from_new_request"),
        (LogprobsProcessor, "_update_prompt_logprobs"),
        (output_processor.IncrementalDetokenizer, "from_new_request"),
    ):
        monkeypatch.setattr(owner, name, owner.__dict__[name])
    output_processor.patch()


def engine_request(request_id: str, params: SamplingParams, num_tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        external_req_id=request_id,
        prompt_token_ids=[5] * num_tokens,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


class Client:
    """The part of vLLM's engine client that keeps the bounds."""

    check_admission = AsyncLLM.check_admission
    get_num_unfinished_requests = AsyncLLM.get_num_unfinished_requests
    get_num_queued_tokens = AsyncLLM.get_num_queued_tokens
    _record_admission_rejection = AsyncLLM._record_admission_rejection
    logger_manager = None

    def __init__(self, requests: int | None = None, tokens: int | None = None, stats: Any = None) -> None:
        self.scheduler_config = SimpleNamespace(max_num_queued_reqs=requests, max_num_queued_tokens=tokens)
        self.admission_stats = stats
        self.output_processor = OutputProcessor(None, log_stats=False, admission_stats=stats)
        bound_generation_alone(self)

    def add(self, request_id: str, params: SamplingParams) -> None:
        self.output_processor.add_request(engine_request(request_id, params, 10), None)


@pytest.mark.parametrize(
    ("bounds", "refused"), [({"requests": 2}, QueueOverflowError), ({"tokens": 20}, MaxQueuedTokensError)]
)
def test_scoring_uses_nothing_of_a_bound_and_none_refuses_it(bounds: dict[str, int], refused: type[Exception]):
    client = Client(**bounds)
    for number in range(50):
        client.add(f"score-{number}", score_params([5, 6]))
    for number in range(2):
        client.check_admission()
        client.add(f"cmpl-{number}", SamplingParams(max_tokens=1, detokenize=False))
    with pytest.raises(refused):
        client.check_admission()
    with exempt_from_queue_bounds():
        client.check_admission(9)


def test_scores_use_nothing_of_a_bound_that_two_servers_share():
    counters = [0] * SharedAdmissionStats.num_counters(2)
    stats = [SharedAdmissionStats({"mp_admission_counters": counters}, 2, index) for index in range(2)]
    scoring, generating = (Client(requests=2, stats=each) for each in stats)
    for number in range(50):
        scoring.add(f"score-{number}", score_params([5, 6]))
    generating.add("cmpl-0", SamplingParams(max_tokens=1, detokenize=False))
    generating.check_admission()
    scoring.add("cmpl-1", SamplingParams(max_tokens=1, detokenize=False))
    # And allow no more when they end.
    scoring.output_processor.abort_requests([f"score-{number}" for number in range(50)], internal=True)
    with pytest.raises(QueueOverflowError):
        generating.check_admission()


def test_scoring_requests_keep_arrays_and_all_others_vllms_objects():
    for params, keeps_arrays in ((score_params([1, 2, 3]), True), (SamplingParams(prompt_logprobs=0), False)):
        processor = LogprobsProcessor.from_new_request(None, engine_request("id", params, 2))
        assert isinstance(processor.prompt_logprobs, PromptLogprobs) == keeps_arrays


@pytest.mark.parametrize(("end", "length"), [("é".encode(), output_processor.DECODED_TOKENS), ("é".encode()[:1], 30)])
def test_only_the_end_of_a_prompt_is_decoded_unless_it_is_within_a_character(end: bytes, length: int):
    tokenizer = SimpleNamespace(decode=lambda ids, **_: bytes(ids).decode(errors="replace"))
    request = engine_request("id", score_params([1, 2]), 0)
    request.prompt_token_ids = [*b"a" * (30 - len(end)), *end]
    assert len(output_processor._with_end_of_prompt(tokenizer, request).prompt_token_ids) == length
