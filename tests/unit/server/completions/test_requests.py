"""Bodies of completions are read as vLLM's model reads them, but prompts as what they are."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from scoremode_server.completions.requests import CompletionReader, is_scoring
from scoremode_server.errors import RequestError

PLAIN = {
    "model": "m",
    "prompt": [5, 6, 7],
    "echo": True,
    "logprobs": 1,
    "max_tokens": 1,
    "temperature": 0,
    "seed": 1234,
}


def read(body: Any) -> CompletionRequest:
    return CompletionReader().read(json.dumps(body).encode())


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"prompt": [[5, 6], [7]]},
        {"prompt": "text"},
        {"prompt": ["text", ""]},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [5, 2**70]},
        # What vLLM's model makes token ids of.
        {"prompt": [5, 6.0]},
        {"prompt": [5, True]},
        {"prompt": None, "prompt_embeds": "QUJD"},
        {"max_tokens": 0, "logprobs": 0},
        {"max_tokens": 16, "stop": ["e"], "logit_bias": {"5": 1.5}},
        {"stream": True, "echo": False, "logprobs": None},
        {"temperature": 0.5, "top_p": 0.9, "user": "someone", "return_token_ids": True},
        {"request_id": "mine"},
        {"unknown": 1},
    ],
)
def test_a_body_is_read_as_vllms_model_reads_it(change):
    body = PLAIN | change
    request, expected = read(body), CompletionRequest.model_validate(body)
    assert request.model_dump(exclude={"request_id"}) == expected.model_dump(exclude={"request_id"})
    assert request.request_id == body.get("request_id", request.request_id)
    assert is_scoring(request) == is_scoring(expected)


@pytest.mark.parametrize(
    ("settings", "scores"),
    [
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
def test_what_trainers_ask_for_scores(settings: dict[str, Any], scores: bool):
    assert is_scoring(read({"model": "m", "prompt": [[5, 6], [7]]} | settings)) is scores


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, "text"], "prompt[1] must be a token id, not a string"),
        ([5, 6.5], "prompt[1] must be a token id, not a float"),
        ([5, [6]], "prompt[1] must be a token id, not a list"),
        ([5, -1], "prompt has the negative token id -1"),
        ([[5], [-1]], "prompt[1] has the negative token id -1"),
        # vLLM's model would take them, but slowly.
        ([5, 6.0] * 20_000, "prompt[1] must be a token id, not a float"),
    ],
)
def test_a_prompt_that_is_refused_has_one_message(prompt: Any, message: str):
    with pytest.raises(RequestError, match=re.escape(message)):
        read(PLAIN | {"prompt": prompt})


def test_other_fields_are_vllms_to_refuse():
    with pytest.raises(ValidationError, match="temperature"):
        read(PLAIN | {"temperature": "warm"})


def test_vllms_own_refusals_are_raised(monkeypatch):
    monkeypatch.setenv("VLLM_MAX_COMPLETION_PROMPTS", "2")
    with pytest.raises(VLLMValidationError, match="prompt list length 3"):
        read(PLAIN | {"prompt": [[5], [6], [7]]})


def test_requests_of_the_same_settings_share_nothing():
    reader = CompletionReader()
    first, second = (reader.read(json.dumps(PLAIN | {"prompt": [token]}).encode()) for token in (5, 6))
    assert (first.prompt, second.prompt) == ([5], [6])
    assert first.request_id != second.request_id
    first.stop.append("x")
    assert second.stop == reader.read(json.dumps(PLAIN).encode()).stop == []


@pytest.mark.parametrize("prompts", [([5, 6], [7, 8, 9]), ("a text", "the other"), ([[5], [6, 7]], [[8], [9]])])
def test_settings_are_remembered_whatever_the_prompts_are(prompts: tuple[Any, Any]):
    reader = CompletionReader()
    for prompt in prompts:
        assert reader.read(json.dumps({"model": "m", "prompt": prompt, "echo": True}).encode()).prompt == prompt
    assert reader._remembered.cache_info().hits == 1


def test_settings_are_remembered_unless_they_are_large():
    reader = CompletionReader()
    for user in ("a", "a", "a" * 10_000):
        reader.read(json.dumps(PLAIN | {"user": user}).encode())
    remembered = reader._remembered.cache_info()
    assert (remembered.hits, remembered.currsize) == (1, 1)
