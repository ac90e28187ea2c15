"""vLLM's app as it is built for a server, with our middleware around vLLM's own; it has no engine."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from fastapi import FastAPI

from scoremode_server.api.authentication import OPEN_PATHS
from write_openapi import app_without_engine

KEY = "secret"


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    """With a key, vLLM's request ids, and every route that vLLM has for a model that generates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "scoremode")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_API_KEY", KEY)
        # The general plugin's patches would outlive these tests.
        patch.setattr("scoremode_server.vllm_patches.install.install", lambda: None)
        with log_levels_kept():
            app = app_without_engine("--enable-request-id-headers", "--enable-tokenizer-info-endpoint")

        @app.get("/fails")
        async def fail() -> None:
            raise RuntimeError("the handler failed")

        yield app


@contextmanager
def log_levels_kept() -> Iterator[None]:
    """vLLM's routes for SageMaker set the root logger, and its handlers, to ERROR."""
    root = logging.getLogger()
    levels = [(each, each.level) for each in (root, *root.handlers)]
    yield
    for each, level in levels:
        each.setLevel(level)


async def ask(app: FastAPI, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, headers={"X-Request-Id": "mine", **headers})


async def test_every_route_is_open_on_purpose_or_needs_the_key(app):
    paths = {re.sub(r"\{.*?\}", "1", route.path): getattr(route, "methods", None) or {"GET"} for route in app.routes}
    assert {"/v1/score", "/invocations", "/generative_scoring", "/tokenizer_info", "/server_info"} <= paths.keys()
    for path, methods in paths.items():
        for method in methods - {"OPTIONS"} if path not in OPEN_PATHS else ():
            response = await ask(app, path, method)
            assert response.status_code == 401, (method, path)
            assert response.headers.get_list("X-Request-Id") == ["mine"]
            assert method == "HEAD" or response.json()["error"]["code"] == 401


def test_our_routes_come_before_vllms_and_replace_them(app):
    """A route that does not match takes 2 µs, twice per request."""
    paths = [getattr(route, "path", None) for route in app.routes]
    assert paths[0] == "/v1/completions"
    assert "/v1/score" in paths[:5]
    # vLLM's own would be counted, and described, under the same path.
    assert paths.count("/v1/completions") == 1


async def test_an_unexpected_exception_has_an_id_and_is_counted(app):
    response = await ask(app, "/fails", Authorization=f"Bearer {KEY}")
    assert response.status_code == 500
    assert response.headers.get_list("X-Request-Id") == ["mine"]
    assert 'http_requests_total{handler="/fails"' in (await ask(app, "/metrics")).text


async def test_a_stack_that_is_built_again_still_needs_the_key(app):
    app.middleware_stack = None
    assert (await ask(app, "/load")).status_code == 401
