"""How an engine's time is shared among references: real API servers' and workers' code, in simulated time. A stand-in
computes one window after another.
"""

import asyncio
import selectors
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scoremode_server.engine.admission import Admission, EngineSize, cancel_and_wait
from scoremode_server.engine.sequence import EnginePass, ScoreSettings
from scoremode_server.errors import BusyError, ConflictError, UnavailableError
from scoremode_server.references.comparer import Comparer, MarkedWindow
from scoremode_server.references.exchange import WorkerFiles
from scoremode_server.references.files.directory import ReferenceDirectory
from scoremode_server.references.service import References
from scoremode_server.references.worker import reads
from scoremode_server.references.worker.heads import LeasedHead
from scoremode_server.references.worker.lease import FIRST_SECONDS, LEASE_SECONDS
from scoremode_server.references.worker.orders import SINK
from scoremode_server.references.worker.reads import FileReads
from scoremode_server.references.worker.sinks import WorkerWindows
from scoremode_server.rows import Rows
from tests.unit.server.references.reference_engine import CPU, HEAD_FORMAT, HeadInMemory
from tests.unit.server.references.reference_setup import HIDDEN, MODEL, TEXT, manifest

WINDOW_SECONDS = 0.05
"""The time that the stand-in takes for a window."""
AT_ONCE = 10
"""Windows in the engine at once, for each API server: half a second."""
CALL_SECONDS = 0.05
"""The time that a call of the workers takes, which waits for a step's end."""
SECONDS = 150.0
"""Simulated, of each test."""


