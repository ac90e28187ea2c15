"""Which bodies are read past FastAPI, and that they are read as it reads them."""

import json
from typing import Any

import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from scoremode_server.completions.requests import ScoringRequestReader

PLAIN = {
    "model": "m",
    "prompt": [5, 6, 7],
    "echo": True,
    "logprobs": 1,
    "max_tokens": 1,
    "temperature": 0,
    "seed": 1234,
}


def read(body: Any) -> CompletionRequest | None:
    return ScoringRequestReader().read(json.dumps(body).encode())


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"prompt": [[5, 6], [7]]},
        {"max_tokens": 0, "logprobs": 0},
        {"temperature": 0.5, "top_p": 0.9, "user": "someone", "return_token_ids": True},
        {"request_id": "mine"},
        {"unknown": 1},
    ],
)
def test_a_scoring_request_of_token_ids_is_read_as_vllms_model_reads_it(change):
    body = PLAIN | change
    request, expected = read(body), CompletionRequest.model_validate(body)
    assert request is not None
    assert request.model_dump(exclude={"request_id"}) == expected.model_dump(exclude={"request_id"})
    assert request.request_id == body.get("request_id", request.request_id)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "text"},
        {"prompt": ["text"]},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [5, "text"]},
        {"prompt": [5, 6.5]},
        {"prompt": [5, True]},
        {"prompt": [5, -1]},
        {"prompt": [5, [6]]},
        {"prompt": None},
        {"echo": False},
        {"logprobs": None},
        {"max_tokens": 16},
        {"stream": True},
        {"stop": ["e"]},
        {"temperature": "warm"},
    ],
)
def test_everything_else_is_left_to_fastapi(change):
    assert read(PLAIN | change) is None


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"text"'])
def test_what_is_no_json_object_is_left_to_fastapi(body):
    assert ScoringRequestReader().read(body) is None


def test_vllms_own_refusals_are_raised(monkeypatch):
    monkeypatch.setenv("VLLM_MAX_COMPLETION_PROMPTS", "2")
    with pytest.raises(VLLMValidationError, match="prompt list length 3"):
        read(PLAIN | {"prompt": [[5], [6], [7]]})


def test_requests_of_the_same_settings_share_nothing():
    reader = ScoringRequestReader()
    first, second = (reader.read(json.dumps(PLAIN | {"prompt": [token]}).encode()) for token in (5, 6))
    assert first is not None
    assert second is not None
    assert (first.prompt, second.prompt) == ([5], [6])
    assert first.request_id != second.request_id
    first.stop.append("x")
    assert second.stop == reader.read(json.dumps(PLAIN).encode()).stop == []
