"""The servers of `tests/shared_servers.py` as fixtures: the URL of each, ready for requests, and a client of it."""

from collections.abc import Iterator

import pytest

from scoremode import ScoreClient
from tests.shared_servers import API_KEY, Servers


@pytest.fixture(scope="session")
def server(servers: Servers) -> str:
    """`scoremode serve` on a tiny random model, context 2,048, top 256, with vLLM's own routes under /stock."""
    return servers.url("server")


@pytest.fixture(scope="session")
def smollm2_server(servers: Servers) -> str:
    """`scoremode serve` on SmolLM2-135M-Instruct in float32: context 2,048, top 256, vLLM's own routes under /stock."""
    return servers.url("smollm2_server")


@pytest.fixture(scope="session")
def plugin_server(servers: Servers) -> str:
    """vLLM's own server with VLLM_PLUGINS=scoremode and an API key, with vLLM's completions under /stock.

    A random model, context 128, whose tokenizer adds BOS.
    """
    return servers.url("plugin_server")


@pytest.fixture(scope="session")
def int8_server(servers: Servers) -> str:
    """`scoremode serve` on the tiny model as INT8 W8A8, with the cache of logprobs off, vLLM's routes for development,
    and a worker by itself."""
    return servers.url("int8_server")


@pytest.fixture(scope="session")
def disturbed_server(servers: Servers) -> str:
    """`scoremode serve` on the tiny model with noise on its weights, whose generation_config.json has other defaults of
    all sampling parameters, and a worker by itself."""
    return servers.url("disturbed_server")


@pytest.fixture(scope="session")
def second_server(servers: Servers) -> str:
    """`scoremode serve` on the model of `server`, with a worker by itself, for the test that kills its engine."""
    return servers.url("second_server")


@pytest.fixture(scope="session")
def llama_2_server(servers: Servers) -> str:
    """`scoremode serve` on a random model with a tokenizer as Llama 2's, context 2,050, with TRL's flags for teachers
    (processed logprobs, any number of them), vLLM's own routes under /stock, and a worker by itself."""
    return servers.url("llama_2_server")


@pytest.fixture(scope="session")
def mixtral_server(servers: Servers) -> str:
    """`scoremode serve` on a random mixture of experts, whose steps hold 256 tokens."""
    return servers.url("mixtral_server")


@pytest.fixture(scope="session")
def rounded_router_server(servers: Servers) -> str:
    """`scoremode serve` on that mixture with the router of layer 1 in 4 bits."""
    return servers.url("rounded_router_server")


@pytest.fixture(scope="session")
def client(server: str) -> Iterator[ScoreClient]:
    with ScoreClient(server, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def smollm2_client(smollm2_server: str) -> Iterator[ScoreClient]:
    with ScoreClient(smollm2_server, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def bos_client(plugin_server: str) -> Iterator[ScoreClient]:
    with ScoreClient(plugin_server, api_key=API_KEY, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def int8_client(int8_server: str) -> Iterator[ScoreClient]:
    with ScoreClient(int8_server, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def disturbed_client(disturbed_server: str) -> Iterator[ScoreClient]:
    with ScoreClient(disturbed_server, timeout=300) as client:
        yield client