class SimulatedSelector(selectors.DefaultSelector):
    """Moves the clock where an event loop would wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing would ever happen"
            self.now += timeout
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = SimulatedSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class ThreadsAtOnce:
    """Threads that are through at once. Of a reference in `num_readable`, they read so many files, then one hangs. Of
    one in `seconds`, each file takes this time."""

    def __init__(self) -> None:
        self.num_readable: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def submit(self, name: str, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.num_readable[name] = self.num_readable.get(name, sys.maxsize) - 1
        if self.num_readable[name] >= 0:
            try:
                self._end_later(self.seconds.get(name, 0.0), future, call())
            except Exception as error:
                future.set_exception(error)
        return future

    def _end_later(self, seconds: float, future: Future[Any], result: Any) -> None:
        if seconds:
            asyncio.get_running_loop().call_later(seconds, lambda: future.cancelled() or future.set_result(result))
        else:
            future.set_result(result)


class Engine:
    """An engine's workers, a stand-in for its steps, and API servers.

    Attributes:
        done: the reference and the time of each window that was computed.
        inside: windows that are in the engine, by reference.
    """

    errored = False

    def __init__(self, root: Path, num_servers: int) -> None:
        self.windows = WorkerWindows(ReferenceDirectory(root))
        self.threads = ThreadsAtOnce()
        self.windows.reads = FileReads(self.threads)  # type: ignore[arg-type]
        self.windows.leased = LeasedHead(0, CPU, HeadInMemory)  # type: ignore[arg-type]
        self.windows.leased._threads = self.threads  # type: ignore[assignment]
        parallel = SimpleNamespace(data_parallel_size=1, local_engines_only=False, data_parallel_index=0)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.engine_core = SimpleNamespace(call_utility_all_async=self._call)
        self.done: list[tuple[str, float]] = []
        self.inside: Counter[str] = Counter()
        self._step = asyncio.Lock()
        self.servers = [self._server() for _ in range(num_servers)]

    def _server(self) -> Comparer:
        size = EngineSize(tokens=AT_ONCE * 8, sequences=2 * AT_ONCE, max_scoring_tokens=10**6)
        admission = Admission(size, nothing, lambda *counts: None)
        engine = SimpleNamespace(window_rows=partial(self._compute, admission))
        scorer = SimpleNamespace(engine=engine, pacer=SimpleNamespace(wait=nothing))
        core: Any = SimpleNamespace(scorer=scorer, admission=admission)
        references = References(self.windows.root, MODEL, "reference", self.threads)  # type: ignore[arg-type]
        return Comparer(references, core, WorkerFiles(self, admission))  # type: ignore[arg-type]

    async def _call(self, call: str, method: str, _: Any, arguments: Any, __: Any) -> list[list[Any]]:
        await asyncio.sleep(CALL_SECONDS)
        return [[self.windows.exchange(*arguments[0][0])]]

    async def _compute(self, admission: Admission, engine_pass: EnginePass) -> Rows:
        queue = engine_pass.sequence.settings.queue
        async with admission.slot(queue, engine_pass.request_id, len(engine_pass.token_ids)):
            with engine_pass.inside():
                sink = self.windows.begin(engine_pass.spec, engine_pass.spec.sinks[SINK], writes=False)
                name = sink.mark.reference  # type: ignore[attr-defined]
                self.inside[name] += 1
                async with self._step:
                    await asyncio.sleep(WINDOW_SECONDS)
                # Its head and its states are there, and no other reference's windows.
                assert sink.is_ready(0, local=False)
                assert self.inside.total() == self.inside[name]
                self.inside[name] -= 1
        self.done.append((name, asyncio.get_running_loop().time()))
        return Rows.empty(8, engine_pass.spec.columns)

    async def compare(self, name: str, server: int, num_windows: int) -> None:
        """A request to one of the API servers."""
        comparer = self.servers[server % len(self.servers)]
        reference = self.windows.root.open(name)
        async with comparer.files._admission.request() as queue:
            settings = ScoreSettings(request_id="request", queue=queue, options={})
            windows = (MarkedWindow.begin("compare", reference, 0, settings) for _ in range(num_windows))
            async with aclosing(comparer.compare(reference, windows, settings)) as in_order:
                async for _ in in_order:
                    pass


async def nothing(*arguments: Any) -> None:
    """As if it were done."""


@dataclass(frozen=True)
class Client:
    """Compares with a reference again and again; comes back `retry` seconds after it was refused."""

    reference: str
    server: int
    num_windows: int
    retry: float = 1.0
    pause: float = 0.02
    leaves_after: float | None = None
    """Seconds after which it no longer waits for an answer, and sends the request again after `retry`."""

    async def run(self, engine: Engine) -> None:
        while True:
            try:
                async with asyncio.timeout(self.leaves_after):
                    await engine.compare(self.reference, self.server, self.num_windows)
                await asyncio.sleep(self.pause)
            except (BusyError, ConflictError, UnavailableError, TimeoutError):
                await asyncio.sleep(self.retry)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with eight references."""
    root = tmp_path_factory.mktemp("references")
    for number in range(8):
        reference = ReferenceDirectory(root).create(str(number), manifest(str(number), HEAD_FORMAT), TEXT)
        reference.write_head(torch.zeros(HEAD_FORMAT.vocab_size, HIDDEN), None)
        reference.write_shard(0, torch.zeros(8, HIDDEN), torch.zeros(8))
    return root


def simulate(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    clients: list[Client],
    read_seconds: dict[str, float] | None = None,
    **num_readable: int,
) -> Engine:
    """Let clients compare, with as many API servers as they name."""

    async def run() -> Engine:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(reads, "time", SimpleNamespace(monotonic=loop.time))
        engine = Engine(root, 1 + max(client.server for client in clients))
        engine.threads.num_readable, engine.threads.seconds = num_readable, read_seconds or {}
        tasks = [asyncio.create_task(client.run(engine)) for client in clients]
        ended, _ = await asyncio.wait(tasks, timeout=SECONDS)
        await cancel_and_wait(*tasks)
        assert not ended
        return engine

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run())


def shares(engine: Engine, num_references: int) -> list[float]:
    """Windows of each reference, as a multiple of an equal share."""
    counts = Counter(name for name, _ in engine.done)
    return [counts[str(number)] * num_references / counts.total() for number in range(num_references)]


def longest_wait(engine: Engine, num_references: int) -> float:
    """The longest time in which some reference had no window computed."""
    of_references = [
        [0.0, *(time for name, time in engine.done if name == str(number)), SECONDS] for number in range(num_references)
    ]
    return max(after - before for times in of_references for before, after in pairwise(times))


def clients_of(num_references: int, num_servers: int, **settings: Any) -> list[Client]:
    """Two clients of each reference, at the API servers by turns."""
    return [Client(str(each % num_references), each % num_servers, **settings) for each in range(2 * num_references)]


