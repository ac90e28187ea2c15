"""openapi/openapi.json and what schemathesis makes of it: no response is a server error or undocumented."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import TypeAdapter
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from scoremode.wire.protocol import PerplexityResponse
from scoremode.wire.references import KldResponse, Reference
from write_openapi import OPENAPI, text

REFERENCE = "schemathesis"
STREAMED = {"/v1/perplexity": PerplexityResponse, "/v1/references": Reference, "/v1/kld": KldResponse}
"""The last object of each route's stream."""
TEXT = {"prompt": "one two three four", "context_length": 3}
ARRAYS = {"encoding_format": "base64", "top_logprobs": 2}
ANSWERED: dict[str, list[dict[str, Any]]] = {
    "/v1/score": [
        {"prompt": "one two", "top_logprobs": 2, "return_tokens": True, "return_ranks": True},
        {"prompt": [[5, 6], [7, 8, 9]], "candidate_token_ids": [3], "logprobs_from": [0, 1], **ARRAYS},
        {"prompt": ["a", "b"], "continuations": [" c", " d"], "temperature": 0.5, "candidate_token_ids": [3, 4]},
    ],
    "/v1/perplexity": [TEXT, {"texts": ["one two", "three four"], "method": "rolling"}, TEXT | {"stream": True}],
    "/v1/references": [TEXT | {"name": "a", "stream": True, "return_ranks": True}, TEXT | {"name": "a"}],
    "/v1/kld": [{"reference": REFERENCE, "stream": True, "top_logprobs": 2}, {"reference": REFERENCE, **ARRAYS}],
    "/v1/tokens": [{"token_ids": [5, 6]}],
}
"""Requests that are answered with 200. Of those that schemathesis makes few are."""


def test_the_file_is_the_running_apps(server):
    served = httpx.get(f"{server}/openapi.json", timeout=60).json()
    assert OPENAPI.read_text() == text(served), "stale: run `make openapi`"


@pytest.fixture(scope="module")
def reference(server: str) -> Iterator[str]:
    """A reference with three short windows."""
    body = {"name": REFERENCE, "prompt": list(range(5, 18)), "method": "disjoint", "context_length": 4}
    httpx.post(f"{server}/v1/references", json=body, timeout=120).raise_for_status()
    yield REFERENCE
    httpx.delete(f"{server}/v1/references/{REFERENCE}", timeout=60).raise_for_status()


@pytest.mark.parametrize("num_cases", [250, pytest.param(3000, marks=pytest.mark.slow)])
def test_every_response_is_documented(server, reference, num_cases):
    schema = schemathesis.openapi.from_path(OPENAPI)
    for path, bodies in ANSWERED.items():
        operation, counter = schema[path]["POST"], Counter[int]()
        for body in bodies:
            assert check(server, operation.Case(body=body, media_type="application/json")) == 200

        def send(case: Case, counter: Counter[int] = counter) -> None:
            counter[check(server, case)] += 1

        # Every recording writes the LM head.
        each = num_cases // len(ANSWERED) // (5 if path == "/v1/references" else 1)
        run(operation, send, each // 3)
        run(operation, send, each // 3, mode=GenerationMode.NEGATIVE)
        assert counter[400], f"{path}: nothing was refused"


def run(
    operation: schemathesis.APIOperation,
    send: Callable[[Case], object],
    num_cases: int,
    *,
    mode: GenerationMode = GenerationMode.POSITIVE,
) -> None:
    """Make so many cases, the same ones every time, and send them."""

    @settings(
        max_examples=num_cases,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def with_cases(case: Case) -> None:
        send(case)

    with_cases()


def check(server: str, case: Case) -> int:
    """Send a case; the status of its answer, which is one that the document has."""
    is_made = case.meta is not None
    response = case.call_and_validate(
        server,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
            *([negative_data_rejection] if is_made else []),
        ],
        timeout=120,
    )
    if response.status_code == 200 and response.headers["content-type"][0].startswith("text/event-stream"):
        check_stream(case.path, response.text)
    if response.status_code == 200 and case.path == "/v1/references" and isinstance(case.body, dict):
        # It has the LM head, and disks are finite.
        httpx.delete(f"{server}/v1/references/{case.body['name']}", timeout=60)
    return response.status_code


def check_stream(path: str, stream: str) -> None:
    """An event stream ends with a result, or with an error that is the request's."""
    *_, last, done = stream.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    result = json.loads(last.removeprefix("data: "))
    if "error" in result:
        assert result["error"]["code"] < 500, result
    else:
        TypeAdapter(STREAMED[path]).validate_python(result)
