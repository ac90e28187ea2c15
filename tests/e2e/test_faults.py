"""What clients get when an engine dies or a server is stopped under load, and how the server then ends."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from local_server import ServerProcess
from scoremode_server.references.directory import ReferenceDirectory
from tests.shared_servers import Servers
from tests.texts import WIKITEXT

COMPARE = ("kld", "--reference", "whole")
EXIT_SECONDS = 30
"""In which a server must have ended by itself."""


@pytest.fixture(scope="module")
def first_server(servers: Servers) -> ServerProcess:
    """Stopped at last."""
    return servers.process("first_server")


@pytest.fixture(scope="module")
def second_server(servers: Servers) -> ServerProcess:
    """Of the same model, and killed."""
    return servers.process("second_server")


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


def engine_of(server: ServerProcess) -> psutil.Process:
    processes = psutil.Process(server.pid).children(recursive=True)
    (engine,) = [process for process in processes if "EngineCore" in process.name()]
    return engine


def check_refusal(response: httpx.Response, message: str) -> None:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["code"], error["message"]) == (503, 503, message)


class PplClient:
    """Runs of `ppl-client` over the same windows of a text, into files of one folder."""

    TEXT = ("--text-file", str(WIKITEXT), "--max-tokens", "20000", "--context-length", "512", "--stride", "256")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *servers: ServerProcess, command: tuple[str, ...]) -> "subprocess.Popen[str]":
        urls = [part for server in servers for part in ("--url", server.url)]
        whole = [sys.executable, "-m", "scoremode.cli", *command, *urls, "--quiet"]
        return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def measure(self, name: str, *servers: ServerProcess, command: tuple[str, ...] = TEXT) -> "subprocess.Popen[str]":
        return self.start(*servers, command=(*command, "--output", str(self.folder / name)))

    def record(self, name: str, server: ServerProcess) -> "subprocess.Popen[str]":
        return self.start(server, command=("record", *self.TEXT, "--reference", name))

    def finish(self, run: "subprocess.Popen[str]") -> str:
        """What a run printed, when it is done."""
        printed, logged = run.communicate(timeout=300)
        assert run.returncode == 0, logged
        return logged + printed

    def journal(self, name: str) -> list[bytes]:
        """The complete lines after the first."""
        path = self.folder / f"{name}.journal"
        return path.read_bytes().splitlines(keepends=True)[1:-1] if path.exists() else []

    def pause(self, name: str, run: "subprocess.Popen[str]", count: int) -> None:
        """Stop a run for the time being, once so many windows are in its journal."""
        while len(self.journal(name)) < count:
            assert run.poll() is None
            time.sleep(0.02)
        run.send_signal(signal.SIGSTOP)

    def check(self, name: str) -> None:
        """A run has the windows of the undisturbed one, and their numbers to a float32's digits."""
        windows, undisturbed = (json.loads((self.folder / each).read_text())["windows"] for each in (name, "whole"))
        for window, expected in zip(windows, undisturbed, strict=True):
            assert (window["index"], window["num_scored"]) == (expected["index"], expected["num_scored"])
            # Each run has other batches, and float32 sums depend on them.
            assert window["nll_sum"] == pytest.approx(expected["nll_sum"], abs=1e-5 * window["num_scored"])


