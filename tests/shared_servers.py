"""Real servers for the tests, each started once in a session, while tests run that need none.

An engine takes half a minute to start, most of it on one core: three processes import vLLM one after another.
`tests/conftest.py` begins the starts when the session begins, one at a time in a thread, in the order in which the
collected tests need the servers. Tests that need none run meanwhile. A test waits for its own server only. A
server that does not come up fails each test that needs it, with its log.
"""

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from local_server import running_server

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
    keeps_references: bool = False
    """In a folder that it shares with the others that do."""


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
        {"VLLM_PLUGINS": "scoremode"},
    ),
    # `scoremode serve` on a real model, with what trainers need: top 100, and vLLM's generate route.
    "server": Server(
        "smollm2",
        (
            *("--served-model-name", "smollm2", "--max-model-len", "2048", *_COMMON, "--enforce-eager"),
            *("--max-logprobs", "256", "--enable-scale-out"),
        ),
        (*_STOCK_BESIDE, "scoremode"),
        keeps_references=True,
    ),
    # Quantized weights and activations, no cache of logprobs, and small bounds.
    "int8_server": Server(
        "int8_smollm2",
        (
            *("--served-model-name", "int8", "--max-model-len", "1024", *_COMMON, "--enforce-eager"),
            *("--score-cache-bytes", "0", "--max-num-queued-reqs", "4", "--max-request-sequences", "64"),
            *_ANY_ORIGIN,
        ),
        keeps_references=True,
    ),
}
"""By the name of the fixture that is the server's URL."""


class Servers:
    """The servers of a session, one start at a time.

    Args:
        folder: Makes an empty folder, for a server's log or for references.
        model: The model that a fixture makes. Called in the thread that calls `begin`, because loading and making
            models changes global state of torch.
    """

    def __init__(self, folder: Callable[[], Path], model: Callable[[str], Path]) -> None:
        self._folder = folder
        self._model = model
        self.references = folder()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="servers")
        self._running: list[ExitStack] = []
        self._urls: dict[str, Future[str]] = {}

    def begin(self, name: str) -> None:
        """Start a server as soon as those before it are up; a second call does nothing."""
        if name not in self._urls:
            self._urls[name] = self._thread.submit(self._start, SERVERS[name], self._model(SERVERS[name].model))

    def url(self, name: str) -> str:
        """Wait until a server is ready.

        Raises:
            ServerError: it did not come up.
        """
        self.begin(name)
        return self._urls[name].result()

    def stop(self) -> None:
        """Stop all of them."""
        self._thread.shutdown(cancel_futures=True)
        with ThreadPoolExecutor() as pool:
            list(pool.map(ExitStack.close, self._running))

    def _start(self, server: Server, model: Path) -> str:
        references = ("--reference-dir", str(self.references)) if server.keeps_references else ()
        self._running.append(ExitStack())
        return self._running[-1].enter_context(
            running_server(
                model,
                *server.flags,
                *references,
                log=self._folder() / "server.log",
                command=server.command,
                environment=server.environment,
            )
        )


def needed(tests: Iterable[pytest.Item]) -> list[str]:
    """Names of the servers that tests ask for, in the order in which they do. Unit tests have fixtures of these names
    too, of their own."""
    in_e2e = (test for test in tests if _E2E in test.path.parents)
    fixtures = dict.fromkeys(name for test in in_e2e for name in getattr(test, "fixturenames", ()))
    return [name for name in fixtures if name in SERVERS]
