"""`X-Request-Id` is the client's if it can be used, else a fresh one, and is on every answer once."""

import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.testclient import TestClient

from scoremode_server.api.authentication import Authentication
from scoremode_server.api.request_ids import RequestIds

FRESH = re.compile("[0-9a-f]{32}")


def app_that_shows_ids() -> RequestIds:
    app = FastAPI()

    @app.get("/")
    async def show(request: Request) -> dict[str, Any]:
        return {"state": request.state.request_id, "header": request.headers.getlist("X-Request-Id")}

    @app.websocket("/socket")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(websocket.state.request_id)

    return RequestIds(app)


async def ask(*given: bytes) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app_that_shows_ids())) as client:
        return await client.get("http://server/", headers=[(b"X-Request-Id", value) for value in given])


@pytest.mark.parametrize("given", [[b"a"], [b"my run/7: <first>"], [b"~" * 128], [b"one", b"two"]])
async def test_the_first_usable_id_is_the_requests(given):
    response = await ask(*given)
    assert response.headers.get_list("X-Request-Id") == [given[0].decode()]
    assert response.json() == {"state": given[0].decode(), "header": [given[0].decode()]}


@pytest.mark.parametrize(
    "given", [b"", b"x" * 129, b"tab\there", b"line\nbreak", b"nul\0", b"\x7f", b"\xff", "é".encode()]
)
async def test_an_unusable_id_is_replaced_in_the_request_too(given):
    response = await ask(given)
    (request_id,) = response.headers.get_list("X-Request-Id")
    assert FRESH.fullmatch(request_id)
    assert response.json() == {"state": request_id, "header": [request_id]}


async def test_without_an_id_each_request_gets_its_own():
    responses = [await ask() for _ in range(2)]
    ids = [response.headers["X-Request-Id"] for response in responses]
    assert all(FRESH.fullmatch(request_id) for request_id in ids)
    assert ids[0] != ids[1]
    # The request's own header stays empty: vLLM prefers it to the body's `request_id`.
    assert [response.json() for response in responses] == [{"state": each, "header": []} for each in ids]


def test_websockets_have_an_id():
    client = TestClient(app_that_shows_ids())
    with client.websocket_connect("/socket", headers={"X-Request-Id": "mine"}) as websocket:
        assert websocket.receive_text() == "mine"
        assert (b"x-request-id", b"mine") in websocket.extra_headers


@pytest.mark.parametrize("wrap", [RequestIds, lambda app: Authentication(app, ["key"])])
def test_messages_of_start_and_stop_pass_every_layer(wrap):
    app = FastAPI()
    events: list[str] = []
    app.router.on_startup.append(lambda: events.append("started"))
    with TestClient(wrap(app)):
        assert events == ["started"]