@pytest.fixture(scope="module")
def runs(first_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> PplClient:
    """With one run, one reference and one comparison, all "whole", that nothing disturbed."""
    runs = PplClient(tmp_path_factory.mktemp("runs"))
    runs.finish(runs.measure("whole", first_server))
    runs.finish(runs.record("whole", first_server))
    runs.finish(runs.measure("whole kld", first_server, command=COMPARE))
    return runs


def test_a_run_whose_client_was_killed_resumes(first_server, runs):
    killed = runs.measure("resumed", first_server)
    runs.pause("resumed", killed, 5)
    killed.kill()
    killed.communicate()
    kept = runs.journal("resumed")
    resumed = runs.measure("resumed", first_server, command=(*PplClient.TEXT, "--resume"))
    runs.pause("resumed", resumed, len(kept) + 5)
    assert runs.journal("resumed")[: len(kept)] == kept
    resumed.send_signal(signal.SIGCONT)
    runs.finish(resumed)
    runs.check("resumed")


@dataclass(frozen=True)
class Death:
    """What was seen when the second server's engine was killed."""

    answers: list[httpx.Response]
    """To requests that it had."""
    health: set[int]
    """The statuses of /health from then on."""
    exit_status: int
    left: list[psutil.Process]
    """Of the server's processes."""
    printed: dict[str, str]
    """By runs on both servers, when they were done."""
    recorded: dict[Path, bytes]
    """The files of a reference's windows that it had recorded by then."""


@pytest.fixture(scope="module")
def death(first_server: ServerProcess, second_server: ServerProcess, servers: Servers, runs: PplClient) -> Death:
    """Of an engine that scores, compares and records."""
    pair = (first_server, second_server)
    folder = servers.references("faults") / "resumed" / "windows"
    of_both = {}
    for name, command in (("of two", PplClient.TEXT), ("of two kld", COMPARE)):
        of_both[name] = runs.measure(name, *pair, command=command)
        # However slow the others are, it must not be done before the engine dies.
        runs.pause(name, of_both[name], 5)
    recording = runs.record("resumed", second_server)
    while len(list(folder.glob("*.safetensors"))) < 5:
        assert recording.poll() is None
        time.sleep(0.02)
    family = psutil.Process(second_server.pid).children(recursive=True)
    engine = engine_of(second_server)
    # However late the requests come, the recording must not be done before the engine dies.
    engine.suspend()
    health = [0]

    async def kill(client: httpx.AsyncClient) -> None:
        engine.resume()
        for run in of_both.values():
            run.send_signal(signal.SIGCONT)
        engine.kill()
        # It may close the connection where it ends before it is asked again.
        while health[-1] != 503 and second_server.process.poll() is None:
            with suppress(httpx.TransportError):
                health.append((await client.get("/health")).status_code)

    answers = asyncio.run(answers_of(second_server, 10, kill))
    exit_status = second_server.process.wait(EXIT_SECONDS)
    _, left = psutil.wait_procs(family, timeout=EXIT_SECONDS)
    recording.kill()
    recording.communicate()
    recorded = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    printed = {name: runs.finish(run) for name, run in of_both.items()}
    return Death(answers, set(health[1:]), exit_status, left, printed, recorded)


def test_when_the_engine_dies_requests_get_503_and_the_server_ends(death):
    for answer in death.answers:
        check_refusal(answer, "the engine has died")
        assert int(answer.headers["Retry-After"]) > 0
    assert death.health <= {200, 503}
    assert death.exit_status != 0
    assert not death.left


def test_runs_on_two_servers_continue_on_the_one_that_is_left(second_server, runs, death):
    for printed in death.printed.values():
        assert second_server.url in printed
    runs.check("of two")
    found, expected = (load_file(runs.folder / f"{name}.safetensors") for name in ("of two kld", "whole kld"))
    for name in ("token_ids", "window_sizes"):
        assert np.array_equal(found[name], expected[name])
    for name in ("kld", "logprobs", "reference_logprobs"):
        # The served model is the reference; each run has other batches, and float32 sums depend on them.
        assert np.abs(found[name] - expected[name]).max() < 1e-5


def test_a_reference_whose_recording_was_killed_is_completed(first_server, servers, runs, death):
    references = ReferenceDirectory(servers.references("faults"))
    whole = references.open("whole")
    num_before, num_windows = len(death.recorded), whole.manifest.text.num_windows
    assert 5 <= num_before < num_windows, "it was killed while it was recorded"
    said = runs.finish(runs.record("resumed", first_server))
    assert f"recorded        {num_windows} windows, {num_before} of them before" in said
    for path, content in death.recorded.items():
        assert path.read_bytes() == content
    resumed = references.open("resumed")
    assert resumed.recorded() == whole.recorded() == set(range(num_windows))
    for index in range(num_windows):
        (_, found), (_, expected) = resumed.read_shard(index), whole.read_shard(index)
        assert (found - expected).abs().max() < 1e-5


async def test_a_stopping_server_finishes_its_requests_and_refuses_more(first_server):
    refused = []

    async def stop(client: httpx.AsyncClient) -> None:
        os.kill(first_server.pid, signal.SIGTERM)
        while not refused or refused[-1].status_code == 200:
            refused.append(await client.post("/v1/score", json={"prompt": [1, 2, 3]}))

    answers = await answers_of(first_server, 5, stop)
    check_refusal(refused[-1], "the server is shutting down")
    assert 200 in {answer.status_code for answer in answers}
    # If the grace period is too short, the others get a response all the same.
    for answer in answers:
        if answer.status_code != 200:
            check_refusal(answer, "the server is shutting down")
    assert first_server.process.wait(2 * EXIT_SECONDS) == 0
