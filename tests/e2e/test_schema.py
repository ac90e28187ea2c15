"""openapi/openapi.json and what schemathesis makes of it: no request gets a server error or an undocumented response.

Most requests are adapted so that they can be scored; otherwise only the validator is tested.
"""

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

from scoremode.wire.protocol import KldResponse, PerplexityResponse, Reference
from write_openapi import OPENAPI, text

POSTS = ("/v1/score", "/v1/perplexity", "/v1/references", "/v1/kld", "/v1/tokens")
STREAMED = {"/v1/perplexity": PerplexityResponse, "/v1/references": Reference, "/v1/kld": KldResponse}
"""What a stream ends with."""
REFERENCE = "schemathesis"
NUM_WINDOWS = 3
LEAST_ANSWERED = 0.4
LONGEST_TEXT = 6
"""Characters; such as schemathesis likes are several tokens each."""
LONGEST_TOKENS = 12
LONGEST_LIST = 2
LONGEST_WINDOW = 6

CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance),
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def schema() -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_path(OPENAPI)


def test_the_file_is_the_running_apps(server):
    served = httpx.get(f"{server}/openapi.json", timeout=60).json()
    assert OPENAPI.read_text() == text(served), "stale: run `make openapi`"


@pytest.fixture(scope="module")
def reference(server: str) -> Iterator[str]:
    """Of three short windows."""
    body = {"name": REFERENCE, "prompt": list(range(5, 18)), "method": "disjoint", "context_length": 4}
    recorded = httpx.post(f"{server}/v1/references", json=body, timeout=120).raise_for_status().json()
    assert (recorded["complete"], recorded["num_windows"]) == (True, NUM_WINDOWS)
    yield REFERENCE
    httpx.delete(f"{server}/v1/references/{REFERENCE}", timeout=60).raise_for_status()


@pytest.mark.parametrize("num_cases", [250, pytest.param(3000, marks=pytest.mark.slow)])
def test_every_response_is_documented_and_many_are_scores(server, reference, schema, num_cases):
    vocab_size = httpx.get(f"{server}/v1/score", timeout=60).json()["vocab_size"]
    for path in POSTS:
        counter = Counter[int]()

        def send(case: Case, counter: Counter[int] = counter) -> None:
            counter[check(server, case)] += 1

        def bend(body: Any, path: str = path) -> Any:
            if path == "/v1/tokens":
                return {"token_ids": shortened(body["token_ids"], vocab_size)}
            return bent_kld(body) if path == "/v1/kld" else bent(body, vocab_size)

        # Every recording writes the LM head.
        each = num_cases // len(POSTS) // (5 if path == "/v1/references" else 1)
        # What is valid and left as it is may be long: a few of those take as much time as all others.
        answerable, valid, invalid = each * 3 // 4, max(each // 20, 1), each // 5
        run(schema[path]["POST"], send, answerable, bend=bend)
        run(schema[path]["POST"], send, valid)
        run(schema[path]["POST"], send, invalid, mode=GenerationMode.NEGATIVE)
        assert counter.total() >= 0.8 * each, f"{path}: schemathesis ran out of cases: {counter}"
        assert counter[200] >= LEAST_ANSWERED * counter.total(), f"{path}: {counter}"
        assert counter[400], f"{path}: nothing was refused"


def test_responses_of_routes_without_a_body_are_documented(server, reference, schema):
    def check_unknown(case: Case) -> None:
        # Tests that run at the same time keep theirs.
        case.path_parameters["name"] = f"unknown-{case.path_parameters['name']}"
        assert check(server, case) == 404

    run(schema["/v1/score"]["GET"], lambda case: check(server, case), 1)
    run(schema["/v1/references"]["GET"], lambda case: check(server, case), 1)
    for method in ("GET", "DELETE"):
        run(schema["/v1/references/{name}"][method], check_unknown, 20)
    assert httpx.get(f"{server}/v1/references/{reference}", timeout=60).status_code == 200


def run(
    operation: schemathesis.APIOperation,
    send: Callable[[Case], object],
    num_cases: int,
    *,
    bend: Callable[[Any], Any] = lambda body: body,
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
        case.body = bend(case.body)
        send(case)

    with_cases()


def bent(body: Any, vocab_size: int) -> Any:
    """The request made short, not empty, for the served model and its tokens, with fields that go together."""
    body = for_the_model(body)
    for name in ("texts", "continuations"):
        if not body.get(name):
            body.pop(name, None)
    if "texts" not in body and body.get("prompt") is None:
        body["prompt"] = ""
    for name in ("prompt", "texts", "continuations"):
        if name in body:
            body[name] = shortened(body[name], vocab_size)
    for name, least in (("context_length", 2), ("stride", 2), ("max_tokens", LONGEST_TOKENS)):
        if body.get(name):
            body[name] = least + int(body[name]) % LONGEST_WINDOW
    if body.get("prompt") and body.get("texts"):
        del body["texts"]
    if body.get("method") and not body.get("context_length"):
        # Some methods score whole windows alone, and a text is short.
        body["context_length"] = 2
    if body.get("method") and body.get("prompt"):
        more = "one two three four five six " if isinstance(body["prompt"], str) else [5] * LONGEST_WINDOW
        body["prompt"] = more + body["prompt"]
    if body.get("continuations"):
        body.pop("logprobs_from", None)
    if body.get("logprobs_from") is not None:
        # Of several positions, one for each prompt, most would be too many or too few.
        body["logprobs_from"] = 0 if isinstance(body["logprobs_from"], list) else abs(body["logprobs_from"]) % 2
    if (candidates := body.get("candidate_token_ids")) is not None:
        lists = [each if isinstance(each, list) else [each] for each in candidates]
        body["candidate_token_ids"] = shortened([token for tokens in lists for token in tokens], vocab_size)
    if body.get("stride") and (body.get("method", "sliding") not in ("sliding", "overlapping")):
        del body["stride"]
    if body.get("stride"):
        body["stride"] = min(body["stride"], body.get("context_length") or body["stride"])
    return body


def for_the_model(body: dict[str, Any]) -> dict[str, Any]:
    """The fields, of the served model. By JSON Schema 5.0 is an integer too."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in body.items()
        if name != "model"
    }


def bent_kld(body: Any) -> Any:
    """The request for the reference that there is, with windows of it."""
    body = for_the_model(body) | {"reference": REFERENCE}
    if body.get("windows"):
        first, last = (int(index) % NUM_WINDOWS for index in body["windows"])
        body["windows"] = [min(first, last), max(first, last) + 1]
    if body.get("as_noise_floor"):
        body.pop("windows", None)
    return body


def shortened(value: Any, vocab_size: int) -> Any:
    """Texts and lists cut off, token ids within the vocabulary."""
    if isinstance(value, list):
        longest = LONGEST_TOKENS if value and isinstance(value[0], (int, float)) else LONGEST_LIST
        return [shortened(each, vocab_size) for each in value[:longest]] or [0, 1]
    if isinstance(value, (int, float)):
        return int(value) % vocab_size
    return (value[:LONGEST_TEXT] or "a text") if isinstance(value, str) else value


def check(server: str, case: Case) -> int:
    """Send a case; the status of its answer, which is one that the document has."""
    response = case.call_and_validate(server, checks=CHECKS, timeout=120)
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