@pytest.mark.parametrize(
    ("num_references", "num_servers", "num_windows"),
    [(2, 1, 1), (2, 4, 40), (3, 2, 40), (3, 4, 1), (8, 1, 40), (8, 4, 1)],
)
def test_each_reference_gets_its_share(
    root: Path, monkeypatch: pytest.MonkeyPatch, num_references: int, num_servers: int, num_windows: int
):
    engine = simulate(monkeypatch, root, clients_of(num_references, num_servers, num_windows=num_windows))
    assert min(shares(engine, num_references)) > 0.5
    assert longest_wait(engine, num_references) <= 3 * LEASE_SECONDS


@pytest.mark.parametrize("num_servers", [1, 4])
def test_calls_that_take_long_leave_each_reference_its_share(
    root: Path, monkeypatch: pytest.MonkeyPatch, num_servers: int
):
    """A call waits for a step's end, which may take seconds: three calls pass until a window can enter the engine."""
    monkeypatch.setattr(sys.modules[__name__], "CALL_SECONDS", 3.0)
    engine = simulate(monkeypatch, root, clients_of(2, num_servers, num_windows=40))
    assert min(shares(engine, 2)) > 0.5
    assert longest_wait(engine, 2) <= 3 * LEASE_SECONDS


def test_files_that_are_read_for_longer_than_a_lease_are_compared(root: Path, monkeypatch: pytest.MonkeyPatch):
    """A window that was read in one lease waits for the next, so it takes two."""
    clients = [*clients_of(2, 1, num_windows=40), Client("2", 0, 1)]
    engine = simulate(monkeypatch, root, clients, {"2": FIRST_SECONDS + 1})
    assert longest_wait(engine, 3) <= 2 * 3 * LEASE_SECONDS


def test_a_head_that_was_not_placed_once_is_placed_later(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Although no other reference is compared meanwhile."""
    place, num_failures = HeadInMemory.place, iter(range(2))

    def place_later(head: HeadInMemory, *of: Any) -> None:
        if next(num_failures, None) is not None:
            raise RuntimeError("CUDA out of memory")
        place(head, *of)

    monkeypatch.setattr(HeadInMemory, "place", place_later)
    assert simulate(monkeypatch, root, [Client("0", 0, 1)]).done


def test_a_lone_client_calls_the_workers_twice_for_a_window(root: Path, monkeypatch: pytest.MonkeyPatch):
    """To have it read, and to learn that it was."""
    engine = simulate(monkeypatch, root, [Client("0", 0, 1)])
    assert len(engine.done) > SECONDS / (2 * CALL_SECONDS + WINDOW_SECONDS + 0.05)


@pytest.mark.parametrize("retry", [0.5, 2.5, 10.0, 30.0])
def test_a_client_that_does_not_wait_finds_its_place_again(root: Path, monkeypatch: pytest.MonkeyPatch, retry: float):
    """It gives up after a second and comes back later, next to two references whose clients always wait."""
    waiting = clients_of(2, 2, num_windows=40)
    engine = simulate(monkeypatch, root, [*waiting, Client("2", 0, 1, retry=retry, leaves_after=1.5)])
    times = [0.0, *(time for name, time in engine.done if name == "2"), SECONDS]
    assert max(after - before for before, after in pairwise(times)) <= 3 * LEASE_SECONDS + 2 * retry
    assert min(shares(engine, 3)[:2]) > 0.5


@pytest.mark.parametrize("num_readable", [0, 1, 50])
def test_a_file_that_hangs_takes_nothing_from_others(root: Path, monkeypatch: pytest.MonkeyPatch, num_readable: int):
    """The LM head, the first window, or a later one."""
    engine = simulate(monkeypatch, root, clients_of(3, 2, num_windows=40), **{"0": num_readable})
    _, *others = shares(engine, 3)
    assert min(others) > 1
    times = [0.0, *(time for name, time in engine.done if name != "0"), SECONDS]
    # A lease for whose first window the engine waits in vain.
    assert max(after - before for before, after in pairwise(times)) < 2 * FIRST_SECONDS
