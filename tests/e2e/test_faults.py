"""What clients get when an engine dies or a server is stopped under load, and how the server then ends."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from local_server import ServerProcess, server_process
from scoremode_server.references.directory import ReferenceDirectory
from tests.shared_servers import TO_END, Servers
from tests.texts import WIKITEXT

COMPARE = ("kld", "--reference", "whole")
EXIT_SECONDS = 30
"""In which a server must have ended by itself."""


@pytest.fixture(scope="module")
def references(servers: Servers) -> ReferenceDirectory:
    """Of both servers."""
    return ReferenceDirectory(servers.references("faults"))


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


async def answers_of(server: ServerProcess, bodies: list[dict[str, Any]], meanwhile: Any) -> list[httpx.Response]:
    """The answer to each body, all sent at once, with something done once the engine is at work."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits()) as client:
        answers = [asyncio.create_task(client.post("/v1/score", json=body)) for body in bodies]
        while "scoremode_running_sequences 0.0" in (await client.get("/metrics")).text:
            pass
        await meanwhile(client)
        return await asyncio.gather(*answers)


def engine_of(server: ServerProcess) -> psutil.Process:
    processes = psutil.Process(server.pid).children(recursive=True)
    (engine,) = [process for process in processes if "EngineCore" in process.name()]
    return engine


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    return error


class PplClient:
    """Runs of `ppl-client` over the same windows of a text, into files of one folder."""

    TEXT = ("--text-file", str(WIKITEXT), "--max-tokens", "40000", "--context-length", "512", "--stride", "256")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(
        self, name: str, *servers: ServerProcess, command: tuple[str, ...] = TEXT, resume: bool = False
    ) -> "subprocess.Popen[str]":
        output = ["--output", str(self.folder / name), *(["--resume"] if resume else [])]
        return self._start(command, servers, output)

    def record(self, name: str, server: ServerProcess) -> "subprocess.Popen[str]":
        return self._start(("record", *self.TEXT, "--reference", name), (server,), [])

    def _start(
        self, command: tuple[str, ...], servers: tuple[ServerProcess, ...], output: list[str]
    ) -> "subprocess.Popen[str]":
        urls = [part for server in servers for part in ("--url", server.url)]
        whole = [sys.executable, "-m", "scoremode.cli", *command, *urls, *output, "--quiet"]
        return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, run: "subprocess.Popen[str]") -> str:
        """What a run said, when it is done."""
        printed, said = run.communicate(timeout=300)
        assert run.returncode == 0, said
        return said + printed

    def journal(self, name: str) -> Path:
        return self.folder / f"{name}.journal"

    def pause(self, name: str, run: "subprocess.Popen[str]", count: int) -> None:
        """Stop a run for the time being, once so many windows are in its journal."""
        while not self.journal(name).exists() or self.journal(name).read_bytes().count(b"\n") <= count:
            assert run.poll() is None
            time.sleep(0.02)
        run.send_signal(signal.SIGSTOP)

    def windows(self, name: str) -> list[dict[str, Any]]:
        windows: list[dict[str, Any]] = json.loads((self.folder / name).read_text())["windows"]
        return windows

    def check(self, name: str) -> None:
        """A run has the windows of the undisturbed one, and their numbers to a float32's digits."""
        assert len(self.windows(name)) == len(self.windows("whole"))
        for window, expected in zip(self.windows(name), self.windows("whole"), strict=True):
            assert (window["index"], window["num_scored"]) == (expected["index"], expected["num_scored"])
            # Windows share the engine's steps with other ones in each run.
            assert window["nll_sum"] == pytest.approx(expected["nll_sum"], abs=1e-5 * window["num_scored"])


