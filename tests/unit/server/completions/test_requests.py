"""Bodies are read as vLLM's models read them, but token ids as what they are."""

import json
import re
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.exceptions import VLLMValidationError

from scoremode_server.completions import generate
from scoremode_server.completions.generate import read_generate_request
from scoremode_server.completions.requests import CompletionReader, is_scoring
from scoremode_server.errors import RequestError

SETTINGS = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
PLAIN = {"model": "m", "prompt": [5, 6, 7], **SETTINGS}
GENERATE = {"model": "m", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
MIXED = [5, "6"] * 20_000
"""vLLM's models would take it, but slowly."""


def read(body: Any) -> CompletionRequest:
    return CompletionReader().read(json.dumps(body).encode())


def read_generate(body: Any) -> GenerateRequest:
    return read_generate_request(json.dumps(body).encode())


def fields_of(request: BaseModel) -> dict[str, Any]:
    return request.model_dump(exclude={"request_id"})


@pytest.mark.parametrize(
    "change",
    [
        *({"prompt": prompt} for prompt in ([[5, 6], [7]], "text", ["text", ""], [], [[]], [5, 2**70])),
        # vLLM's model makes token ids of these.
        *({"prompt": prompt} for prompt in ([5, 6.0], [5, True])),
        {"prompt": None, "prompt_embeds": "QUJD"},
        {"max_tokens": 0, "logprobs": 0},
        {"max_tokens": 16, "stop": ["e"], "logit_bias": {"5": 1.5}},
        {"stream": True, "echo": False, "logprobs": None},
        {"temperature": 0.5, "top_p": 0.9, "user": "someone", "return_token_ids": True},
        {"request_id": "mine"},
        {"unknown": 1},
    ],
)
def test_completions_are_read_as_vllms_model_reads_them(change):
    body = PLAIN | change
    request, expected = read(body), CompletionRequest.model_validate(body)
    assert fields_of(request) == fields_of(expected)
    assert request.request_id == body.get("request_id", request.request_id)
    assert is_scoring(request) == is_scoring(expected)


@pytest.mark.parametrize("change", [{}, {"token_ids": [5, "6"]}, {"token_ids": [5.0, True]}, {"priority": 1}], ids=str)
def test_generate_requests_are_read_as_vllms_model_reads_them(change):
    assert fields_of(read_generate(GENERATE | change)) == fields_of(GenerateRequest.model_validate(GENERATE | change))


@pytest.mark.parametrize(
    ("settings", "scores"),
    [
        (SETTINGS, True),
        ({"prompt_logprobs": 100, "max_tokens": 1, "temperature": 1.0}, True),
        ({"prompt_logprobs": 0, "max_tokens": 1, "return_token_ids": True}, True),
        ({"prompt_logprobs": 2, "max_tokens": 1, "logprobs": 5}, True),
        ({"prompt_logprobs": 2, "max_tokens": 0, "echo": True}, True),
        # vLLM refuses it.
        ({"prompt_logprobs": 2, "max_tokens": 0}, False),
        ({"prompt_logprobs": 2, "max_tokens": 2}, False),
        # The whole vocabulary.
        ({"prompt_logprobs": -1, "max_tokens": 1}, False),
        ({"prompt_logprobs": 2, "max_tokens": 1, "logprobs": 1, "logprob_token_ids": [5]}, False),
        ({"prompt_logprobs": 0, "max_tokens": 1, "stream": True}, False),
        ({"prompt_logprobs": 2, "max_tokens": 1, "use_beam_search": True}, False),
        ({"max_tokens": 1, "logprobs": 1}, False),
        ({"max_tokens": 1}, False),
    ],
)
def test_completions_that_score_are_recognized(settings, scores):
    assert is_scoring(read({"model": "m", "prompt": [[5, 6], [7]]} | settings)) is scores


@pytest.mark.parametrize(
    ("change", "scores"),
    [
        ({}, True),
        ({"sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.7, "logprobs": 1}}, True),
        ({"return_token_ids": True, "cache_salt": "s"}, True),
        ({"sampling_params": {"max_tokens": 1}}, False),
        ({"sampling_params": {"max_tokens": 2, "prompt_logprobs": 1}}, False),
        # vLLM then generates as many as there is room for.
        ({"sampling_params": {"prompt_logprobs": 1}}, False),
        ({"sampling_params": {"max_tokens": 1, "prompt_logprobs": -1}}, False),
        ({"sampling_params": {"max_tokens": 1, "prompt_logprobs": 1, "detokenize": False}}, False),
        ({"stream": True}, False),
        ({"output_mode": "text"}, False),
    ],
)
def test_generate_requests_that_score_are_recognized(change, scores):
    assert generate.is_scoring(read_generate(GENERATE | change)) is scores


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (PLAIN | {"prompt": [5, "text"]}, "prompt[1] must be a token id, not a string"),
        (PLAIN | {"prompt": [5, 6.5]}, "prompt[1] must be a token id, not a float"),
        (PLAIN | {"prompt": [5, [6]]}, "prompt[1] must be a token id, not a list"),
        (PLAIN | {"prompt": [5, -1]}, "prompt has the negative token id -1"),
        (PLAIN | {"prompt": [[5], [-1]]}, "prompt[1] has the negative token id -1"),
        (PLAIN | {"prompt": MIXED}, "prompt[1] must be a token id, not a string"),
        (PLAIN | {"temperature": "warm"}, "temperature"),
        (PLAIN | {"prompt": [[5], [6], [7]]}, "prompt list length 3"),
        (GENERATE | {"token_ids": [5, "six"]}, "token_ids[1] must be a token id, not a string"),
        (GENERATE | {"token_ids": MIXED}, "token_ids[1] must be a token id, not a string"),
        (GENERATE | {"token_ids": [5, -1]}, "must not contain negative values"),
        (GENERATE | {"token_ids": []}, "token_ids"),
        (GENERATE | {"token_ids": None}, "token_ids"),
        (GENERATE | {"token_ids": [5, "6"], "sampling_params": None}, "sampling_params"),
        (GENERATE | {"sampling_params": {"max_tokens": "one"}}, "sampling_params"),
        (
            GENERATE | {"token_ids": [5, "6"], "output_mode": "text", "sampling_params": {"detokenize": False}},
            "output_mode='text' requires",
        ),
    ],
)
def test_wrong_bodies_are_refused_by_us_or_by_vllms_model(monkeypatch, body, message):
    monkeypatch.setenv("VLLM_MAX_COMPLETION_PROMPTS", "2")
    with pytest.raises((RequestError, ValidationError, VLLMValidationError), match=re.escape(message)):
        (read if "prompt" in body else read_generate)(body)


def test_requests_with_the_same_settings_share_nothing():
    reader = CompletionReader()
    first, second = (reader.read(json.dumps(PLAIN | {"prompt": [token]}).encode()) for token in (5, 6))
    assert (first.prompt, second.prompt) == ([5], [6])
    assert first.request_id != second.request_id
    first.stop.append("x")
    assert second.stop == reader.read(json.dumps(PLAIN).encode()).stop == []


@pytest.mark.parametrize("prompts", [([5, 6], [7, 8, 9]), ("a text", "the other"), ([[5], [6, 7]], [[8], [9]])])
def test_settings_are_remembered_unless_they_are_large(prompts):
    reader = CompletionReader()
    for prompt in prompts:
        assert reader.read(json.dumps(PLAIN | {"prompt": prompt}).encode()).prompt == prompt
    reader.read(json.dumps(PLAIN | {"prompt": prompts[0], "user": "a" * 10_000}).encode())
    remembered = reader._remembered.cache_info()
    assert (remembered.hits, remembered.currsize) == (1, 1)
