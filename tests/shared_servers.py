"""Real servers for the tests, each started once in a session, while tests run that do not need it yet.

A server takes half a minute to start, most of it on one core: two or three processes import vLLM one after another.
`tests/conftest.py` begins the starts when the session begins, two at a time in threads, in the order in which the
collected tests need the servers. Tests that need none run meanwhile. A test waits for its own server only. A
server that does not come up fails each test that needs it, with its log.

Servers of one module alone begin to start with the tests of the second module before, and are stopped with their own:
memory is short for all of them at once.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from local_server import ServerProcess, server_process

API_KEY = "secret"
BLOCK_SIZE = 32
"""Smaller than vLLM's default, so that short prompts share some blocks."""

# A model that runs eagerly starts in half the time. What vLLM compiles by default is tested on `plugin_server`.
_COMMON = ("--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE))
# A page of another server may ask for scores.
_ANY_ORIGIN = ("--allowed-origins", '["*"]')
_E2E = Path(__file__).with_name("e2e")
_STOCK_BESIDE = (sys.executable, str(_E2E / "stock_beside.py"))


@dataclass(frozen=True)
class Server:
    """How a server is started."""

    model: str
    """The fixture that makes its model."""
    flags: tuple[str, ...]
    command: tuple[str, ...] = ()
    """What stands before the model, `scoremode serve` if empty."""
    environment: dict[str, str] = field(default_factory=dict)
    references: str = ""
    """The name of the folder of its references, which it shares with others that name it; none if empty."""


STARTS_AT_ONCE = 2
"""A start takes one core."""

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""glibc's settings for an engine that gives no memory back. With those of `scoremode serve`, which takes pages from the
kernel anew for each step's logits, it has two thirds of the speed (docs/benchmarks.md)."""
A_WORKER_BY_ITSELF = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""As vLLM's CPU platform has it by default, and a server on several GPUs; see `CPU_ENVIRONMENT`."""

SERVERS = {
    # vLLM's own server with the plugin and an API key, compiled, on a tokenizer of SentencePiece's kind with BOS.
    "plugin_server": Server(
        "byte_fallback_model",
        (
            *("--served-model-name", "random", "--max-model-len", "128", *_COMMON),
            *("--api-key", API_KEY, "--enable-tokenizer-info-endpoint", *_ANY_ORIGIN),
            # Of its tokens a GiB holds a million.
            *("--num-gpu-blocks-override", "2048"),
        ),
        (*_STOCK_BESIDE, "vllm", "--model"),
        {"VLLM_PLUGINS": "scoremode", **A_WORKER_BY_ITSELF},
    ),
    # `scoremode serve` on a real model, with what trainers need: top 100, and vLLM's generate route.
    "server": Server(
        "smollm2",
        (
            *("--served-model-name", "smollm2", "--max-model-len", "2048", *_COMMON, "--enforce-eager"),
            *("--max-logprobs", "256", "--enable-scale-out"),
        ),
        (*_STOCK_BESIDE, "scoremode"),
        references="shared",
    ),
    # Quantized weights and activations, no cache of logprobs, and small bounds.
    "int8_server": Server(
        "int8_smollm2",
        (
            *("--served-model-name", "int8", "--max-model-len", "1024", *_COMMON, "--enforce-eager"),
            *("--score-cache-bytes", "0", "--max-num-queued-reqs", "4", "--max-request-sequences", "64"),
            *_ANY_ORIGIN,
        ),
        references="shared",
    ),
}
"""By the name of the fixture that is the server's URL."""

_SMALL = ("--max-num-seqs", "8", "--enforce-eager")
_TO_END = Server(
    "random_model",
    (
        *("--served-model-name", "random", "--max-model-len", "1024", *_SMALL, "--block-size", "32"),
        # A GiB of KV cache, for each of two, is more than such a small model can fill.
        *("--num-gpu-blocks-override", "2048"),
    ),
    environment=A_WORKER_BY_ITSELF,
    references="faults",
)

SERVERS_OF_A_MODULE = {
    # Two of one model: tests kill the second, then stop the first.
    "first_server": _TO_END,
    "second_server": _TO_END,
    "rounded_server": Server("rounded_smollm2", ("--max-model-len", "1024", *_SMALL), references="shared"),
    # Of another model than the sweep itself serves, with the sweep's references.
    "server_by_hand": Server(
        "disturbed_model",
        ("--max-model-len", "256", *_SMALL, "--num-gpu-blocks-override", "1024"),
        references="sweep",
    ),
}
"""The same of those that one module needs, stopped when it ends."""


class Servers:
    """The servers of a session, two starts at a time.

    Args:
        folder: Makes an empty folder, for a server's log or for references.
        model: The model that a fixture makes. Called in the thread that calls `begin`, because loading and making
            models changes global state of torch.
    """

    def __init__(self, folder: Callable[[], Path], model: Callable[[str], Path]) -> None:
        self._folder = folder
        self._model = model
        # Tests change the process's own while servers are started.
        self._inherited = dict(os.environ)
        self._references: dict[str, Path] = {}
        self._starts = ThreadPoolExecutor(max_workers=STARTS_AT_ONCE, thread_name_prefix="starts")
        self._ends = ThreadPoolExecutor(thread_name_prefix="ends")
        self._running: dict[str, ExitStack] = {}
        self._processes: dict[str, Future[ServerProcess]] = {}
        self._ended: dict[str, Future[None]] = {}

    def begin(self, name: str) -> None:
        """Start a server as soon as all but one of those before it are up; a second call does nothing."""
        if name not in self._processes:
            server = (SERVERS | SERVERS_OF_A_MODULE)[name]
            self._running[name] = ExitStack()
            command = self._command(server)
            self._processes[name] = self._starts.submit(self._running[name].enter_context, command)

    def process(self, name: str) -> ServerProcess:
        """Wait until a server is ready.

        Raises:
            ServerError: it did not come up.
        """
        self.begin(name)
        return self._processes[name].result()

    def url(self, name: str) -> str:
        """Of a server, once it is ready; raises as `process` does."""
        return self.process(name).url

    def references(self, name: str) -> Path:
        """A folder that servers share."""
        if name not in self._references:
            self._references[name] = self._folder()
        return self._references[name]

    def end(self, name: str) -> None:
        """Stop a server while tests go on."""
        if name in self._processes and name not in self._ended:
            self._ended[name] = self._ends.submit(self._end, name)

    def stop(self) -> None:
        """Stop all of them."""
        self._starts.shutdown(cancel_futures=True)
        for name in self._processes:
            self.end(name)
        for ended in self._ended.values():
            ended.result()
        self._ends.shutdown()

    def _command(self, server: Server) -> AbstractContextManager[ServerProcess]:
        """The server, to be started."""
        references = ("--reference-dir", str(self.references(server.references))) if server.references else ()
        return server_process(
            self._model(server.model),
            *server.flags,
            *references,
            log=self._folder() / "server.log",
            command=server.command,
            environment=KEEP_MEMORY | server.environment,
            inherited=self._inherited,
        )

    def _end(self, name: str) -> None:
        started = self._processes[name]
        if not started.cancel():
            wait([started])
        self._running[name].close()


def needed(tests: Iterable[pytest.Item], among: Mapping[str, Server] = SERVERS) -> list[str]:
    """Names of the servers that tests ask for, in the order in which they do. Unit tests have fixtures of these names
    too, of their own."""
    in_e2e = (test for test in tests if _E2E in test.path.parents)
    fixtures = dict.fromkeys(name for test in in_e2e for name in getattr(test, "fixturenames", ()))
    return [name for name in fixtures if name in among]