@pytest.fixture(scope="module")
def runs(first_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> PplClient:
    """With one run, one reference and one comparison, all "whole", that nothing disturbed."""
    runs = PplClient(tmp_path_factory.mktemp("runs"))
    runs.finish(runs.start("whole", first_server))
    runs.finish(runs.record("whole", first_server))
    runs.finish(runs.start("whole kld", first_server, command=COMPARE))
    return runs


def test_a_run_whose_client_was_killed_goes_on(first_server: ServerProcess, runs: PplClient):
    killed = runs.start("resumed", first_server)
    runs.pause("resumed", killed, 5)
    killed.kill()
    killed.communicate()
    kept = runs.journal("resumed").read_bytes().splitlines(keepends=True)[1:-1]
    resumed = runs.start("resumed", first_server, resume=True)
    runs.pause("resumed", resumed, len(kept) + 5)
    assert runs.journal("resumed").read_bytes().splitlines(keepends=True)[1 : 1 + len(kept)] == kept
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
    said: dict[str, str]
    """By runs on both servers, when they were done."""
    recorded: dict[Path, bytes]
    """The files of the windows of a reference that it recorded, when it was gone."""


@pytest.fixture(scope="module")
def death(
    first_server: ServerProcess, second_server: ServerProcess, references: ReferenceDirectory, runs: PplClient
) -> Death:
    """Of an engine that scores, compares and records."""
    pair = (first_server, second_server)
    folder = references.root / "resumed" / "windows"
    of_both = {}
    for name, command in (("of two", PplClient.TEXT), ("of two kld", COMPARE)):
        of_both[name] = runs.start(name, *pair, command=command)
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

    answers = asyncio.run(answers_of(second_server, load(10), kill))
    exit_status = second_server.process.wait(EXIT_SECONDS)
    _, left = psutil.wait_procs(family, timeout=EXIT_SECONDS)
    recording.kill()
    recording.communicate()
    recorded = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    said = {name: runs.finish(run) for name, run in of_both.items()}
    return Death(answers, set(health[1:]), exit_status, left, said, recorded)


def test_when_the_engine_dies_requests_get_503_and_the_server_ends(death: Death):
    for answer in death.answers:
        assert answer.status_code == 503
        assert error_of(answer)["message"] == "the engine has died"
        assert int(answer.headers["Retry-After"]) > 0
    assert death.health <= {200, 503}
    assert death.exit_status != 0
    assert not death.left


def test_a_run_on_two_servers_goes_on_with_the_one_that_is_left(
    second_server: ServerProcess, runs: PplClient, death: Death
):
    assert second_server.url in death.said["of two"]
    runs.check("of two")


def test_a_comparison_on_two_servers_goes_on_with_the_one_that_is_left(
    second_server: ServerProcess, runs: PplClient, death: Death
):
    assert second_server.url in death.said["of two kld"]
    found, expected = (load_file(runs.folder / f"{name}.safetensors") for name in ("of two kld", "whole kld"))
    for name in ("token_ids", "window_sizes"):
        assert np.array_equal(found[name], expected[name])
    for name in ("kld", "logprobs", "reference_logprobs"):
        # The served model is the reference; its windows share the engine's steps with other ones in each run.
        assert np.abs(found[name] - expected[name]).max() < 1e-5


def test_a_reference_whose_recording_was_killed_goes_on(
    first_server: ServerProcess, references: ReferenceDirectory, runs: PplClient, death: Death
):
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


async def test_a_server_that_is_stopped_answers_what_it_has_and_refuses_what_is_new(first_server: ServerProcess):
    refused = []

    async def stop(client: httpx.AsyncClient) -> None:
        os.kill(first_server.pid, signal.SIGTERM)
        while not refused or refused[-1].status_code == 200:
            refused.append(await client.post("/v1/score", json={"prompt": [1, 2, 3]}))

    answers = await answers_of(first_server, load(10), stop)
    assert error_of(refused[-1])["message"] == "the server is shutting down"
    assert refused[-1].status_code == 503
    # Where the time of grace is not enough, the rest gets an answer all the same.
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert 200 in {answer.status_code for answer in answers}
    for answer in answers:
        if answer.status_code == 503:
            assert error_of(answer)["message"] == "the server is shutting down"
    assert first_server.process.wait(2 * EXIT_SECONDS) == 0


@contextmanager
def unread_stream(server: ServerProcess) -> Iterator[None]:
    """A stream of so many windows that the server waits until its client reads, which it never does."""
    windows = 60_000
    body = json.dumps({"prompt": [5] * windows, "context_length": 2, "stride": 1, "stream": True}).encode()
    url = httpx.URL(server.url)
    with socket.socket() as client, httpx.Client(base_url=server.url) as http:
        # Otherwise the kernel takes megabytes of events before the server has to wait.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 500)
        client.connect((url.host, url.port))
        headers = f"Host: server\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        client.sendall(f"POST /v1/perplexity HTTP/1.1\r\n{headers}\r\n".encode() + body)
        readings = [0.0]
        while readings[-1] == 0 or len(set(readings[-10:])) > 1:
            time.sleep(0.5)
            metrics = http.get("/metrics").text
            readings.append(float(metrics.split("\nscoremode_scored_tokens_total ")[1].split()[0]))
        assert readings[-1] < windows
        yield


@pytest.mark.slow
async def test_a_stream_that_nobody_reads_and_texts_that_are_tokenized_do_not_hold_up_the_end(
    random_model: Path, tmp_path: Path
):
    text = "as many words as take some seconds " * 120_000
    bodies = {
        "/v1/perplexity": {"prompt": text},
        "/v1/score": {"prompt": ["a few words"] * 60_000},
        "/v1/completions": {"prompt": [text[:1000]] * 1000, "echo": True, "logprobs": 0, "max_tokens": 1},
    }
    flags = TO_END.flags
    with server_process(random_model, *flags, log=tmp_path / "server.log") as server, unread_stream(server):
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            answers = []
            for route, body in bodies.items():
                answers.append(asyncio.create_task(client.post(route, json=body)))
                await asyncio.sleep(1)
            assert not any(answer.done() for answer in answers)
            os.kill(server.pid, signal.SIGTERM)
            for answer in await asyncio.gather(*answers):
                assert answer.status_code == 503
                assert error_of(answer)["message"] == "the server is shutting down"
        assert server.process.wait(EXIT_SECONDS) == 0
