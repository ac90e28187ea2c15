"""`X-Request-Id` is the client's where it can be used, else a fresh one, and stands on every answer once."""

import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.testclient import TestClient
from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware

from scoremode_server.api.request_ids import RequestIds

FRESH = re.compile("[0-9a-f]{32}")


def app_that_tells_ids() -> FastAPI:
    app = FastAPI()

    @app.get("/")
    async def tell(request: Request) -> dict[str, Any]:
        return {"state": request.state.request_id, "header": request.headers.getlist("X-Request-Id")}

    @app.get("/fails")
    async def fail() -> None:
        raise RuntimeError("the handler failed")

    @app.websocket("/socket")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(websocket.state.request_id)

    return app


async def ask(app: Any, path: str, *given: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.get(path, headers=[(b"X-Request-Id", value) for value in given])


@pytest.mark.parametrize("given", [b"a", b"my run/7: <first>", b"~" * 128])
async def test_the_clients_id_is_kept(given: bytes):
    response = await ask(RequestIds(app_that_tells_ids()), "/", given)
    assert response.headers.get_list("X-Request-Id") == [given.decode()]
    assert response.json() == {"state": given.decode(), "header": [given.decode()]}


@pytest.mark.parametrize(
    "given", [b"", b"x" * 129, b"tab\there", b"line\nbreak", b"nul\0", b"\x7f", b"\xff", "é".encode()]
)
async def test_an_id_that_cannot_be_used_is_replaced_for_the_app_too(given: bytes):
    response = await ask(RequestIds(app_that_tells_ids()), "/", given)
    (request_id,) = response.headers.get_list("X-Request-Id")
    assert FRESH.fullmatch(request_id)
    assert response.json() == {"state": request_id, "header": [request_id]}


async def test_of_several_ids_the_first_is_kept():
    response = await ask(RequestIds(app_that_tells_ids()), "/", b"one", b"two")
    assert response.json() == {"state": "one", "header": ["one"]}


async def test_without_an_id_each_request_gets_its_own():
    app = RequestIds(app_that_tells_ids())
    responses = [await ask(app, "/") for _ in range(2)]
    ids = [response.json()["state"] for response in responses]
    assert all(FRESH.fullmatch(request_id) for request_id in ids)
    assert ids[0] != ids[1]
    assert [response.headers["X-Request-Id"] for response in responses] == ids
    # The request itself stays without one: vLLM prefers the header to the body's `request_id`.
    assert all(response.json()["header"] == [] for response in responses)


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/fails", 500)])
async def test_errors_have_it_too(path: str, status: int):
    response = await ask(RequestIds(app_that_tells_ids()), path, b"mine")
    assert response.status_code == status
    assert response.headers.get_list("X-Request-Id") == ["mine"]


@pytest.mark.parametrize("given", [[], [b"mine"], [b"\xff"]])
async def test_vllms_own_middleware_sends_no_second_one(given: list[bytes]):
    app = app_that_tells_ids()
    app.add_middleware(XRequestIdMiddleware)
    response = await ask(RequestIds(app), "/", *given)
    assert response.headers.get_list("X-Request-Id") == [response.json()["state"]]


def test_websockets_have_one():
    client = TestClient(RequestIds(app_that_tells_ids()))
    with client.websocket_connect("/socket", headers={"X-Request-Id": "mine"}) as websocket:
        assert websocket.receive_text() == "mine"
        assert (b"x-request-id", b"mine") in websocket.extra_headers


def test_starting_and_stopping_pass():
    app = FastAPI()
    events: list[str] = []
    app.router.on_startup.append(lambda: events.append("started"))
    with TestClient(RequestIds(app)):
        assert events == ["started"]
