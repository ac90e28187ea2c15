"""What a request may write into logs and answers, and what it may leave open."""

import asyncio
import logging

import pytest

from scoremode_server.api import requests
from scoremode_server.api.completions import GENERATE
from scoremode_server.completions.requests import read_completion_request
from scoremode_server.errors import RequestError
from tests.bad_inputs import COMPLETIONS, JSON, LONG_NAME, SCORE, SHORT_NAME
from tests.unit.server.api.light_app import app_with_completions, client_of, error_of, light_app

SCORES = {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 1}


@pytest.mark.parametrize(
    ("route", "body", "headers", "logged"),
    [
        (SCORE, {"prompt": [5, 6]}, {"X-Request-Id": "run/7:a"}, "id=score-run/7:a route=/v1/score status=200 "),
        (
            SCORE,
            {"prompt": [5, 6]},
            {"X-Request-Id": 'a" route=/v1/kld status=500'},
            r'id="score-a\" route=/v1/kld status=500" route=/v1/score status=200 ',
        ),
        (
            COMPLETIONS,
            SCORES | {"request_id": "a\nrequest id=b\x1b[1m"},
            {},
            r'id="cmpl-a\nrequest id=b\u001b[1m" route=/v1/completions status=200 ',
        ),
    ],
)
async def test_no_id_of_a_request_passes_for_other_fields_of_its_line(
    random_model, monkeypatch, route, body, headers, logged
):
    lines: list[str] = []
    monkeypatch.setattr(requests.logger, "info", lambda text, *values: lines.append(text % values))
    app, _ = app_with_completions(random_model)
    async with client_of(app) as client:
        answer = await client.post(route, json=body, headers=headers)
    assert answer.status_code == 200
    (line,) = lines
    assert line.startswith(f"request {logged}")


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 200), (RequestError("no", "prompt"), 400), (ValueError(), 500), (asyncio.CancelledError(), 499)],
)
async def test_one_log_line_has_the_outcome_of_a_request(monkeypatch, error: BaseException | None, status: int):
    lines: list[str] = []
    monkeypatch.setattr(requests.logger, "info", lambda text, *values: lines.append(text % values))
    admission = light_app().state.scoremode.admission
    try:
        async with requests.accepted(admission, "/v1/score", "score-7", 3, 30) as queue:
            queue.done(10, 4)
            if error is not None:
                raise error
    except type(error or ValueError):
        pass
    (line,) = lines
    assert line.startswith(f"request id=score-7 route=/v1/score status={status} sequences=1 tokens=10 cached=4 waited=")


def test_the_log_line_has_a_logger_below_vllms():
    assert isinstance(requests.logger, logging.Logger)
    assert requests.logger.name.startswith("vllm.")


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ('"token_ids": [7], ', "token_ids is given more than once"),
        ('"sampling_params": {}, ', "sampling_params is given more than once"),
        ("", "sampling_params.prompt_logprobs is given more than once"),
    ],
)
async def test_vllms_route_of_token_ids_takes_no_field_twice_of_a_scoring_request(random_model, before, message):
    params = '{"max_tokens": 1, "prompt_logprobs": 1, "prompt_logprobs": 0}'
    body = f'{{{before}"token_ids": [5, 6], "sampling_params": {params}}}'
    app, _ = app_with_completions(random_model)
    async with client_of(app) as client:
        answer = await client.post(GENERATE, content=body, headers=JSON)
    assert error_of(answer) == (400, message.split()[0].partition(".")[0], message)


def test_what_generates_takes_the_last_of_two_fields_as_vllm_does():
    assert read_completion_request(b'{"prompt": [5], "max_tokens": 7, "max_tokens": 8}').max_tokens == 8


async def test_vllms_route_of_token_ids_repeats_no_long_name_of_a_model(random_model):
    body = {"model": LONG_NAME, "token_ids": [5], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
    app, _ = app_with_completions(random_model)
    async with client_of(app) as client:
        answer = await client.post(GENERATE, json=body)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(SHORT_NAME)


async def test_an_unknown_model_is_answered_with_the_served_ones_and_adapters():
    app = light_app()
    app.state.scoremode.models.models.lora_requests = {"an-adapter": None}
    async with client_of(app) as client:
        response = await client.post("/v1/score", json={"model": "foo", "prompt": [5, 6]})
    message = "The model `foo` does not exist. Valid aliases: m. Adapters: an-adapter."
    assert error_of(response) == (404, "model", message)
