"""vLLM's app, as it is built for a server, with our middleware around vLLM's own. No engine is there to answer."""

import logging
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from fastapi import FastAPI

from scoremode_server.api.authentication import OPEN_PATHS
from scoremode_server.api.middleware import surround
from write_openapi import app_without_engine

KEY = "secret"


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    """With a key, vLLM's request ids, and every route that vLLM has for a model that generates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "scoremode")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_API_KEY", KEY)
        # What the general plugin patches would stay patched for the tests after these.
        patch.setattr("scoremode_server.vllm_patches.install.install", lambda: None)
        with log_levels_kept():
            app = app_without_engine(
                "--enable-request-id-headers", "--enable-tokenizer-info-endpoint", "--enable-offline-docs"
            )

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


async def test_every_route_of_vllm_and_ours_is_open_on_purpose_or_asks_for_the_key(app: FastAPI):
    paths = {re.sub(r"\{.*?\}", "1", route.path): getattr(route, "methods", None) or {"GET"} for route in app.routes}
    assert {"/v1/score", "/invocations", "/generative_scoring", "/tokenizer_info", "/server_info"} <= paths.keys()
    for path, methods in paths.items():
        for method in methods - {"OPTIONS"}:
            if path in OPEN_PATHS:
                continue
            response = await ask(app, path, method)
            assert response.status_code == 401, (method, path)
            assert response.headers.get_list("X-Request-Id") == ["mine"]
            if method != "HEAD":
                assert response.json()["error"]["code"] == 401


def test_our_routes_are_tried_before_vllms(app: FastAPI):
    """Each that is tried in vain takes 2 µs, twice a request."""
    assert getattr(app.routes[0], "path", None) == "/v1/completions"
    assert "/v1/score" in [getattr(route, "path", None) for route in app.routes[:5]]
    # vLLM's own would be counted, and described, under the same path.
    assert [getattr(route, "path", None) for route in app.routes].count("/v1/completions") == 1


async def test_open_paths_and_nothing_more_answer_without_an_engine(app: FastAPI):
    for path in ("/version", "/metrics", "/openapi.json", "/docs", "/static/swagger-ui.css"):
        assert (await ask(app, path)).status_code == 200, path


async def test_unexpected_exceptions_have_a_request_id(app: FastAPI):
    response = await ask(app, "/fails", Authorization=f"Bearer {KEY}")
    assert response.status_code == 500
    assert response.headers.get_list("X-Request-Id") == ["mine"]


async def test_the_key_opens_what_vllm_guards_too(app: FastAPI):
    # There is no engine and no list of models: the route was reached.
    assert (await ask(app, "/v1/models", Authorization=f"Bearer {KEY}")).status_code == 500


async def test_vllms_http_metrics_still_count(app: FastAPI):
    await ask(app, "/fails", Authorization=f"Bearer {KEY}")
    assert 'http_requests_total{handler="/fails"' in (await ask(app, "/metrics")).text


async def test_a_stack_that_is_built_again_still_asks_for_the_key(app: FastAPI):
    app.middleware_stack = None
    assert (await ask(app, "/load")).status_code == 401


async def test_a_server_without_a_key_asks_for_none_and_gives_ids(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    app = FastAPI()
    app.add_api_route("/load", lambda: "inside")
    app.state.args = Namespace(api_key=None)
    surround(app)
    response = await ask(app, "/load")
    assert response.json() == "inside"
    assert response.headers["X-Request-Id"] == "mine"
