"""What a request may write into logs and answers, and what it may leave open."""

import pytest

from scoremode_server.prefix_cache import admission
from tests.bad_inputs import COMPLETIONS, SCORE
from tests.unit.server.api.light_app import app_with_completions, client_of

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
    monkeypatch.setattr(admission.logger, "info", lambda text, *values: lines.append(text % values))
    app, _ = app_with_completions(random_model)
    async with client_of(app) as client:
        answer = await client.post(route, json=body, headers=headers)
    assert answer.status_code == 200
    (line,) = lines
    assert line.startswith(f"request {logged}")
