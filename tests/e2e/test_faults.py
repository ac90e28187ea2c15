"""What clients get when an engine dies or a server is stopped under load, and how the server then ends."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from local_server import ServerProcess, server_process

FLAGS = ("--served-model-name", "random", "--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager")
EXIT_SECONDS = 30
"""In which a server must have ended by itself."""


@pytest.fixture(scope="module")
def pair(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers of one model, started at once; tests may kill them, the second first."""
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starts = [server_process(random_model, *FLAGS, log=folder / f"{name}.log") for name in "ab"]
        yield list(pool.map(stack.enter_context, starts))


def load(num_requests: int) -> list[dict[str, Any]]:
    """Bodies of some seconds of work, no two alike."""
    return [{"prompt": [[random.randrange(1024) for _ in range(1000)] for _ in range(16)]} for _ in range(num_requests)]


async def answers_of(server: ServerProcess, bodies: list[dict[str, Any]], meanwhile: Any) -> list[httpx.Response]:
    """The answer to each body, all sent at once, with something done once the engine is at work."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits()) as client:
        answers = [asyncio.create_task(client.post("/v1/score", json=body)) for body in bodies]
        while "scoremode_running_sequences 0.0" in (await client.get("/metrics")).text:
            pass
        await meanwhile(client)
        return await asyncio.gather(*answers)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    return error


async def test_when_the_engine_dies_requests_get_503_and_the_server_ends_with_an_error(pair: list[ServerProcess]):
    server = pair[1]
    family = psutil.Process(server.pid).children(recursive=True)
    (engine,) = [process for process in family if "EngineCore" in process.name()]
    health = []

    async def kill(client: httpx.AsyncClient) -> None:
        engine.kill()
        while 503 not in health:
            health.append((await client.get("/health")).status_code)

    answers = await answers_of(server, load(10), kill)
    for answer in answers:
        assert answer.status_code == 503
        assert error_of(answer)["message"] == "the engine has died"
        assert int(answer.headers["Retry-After"]) > 0
    assert set(health) <= {200, 503}
    assert server.process.wait(EXIT_SECONDS) != 0
    _, left = psutil.wait_procs(family, timeout=EXIT_SECONDS)
    assert not left


async def test_a_server_that_is_stopped_answers_what_it_has_and_refuses_what_is_new(pair: list[ServerProcess]):
    server = pair[0]
    refused = []

    async def stop(client: httpx.AsyncClient) -> None:
        os.kill(server.pid, signal.SIGTERM)
        while not refused or refused[-1].status_code == 200:
            refused.append(await client.post("/v1/score", json={"prompt": [1, 2, 3]}))

    answers = await answers_of(server, load(10), stop)
    assert error_of(refused[-1])["message"] == "the server is shutting down"
    assert refused[-1].status_code == 503
    # Where the time of grace is not enough, the rest gets an answer all the same.
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert 200 in {answer.status_code for answer in answers}
    for answer in answers:
        if answer.status_code == 503:
            assert error_of(answer)["message"] == "the server is shutting down"
    assert server.process.wait(2 * EXIT_SECONDS) == 0
