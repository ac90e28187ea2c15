"""A reference written for llama.cpp, from a server that loses connections."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs

import httpx
import pytest

from scoremode.errors import OutputError, ResponseError, TransportError
from scoremode.runs import OnBytes, export_llama_cpp
from tests.unit.client.fake_server import CutShort, FakeServer, StoredReference, client_of

CONTEXT, NUM_WINDOWS = 16, 3
HEADER = b"_logits_".ljust(20 + 4 * CONTEXT * NUM_WINDOWS, b".")
# A vocabulary of 257 tokens takes 4 + 2 * 129 numbers of 16 bits for each target, and the second half has targets.
WINDOWS = [bytes([index]) * (2 * 262 * 7) for index in range(NUM_WINDOWS)]
WHOLE = HEADER + b"".join(WINDOWS)


class Server(FakeServer):
    """Sends so many bytes of an answer before the connection is lost."""

    content, most = WHOLE, 10**9

    def __call__(self, request: httpx.Request) -> httpx.Response | None:
        if not request.url.path.endswith("/llama.cpp"):
            return super().__call__(request)
        first = int(parse_qs(request.url.query.decode())["first"][0])
        self.firsts = [*getattr(self, "firsts", []), first]
        content = self.content[len(HEADER) + first * len(WINDOWS[0]) if first else 0 :]
        is_whole = len(content) <= self.most
        return httpx.Response(200, content=content) if is_whole else CutShort([], content[: self.most])


@pytest.fixture
def server() -> Server:
    body = {"name": "base", "prompt": "x" * 50, "method": "llama.cpp", "context_length": CONTEXT, "stride": None}
    stored = StoredReference(body)
    stored.recorded = set(range(NUM_WINDOWS))
    return Server({"base": stored})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "base.kld"


async def export(server: Server, path: Path, on_bytes: OnBytes | None = None) -> int:
    async with client_of(server) as client:
        return await export_llama_cpp(client, "base", path, on_bytes=on_bytes)


async def test_a_lost_connection_is_resumed_after_the_last_whole_window(server, path):
    server.most, seen = len(HEADER) + len(WINDOWS[0]) + 5, []
    size = await export(server, path, lambda *sizes: seen.append(sizes))
    assert path.read_bytes() == WHOLE
    assert (server.firsts, os.listdir(path.parent)) == ([0, 1, 2], [path.name])
    assert size == len(WHOLE)
    assert seen[-1] == (size, size)


async def test_what_is_unfinished_is_kept_and_resumed(server, path):
    server.most = len(HEADER) + len(WINDOWS[0]) + 5
    # Without a whole window the server is not tried again.
    with pytest.raises(TransportError):
        await export(server, path, lambda *_: setattr(server, "most", 5))
    assert not path.exists()
    server.most = 10**9
    await export(server, path)
    assert path.read_bytes() == WHOLE
    assert server.firsts == [0, 1, 1]


async def test_a_second_export_of_the_same_leaves_the_first_alone(server, path):
    failures = []

    def export_again(*_: int) -> None:
        with ThreadPoolExecutor() as pool:
            failures.append(pool.submit(asyncio.run, export(server, path)).exception())

    await export(server, path, export_again)
    assert [type(each) for each in failures] == [OutputError] * len(failures) != []
    assert "is in use: another ppl-client" in str(failures[0])
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("content", "message"), [(WHOLE + b".", "sends more than the 11,2"), (HEADER, r"ended after \d+ of the 11,2")]
)
async def test_a_file_of_another_length_than_the_reference_has_is_refused(server, path, content, message):
    server.content = content
    with pytest.raises(ResponseError, match=message):
        await export(server, path)
    assert not path.exists()


async def test_a_disk_without_room_is_refused_before_a_byte_is_sent(server, path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    with pytest.raises(OutputError, match=r"needs 11,2\d\d bytes more, and its disk has 10"):
        await export(server, path)
    assert not hasattr(server, "firsts")
