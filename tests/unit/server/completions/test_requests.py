"""Bodies are read as vLLM's models read them, but token ids as what they are."""

import re
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from scoremode_server.completions.requests import (
    CompletionBody,
    GenerateBody,
    is_scoring_completion,
    is_scoring_generation,
    row_temperature,
)
from scoremode_server.errors import RequestError

PLAIN = {"model": "m", "prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
PARAMS = {"max_tokens": 1, "prompt_logprobs": 1}
GENERATE = {"model": "m", "token_ids": [5, 6, 7], "sampling_params": PARAMS}
SCORING = {"model": "m", "prompt": [[5, 6], [7]], "prompt_logprobs": 2, "max_tokens": 1}


def read(body: Any) -> CompletionRequest | GenerateRequest:
    return (GenerateBody if "token_ids" in body else CompletionBody).model_validate(body)


def is_scoring(request: BaseModel) -> bool:
    return (is_scoring_generation if isinstance(request, GenerateRequest) else is_scoring_completion)(request)


@pytest.mark.parametrize(
    "body",
    [
        *(PLAIN | {"prompt": prompt} for prompt in ([[5, 6], [7]], "text", ["text", ""], [], [[]], [5, 2**70])),
        PLAIN | {"prompt": None, "prompt_embeds": "QUJD"},
        PLAIN | {"max_tokens": 16, "logprobs": None, "stop": ["e"], "logit_bias": {"5": 1.5}, "unknown": 1},
        PLAIN | {"request_id": "mine"},
        GENERATE,
    ],
)
def test_bodies_are_read_as_vllms_models_read_them(body):
    request, expected = read(body), (GenerateRequest if "token_ids" in body else CompletionRequest).model_validate(body)
    assert request.model_dump(exclude={"request_id"}) == expected.model_dump(exclude={"request_id"})
    assert request.request_id == body.get("request_id", request.request_id)
    assert is_scoring(request) == is_scoring(expected)


@pytest.mark.parametrize(
    ("body", "scores"),
    [
        *((PLAIN, True), (SCORING | {"prompt_logprobs": 0, "logprobs": 5}, True), (GENERATE, True)),
        # Without `echo` vLLM refuses to generate nothing.
        *((SCORING | {"max_tokens": 0, "echo": True}, True), (SCORING | {"max_tokens": 0}, False)),
        # The whole vocabulary.
        *((SCORING | {"prompt_logprobs": -1}, False), (SCORING | {"prompt_logprobs": None, "logprobs": 1}, False)),
        *((SCORING | {"logprobs": 1, "logprob_token_ids": [5]}, False), (SCORING | {"max_tokens": 2}, False)),
        *((SCORING | {"prompt_logprobs": 0, "stream": True}, False), (SCORING | {"use_beam_search": True}, False)),
        *((GENERATE | {"stream": True}, False), (GENERATE | {"output_mode": "text"}, False)),
        # Without `max_tokens` vLLM generates as many as there is room for.
        *((GENERATE | {"sampling_params": {name: 1}}, False) for name in PARAMS),
        (GENERATE | {"sampling_params": PARAMS | {"prompt_logprobs": 0, "logprobs": 1}}, True),
        *(
            (GENERATE | {"sampling_params": PARAMS | change}, False)
            for change in ({"max_tokens": 2}, {"prompt_logprobs": -1}, {"detokenize": False})
        ),
    ],
)
def test_requests_that_score_are_recognized(body, scores):
    assert is_scoring(read(body)) is scores


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (PLAIN | {"prompt": [5, 6.5]}, "[1] should be a valid integer"),
        (PLAIN | {"prompt": [[5], [6], [7]]}, "prompt list length 3"),
        (GENERATE | {"token_ids": [5, "a"]}, "token_ids.1"),
        (GENERATE | {"token_ids": [5, -1]}, "must not contain negative values"),
        (GENERATE | {"sampling_params": None}, "sampling_params"),
    ],
)
def test_wrong_bodies_are_refused(monkeypatch, body, message):
    monkeypatch.setenv("VLLM_MAX_COMPLETION_PROMPTS", "2")
    with pytest.raises((ValidationError, VLLMValidationError), match=re.escape(message)):
        read(body)


@pytest.mark.parametrize(
    "processor",
    [
        *({name: 0.5} for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")),
        *({"top_k": 5}, {"min_tokens": 1}, {"bad_words": ["the"]}, {"logit_bias": {5: 1.0}}),
        *({"allowed_token_ids": [5]}, {"thinking_token_budget": 5}),
        {"structured_outputs": StructuredOutputsParams(regex="a")},
    ],
    ids=lambda processor: next(iter(processor)),
)
def test_processed_logprobs_of_prompts_have_a_temperature_and_no_other_processor(processor):
    neutral = {"top_k": -1, "top_p": 1.0, "logit_bias": {}, "bad_words": [], "stop": ["a"], "seed": 3}
    assert [row_temperature(SamplingParams(temperature=each, **neutral)) for each in (0, 0.7, 1)] == [1, 0.7, 1]
    [name] = processor
    with pytest.raises(RequestError, match=f"leave out {name}") as error:
        row_temperature(SamplingParams(temperature=0.7, **processor))
    assert error.value.param == name
