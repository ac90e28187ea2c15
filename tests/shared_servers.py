"""Real servers for the tests, each started once in a worker of pytest-xdist and shared by its tests.

A server takes twenty seconds to start, most of it on one core. Servers form groups, and all tests of a group run in one
worker, one after another: the first that asks for a server starts the whole group, two at a time, and the group ends
with the last. A server that does not come up fails each test that needs it, with its log.
"""

import os
import sys
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from local_server import ServerProcess, server_process
from tests import example_sink

API_KEY = "secret"
OTHER_API_KEY = "another secret"
BLOCK_SIZE = 32
"""Smaller than vLLM's default, so that short prompts share some blocks."""

# A model that runs eagerly starts in half the time. What vLLM compiles by default is tested on `plugin_server`.
_COMMON = ("--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE))
# A GiB of KV cache, for each of many servers, is more than such small models can fill, and all of it is written to.
_FEW_BLOCKS = ("--num-gpu-blocks-override", "2048")
# Top 256, and vLLM's generate route.
_FOR_TRAINERS = ("--max-model-len", "2048", "--max-logprobs", "256", "--enable-scale-out")
# A page of another server may ask for scores.
_ANY_ORIGIN = ("--allowed-origins", '["*"]')
_E2E = Path(__file__).with_name("e2e")
_WITH_STOCK_ROUTES = (sys.executable, str(_E2E / "with_stock_routes.py"))


@dataclass(frozen=True)
class Server:
    """How a server is started."""

    group: str
    model: str
    """The fixture that makes its model."""
    flags: tuple[str, ...]
    command: tuple[str, ...] = ()
    """The command before the model; `scoremode serve` if empty."""
    environment: dict[str, str] = field(default_factory=dict)
    references: str = ""
    """The name of the folder of its references, which it shares with others that name it; none if empty."""


STARTS_AT_ONCE = 2
"""A start takes one core."""

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""glibc's settings for an engine that gives no memory back: faster than `scoremode serve` (docs/benchmarks.md)."""
A_WORKER_BY_ITSELF = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The default of vLLM's CPU platform, and of a server on several GPUs; see `CPU_ENVIRONMENT`."""

SMALL = ("--served-model-name", "random", "--max-model-len", "1024", *_COMMON, *_FEW_BLOCKS, "--enforce-eager")
"""Flags of servers that a command of `ppl-client` starts."""

TINY = Server(
    "tiny",
    "random_model",
    ("--served-model-name", "tiny", *_FOR_TRAINERS, *_COMMON, *_FEW_BLOCKS, "--enforce-eager"),
    (*_WITH_STOCK_ROUTES, "scoremode"),
    references="shared",
)

MIXTRAL = Server(
    "tiny",
    "mixtral_model",
    (
        *("--served-model-name", "mixtral", "--max-model-len", "512", *_COMMON, "--enforce-eager"),
        *("--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "256"),
    ),
    references="experts",
)

SERVERS = {
    "plugin_server": Server(
        "tiny",
        "byte_fallback_model",
        (
            *("--served-model-name", "random", "--max-model-len", "128", *_COMMON, *_FEW_BLOCKS),
            *("--api-key", API_KEY, OTHER_API_KEY, "--enable-tokenizer-info-endpoint", *_ANY_ORIGIN),
        ),
        (*_WITH_STOCK_ROUTES, "vllm", "--model"),
        {"VLLM_PLUGINS": "scoremode"},
    ),
    "server": TINY,
    # As TRL starts its teachers.
    "llama_2_server": Server(
        "tiny",
        "llama_2_model",
        (
            *("--served-model-name", "llama-2", "--max-model-len", "2050", *_COMMON, *_FEW_BLOCKS, "--enforce-eager"),
            *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--enable-scale-out"),
        ),
        (*_WITH_STOCK_ROUTES, "scoremode"),
        environment=A_WORKER_BY_ITSELF,
        references="shared",
    ),
    # Real weights, and so slow that what is at work can be seen and left.
    "smollm2_server": Server(
        "real",
        "smollm2",
        (
            *("--served-model-name", "smollm2", *_FOR_TRAINERS, *_COMMON, "--enforce-eager"),
            # Six sequences of full length, half of a GiB.
            *("--num-gpu-blocks-override", "384"),
        ),
        (*_WITH_STOCK_ROUTES, "scoremode"),
        references="smollm2",
    ),
    "int8_server": Server(
        "tiny",
        "int8_random_model",
        (
            *("--served-model-name", "int8", "--max-model-len", "1024", *_COMMON, *_FEW_BLOCKS, "--enforce-eager"),
            *("--score-cache-bytes", "0", *_ANY_ORIGIN),
        ),
        # One of `tests/e2e/test_faults.py` calls a method in its worker.
        environment=A_WORKER_BY_ITSELF | {"VLLM_SERVER_DEV_MODE": "1"},
        references="shared",
    ),
    "disturbed_server": Server(
        "tiny",
        "disturbed_model",
        ("--served-model-name", "disturbed", "--max-model-len", "2048", *_COMMON, *_FEW_BLOCKS, "--enforce-eager"),
        environment=A_WORKER_BY_ITSELF,
        references="shared",
    ),
    "mixtral_server": MIXTRAL,
    "rounded_router_server": replace(MIXTRAL, model="rounded_router_model"),
    # A run that uses this one and `server` resumes with `server` alone when the engine of this one is killed.
    "second_server": replace(TINY, environment=A_WORKER_BY_ITSELF),
}
"""Servers by the name of the fixture that has their URL."""


class Servers:
    """The servers of a worker, one group at a time.

    Args:
        folder: Makes an empty folder, for a server's log or for references.
        model: The model that a fixture makes. Called in the thread that asks for a server, because loading and making
            models changes global state of torch.
        needed: The servers that some test needs; the others of a group are not started.
    """

    def __init__(self, folder: Callable[[], Path], model: Callable[[str], Path], needed: Set[str]) -> None:
        self._folder = folder
        self._model = model
        self._needed = needed
        # Tests change the process's own while servers are started.
        self._inherited = dict(os.environ)
        self._references: dict[str, Path] = {}
        # Packages with sinks are found as installed ones are.
        paths = str(example_sink.install(folder())), os.environ.get("PYTHONPATH")
        self.python_path = os.pathsep.join(filter(None, paths))
        self._group = ""
        self._starts = ThreadPoolExecutor(STARTS_AT_ONCE, thread_name_prefix="starts")
        self._running: list[ExitStack] = []
        self._processes: dict[str, Future[ServerProcess]] = {}

    def process(self, name: str) -> ServerProcess:
        """Wait until a server is ready.

        Raises:
            ServerError: it did not come up.
        """
        if SERVERS[name].group != self._group:
            self.stop()
            self._start(SERVERS[name].group)
        return self._processes[name].result()

    def url(self, name: str) -> str:
        """The address of a server, once it is ready; raises as `process` does."""
        return self.process(name).url

    def references(self, name: str) -> Path:
        """A folder that servers share."""
        if name not in self._references:
            self._references[name] = self._folder()
        return self._references[name]

    def stop(self) -> None:
        """Kill all of them, which takes no time. A test stops one in the usual way (`tests/e2e/test_faults.py`)."""
        for start in self._processes.values():
            start.cancel()
        wait(self._processes.values())
        for start in self._processes.values():
            if not start.cancelled() and start.exception() is None:
                start.result().process.kill()
        for running in self._running:
            running.close()
        self._running.clear()
        self._processes.clear()
        self._group = ""

    def _start(self, group: str) -> None:
        self._group = group
        for name, server in SERVERS.items():
            if server.group == group and name in self._needed:
                self._running.append(ExitStack())
                self._processes[name] = self._starts.submit(self._running[-1].enter_context, self._command(server))

    def _command(self, server: Server) -> AbstractContextManager[ServerProcess]:
        """The server, to be started."""
        references = ("--reference-dir", str(self.references(server.references))) if server.references else ()
        return server_process(
            self._model(server.model),
            *server.flags,
            *references,
            log=self._folder() / "server.log",
            command=server.command,
            environment=KEEP_MEMORY | {"PYTHONPATH": self.python_path} | server.environment,
            inherited=self._inherited,
        )
