"""What a request may write into logs and answers, and what it may leave open."""

import asyncio

import pytest

from scoremode_server.api import requests
from scoremode_server.errors import RequestError
from tests.bad_inputs import COMPLETIONS, SCORE
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


async def test_an_unknown_model_is_answered_with_the_served_ones_and_adapters():
    app = light_app()
    app.state.scoremode.models.models.lora_requests = {"an-adapter": None}
    async with client_of(app) as client:
        response = await client.post("/v1/score", json={"model": "foo", "prompt": [5, 6]})
    message = "The model `foo` does not exist. Valid aliases: m. Adapters: an-adapter."
    assert error_of(response) == (404, "model", message)
