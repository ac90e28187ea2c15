"""The servers of `tests/shared_servers.py` as fixtures: the URL of each, ready for requests, and a client of it."""

from collections.abc import Iterator
from itertools import chain

import pytest

from scoremode import ScoreClient
from tests.shared_servers import API_KEY, SERVERS_OF_A_MODULE, Servers, needed


@pytest.fixture(scope="module", autouse=True)
def _servers_of_a_module(request: pytest.FixtureRequest, servers: Servers) -> Iterator[None]:
    """Those that the next two alone need begin to start while the tests of this one run; its own end with it."""
    tests = request.session.items
    modules = list(dict.fromkeys(test.path for test in tests))
    this_and_two_more = modules[modules.index(request.path) :][:3]
    own, *of_next = (
        needed((test for test in tests if test.path == path), SERVERS_OF_A_MODULE) for path in this_and_two_more
    )
    for name in chain(own, *of_next):
        servers.begin(name)
    yield
    for name in own:
        servers.end(name)


@pytest.fixture(scope="session")
def server(servers: Servers) -> str:
    """`scoremode serve` on SmolLM2-135M in float32, context 2,048, top 100, with vLLM's completions and generate route
    beside ours."""
    return servers.url("server")


@pytest.fixture(scope="session")
def plugin_server(servers: Servers) -> str:
    """vLLM's own server with VLLM_PLUGINS=scoremode and an API key, with vLLM's completions beside ours.

    A random model, context 128, whose tokenizer adds BOS.
    """
    return servers.url("plugin_server")


@pytest.fixture(scope="session")
def int8_server(servers: Servers) -> str:
    """`scoremode serve` on the INT8 W8A8 version of SmolLM2-135M, with the cache of logprobs off."""
    return servers.url("int8_server")


@pytest.fixture(scope="session")
def client(server: str) -> Iterator[ScoreClient]:
    with ScoreClient(server, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def bos_client(plugin_server: str) -> Iterator[ScoreClient]:
    with ScoreClient(plugin_server, api_key=API_KEY, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def int8_client(int8_server: str) -> Iterator[ScoreClient]:
    with ScoreClient(int8_server, timeout=300) as client:
        yield client
