"""vLLM's app with our middleware around its own, without an engine; and ids of requests."""

import logging
import re
from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Request

from scoremode_server.api.middleware import OPEN_PATHS, RequestIds
from tests.unit.server.api.light_app import ask
from write_openapi import app_without_engine

FRESH = "[0-9a-f]{32}"
MINE = {"X-Request-Id": "mine"}


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    """With a key, vLLM's request ids, and every route that vLLM has for a model that generates."""
    # vLLM's routes for SageMaker set the root logger, and its handlers, to ERROR.
    loggers = [logging.getLogger(), *logging.getLogger().handlers]
    levels = [each.level for each in loggers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "scoremode")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_API_KEY", "secret")
        # The general plugin's patches would outlive these tests.
        patch.setattr("scoremode_server.vllm_patches.install.install", lambda: None)
        app = app_without_engine("--enable-request-id-headers", "--enable-tokenizer-info-endpoint")
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)

        @app.get("/fails")
        async def fail() -> None:
            raise RuntimeError("the handler failed")

        yield app


async def test_every_route_is_open_on_purpose_or_needs_the_key(app):
    paths = {re.sub(r"\{.*?\}", "1", route.path): getattr(route, "methods", None) or {"GET"} for route in app.routes}
    assert {"/v1/score", "/invocations", "/generative_scoring", "/tokenizer_info", "/server_info"} <= paths.keys()
    for path, methods in paths.items():
        for method in methods - {"OPTIONS"} if path not in OPEN_PATHS else ():
            response = await ask(app, path, method=method, headers=MINE)
            assert response.status_code == 401, (method, path)
            assert response.headers.get_list("X-Request-Id") == ["mine"]


def test_our_routes_come_before_vllms_and_replace_them(app):
    """A route that does not match takes 2 µs, twice per request."""
    paths = [getattr(route, "path", None) for route in app.routes]
    assert (paths[0], "/v1/score" in paths[:5], paths.count("/v1/completions")) == ("/v1/completions", True, 1)


async def test_an_unexpected_exception_has_an_id_and_is_counted(app):
    response = await ask(app, "/fails", headers={**MINE, "Authorization": "Bearer secret"})
    assert response.status_code == 500
    assert response.headers.get_list("X-Request-Id") == ["mine"]
    assert 'http_requests_total{handler="/fails"' in (await ask(app, "/metrics")).text


async def test_a_stack_that_is_built_again_still_needs_the_key(app):
    app.middleware_stack = None
    assert (await ask(app, "/load")).status_code == 401


def app_that_shows_ids() -> RequestIds:
    app = FastAPI()

    @app.get("/")
    async def show(request: Request) -> list[str]:
        return [request.state.request_id, *request.headers.getlist("X-Request-Id")]

    return RequestIds(app)


async def ids(*given: bytes) -> tuple[str, list[str]]:
    """The id of the answer, and those that the app found in the request's state and headers."""
    response = await ask(app_that_shows_ids(), "/", headers=[(b"X-Request-Id", value) for value in given])
    (request_id,) = response.headers.get_list("X-Request-Id")
    return request_id, response.json()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((each, each.decode()) for each in (b"a", b"my run/7: <first>", b"~" * 128)),
        *((each, FRESH) for each in (b"", b"x" * 129, b"tab\there", b"line\nbreak", b"nul\0", b"\x7f", "é".encode())),
    ],
)
async def test_the_clients_id_is_used_if_it_can_be(given, expected):
    request_id, shown = await ids(given, b"another")
    assert re.fullmatch(re.escape(expected) if expected != FRESH else FRESH, request_id)
    assert shown == [request_id, request_id]


async def test_without_an_id_each_request_gets_its_own():
    first, second = [await ids() for _ in range(2)]
    assert first[0] != second[0]
    # The request's own header stays empty: vLLM prefers it to the body's `request_id`.
    assert [first[1], second[1]] == [[first[0]], [second[0]]]
