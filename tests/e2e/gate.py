"""A real server at an address where it answers only so often: what asks it there can be killed before it is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import Event

import httpx

from tests.unit.client.fake_server import serve

HEADERS = ("Authorization", "Content-Type")


@contextmanager
def gated(server: str, route: str, num_answers: int) -> Iterator[str]:
    """The address; requests to the route after so many have no answer until the end."""
    asked, over = count(1), Event()

    def relay(request: httpx.Request) -> httpx.Response | None:
        if request.url.path == route and next(asked) > num_answers:
            over.wait()
            return None
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        answer = http.request(request.method, request.url.path, content=request.content, headers=headers)
        return httpx.Response(answer.status_code, content=answer.content)

    with httpx.Client(base_url=server, timeout=300) as http, serve(relay) as url:
        try:
            yield url
        finally:
            over.set()
