"""Real servers, one for each model, shared by every test of a session: an engine takes about a minute to start."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_server import running_server
from scoremode import ScoreClient

# Small blocks, so that prompts of tests share some.
SMOLLM2_FLAGS = (
    *("--served-model-name", "smollm2", "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--block-size", "32"),
)
STOCK_BESIDE = (sys.executable, str(Path(__file__).with_name("stock_beside.py")))


def logs(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("server") / "server.log"


@pytest.fixture(scope="session")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`scoremode serve` on SmolLM2-135M in float32, context 2,048, with vLLM's completions beside ours."""
    with running_server(smollm2, *SMOLLM2_FLAGS, log=logs(tmp_path_factory), command=STOCK_BESIDE) as url:
        yield url


@pytest.fixture(scope="session")
def byte_fallback_server(byte_fallback_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A random model, context 128, with vLLM's completions beside ours."""
    flags = ("--served-model-name", "fallback", "--max-model-len", "128", "--max-num-seqs", "8", "--block-size", "32")
    with running_server(byte_fallback_model, *flags, log=logs(tmp_path_factory), command=STOCK_BESIDE) as url:
        yield url


@pytest.fixture(scope="session")
def client(server: str) -> Iterator[ScoreClient]:
    with ScoreClient(server, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def int8_client(int8_smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScoreClient]:
    """`scoremode serve` on the INT8 W8A8 version of SmolLM2-135M."""
    flags = ("--served-model-name", "int8", "--max-model-len", "1024", "--max-num-seqs", "8")
    with (
        running_server(int8_smollm2, *flags, log=logs(tmp_path_factory)) as url,
        ScoreClient(url, timeout=300) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def plugin_server(random_bos_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's own server with VLLM_PLUGINS=scoremode, behind an API key, on a model whose tokenizer adds BOS."""
    stock = (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model")
    names = ("--served-model-name", "random", "--api-key", "secret", "--enable-tokenizer-info-endpoint")
    flags = (*names, "--max-model-len", "128", "--max-num-seqs", "8")
    environment = {"VLLM_PLUGINS": "scoremode"}
    log = logs(tmp_path_factory)
    with running_server(random_bos_model, *flags, log=log, command=stock, environment=environment) as url:
        yield url


@pytest.fixture(scope="session")
def bos_client(plugin_server: str) -> Iterator[ScoreClient]:
    with ScoreClient(plugin_server, api_key="secret", timeout=300) as client:
        yield client
