"""Clients get the right errors when an engine dies or a server is stopped under load, and the server then ends."""

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from local_server import ServerProcess
from scoremode import AsyncScoreClient
from scoremode.runs import Corpus, Progress, evaluate
from tests.texts import WIKITEXT

EXIT_SECONDS = 30
"""Time in which a server must end by itself."""


# After all others that share these servers.
pytestmark = pytest.mark.ends_servers


def load(num_requests: int) -> list[dict[str, Any]]:
    """Bodies of some seconds of work, no two alike."""
    return [{"prompt": [[random.randrange(1024) for _ in range(1000)] for _ in range(16)]} for _ in range(num_requests)]


async def answers_of(server: ServerProcess, num_requests: int, meanwhile: Any) -> list[httpx.Response]:
    """The answer to each of a load's requests, all sent at once, with something done once the engine is at work."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits()) as client:
        answers: list[asyncio.Task[httpx.Response]] = []
        while "scoremode_running_sequences 0.0" in (await client.get("/metrics")).text:
            # A server may finish all of them between two looks.
            if all(answer.done() for answer in answers):
                answers = [asyncio.create_task(client.post("/v1/score", json=body)) for body in load(num_requests)]
        await meanwhile(client)
        return await asyncio.gather(*answers)


def check_refusal(response: httpx.Response, message: str) -> None:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["code"], error["message"]) == (503, 503, message)


def test_a_killed_server_leaves_no_process_and_no_shared_memory(servers, disturbed_server):
    server = psutil.Process(servers.process("disturbed_server").pid)
    family = server.children(recursive=True)
    shared = {each.path for process in family for each in process.memory_maps() if each.path.startswith("/dev/shm/")}
    shared = {path for path in shared if Path(path).exists()}
    # One is the engine, which keeps a GPU's memory, and one its worker, with which it shares memory.
    assert len(family) >= 2
    assert shared
    server.kill()
    _, left = psutil.wait_procs(family, timeout=EXIT_SECONDS)
    assert not left
    assert not [path for path in shared if Path(path).exists()]


async def test_an_engine_that_dies_ends_its_server_and_runs_continue(servers, server, second_server):
    ending = servers.process("second_server")
    family, health = psutil.Process(ending.pid).children(recursive=True), [0]
    (engine,) = [process for process in family if "EngineCore" in process.name()]
    corpus = Corpus("text", WIKITEXT.read_text(), "made up", 1)
    windows = {"max_tokens": 20_000, "context_length": 512, "stride": 256}

    def kill(progress: Progress) -> None:
        if progress.windows_done == 1:
            engine.kill()

    async def run_on_both(http: httpx.AsyncClient) -> None:
        # Until it is killed: on a busy machine, all of the load would be answered before a window is.
        engine.suspend()
        async with AsyncScoreClient(server) as first, AsyncScoreClient(ending.url) as second:
            run = await evaluate([first, second], corpus, on_progress=kill, **windows)
            # It may close the connection where it ends before it is asked again.
            while health[-1] != 503 and ending.process.poll() is None:
                with suppress(httpx.TransportError):
                    health.append((await http.get("/health")).status_code)
            undisturbed = await evaluate(first, corpus, **windows)
        for window, expected in zip(run.windows, undisturbed.windows, strict=True):
            # Each run has other batches, and float32 sums depend on them.
            assert window.nll_sum == pytest.approx(expected.nll_sum, abs=1e-5 * window.num_scored)

    # Others were answered before.
    refused = [answer for answer in await answers_of(ending, 20, run_on_both) if answer.status_code != 200]
    assert refused
    for answer in refused:
        check_refusal(answer, "the engine has died: the server's log has its error")
        assert int(answer.headers["Retry-After"]) > 0
    assert set(health[1:]) <= {200, 503}
    assert ending.process.wait(EXIT_SECONDS) != 0
    _, left = psutil.wait_procs(family, timeout=EXIT_SECONDS)
    assert not left


async def test_requests_say_the_error_of_a_worker_that_ends_the_engine(servers, int8_server):
    ending = servers.process("int8_server")

    async def break_worker(http: httpx.AsyncClient) -> None:
        body = {"method": "__setattr__", "args": ["worker", None]}
        (await http.post("/collective_rpc", json=body)).raise_for_status()

    refused = [answer for answer in await answers_of(ending, 20, break_worker) if answer.status_code != 200]
    assert refused
    for answer in refused:
        error = "AttributeError: 'NoneType' object has no attribute 'execute_model'"
        check_refusal(answer, f"the engine has died: the server's log has its error: {error}")
    assert ending.process.wait(EXIT_SECONDS) != 0


async def test_a_stopping_server_finishes_its_requests_and_refuses_more(servers, llama_2_server):
    stopping, refused = servers.process("llama_2_server"), []

    async def stop(client: httpx.AsyncClient) -> None:
        os.kill(stopping.pid, signal.SIGTERM)
        while not refused or refused[-1].status_code == 200:
            refused.append(await client.post("/v1/score", json={"prompt": [1, 2, 3]}))

    answers = await answers_of(stopping, 5, stop)
    check_refusal(refused[-1], "the server is shutting down")
    assert 200 in {answer.status_code for answer in answers}
    # If the grace period is too short, the others get a response all the same.
    for answer in answers:
        if answer.status_code != 200:
            check_refusal(answer, "the server is shutting down")
    assert stopping.process.wait(2 * EXIT_SECONDS) == 0
