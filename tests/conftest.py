"""Models, texts and servers that tests share, made once a session, and a browser.

The real model stays in the demo cache. What makes models is imported where one is made: it takes seven
seconds, and every process of a test run reads this file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from demo_model import demo_model
from tests.shared_servers import SERVERS, Servers
from tests.texts import WIKITEXT

pytest_plugins = ["tests.neighbours"]

UNIT = Path(__file__).with_name("unit")

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Tests that share servers or an engine run in one worker, one after another."""
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
        if not item.path.is_relative_to(UNIT):
            item.add_marker(pytest.mark.processes)
    items.sort(key=lambda item: (groups[item], item.get_closest_marker("ends_servers") is not None))
    # Only now do markers select tests, and pytest-xdist reads the groups.
    return (yield)


def _group(item: pytest.Item) -> str:
    if item.path.is_relative_to(UNIT.with_name("engine")):
        return "engine"
    needed = {SERVERS[name].group for name in getattr(item, "fixturenames", ()) if name in SERVERS}
    if not item.path.is_relative_to(UNIT.with_name("e2e")) or not needed:
        return ""
    (group,) = needed
    return group


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of this worker."""
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ()) if name in SERVERS}
    servers = Servers(lambda: tmp_path_factory.mktemp("server"), request.getfixturevalue, needed)
    request.config.stash[RUNNING] = servers
    try:
        yield servers
    finally:
        servers.stop()


RUNNING = pytest.StashKey[Servers]()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Servers end with the last test of their group: what comes next needs their memory."""
    if nextitem is not None and RUNNING in item.config.stash and _group(nextitem) != _group(item):
        item.config.stash[RUNNING].stop()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, dequantized from Q4_1 to bfloat16."""
    return demo_model()


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """The module that makes models."""
    from tests import models

    return models


@pytest.fixture(scope="session")
def random_model(models, tmp_path_factory) -> Path:
    """Two random blocks, 1,024 tokens of vocabulary, 2,048 positions; its tokenizer adds no BOS."""
    return models.random_llama(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def disturbed_model(models, random_model: Path, tmp_path_factory) -> Path:
    """`random_model` with noise on its weights, and defaults of sampling that change what it generates."""
    path = models.disturbed(random_model, tmp_path_factory.mktemp("models") / "disturbed", 0.05)
    (path / "generation_config.json").write_text(json.dumps(models.SAMPLING_DEFAULTS))
    return path


@pytest.fixture(scope="session")
def byte_fallback_model(models, tmp_path_factory) -> Path:
    """`random_model` with a tokenizer of SentencePiece's kind that puts BOS (token 0) first by itself."""
    return models.random_llama(tmp_path_factory.mktemp("models") / "fallback", byte_fallback=True)


@pytest.fixture(scope="session")
def llama_2_model(models, tmp_path_factory) -> Path:
    """A random Llama with a tokenizer as Llama 2's, and a chat template that marks the assistant's text and EOS."""
    return models.llama_2_like(tmp_path_factory.mktemp("models") / "llama-2")


@pytest.fixture(scope="session")
def int8_random_model(models, random_model: Path, tmp_path_factory) -> Path:
    """`random_model` with its last block and LM head as INT8 W8A8. An oracle agrees with vLLM token by token."""
    return models.int8_model(random_model, tmp_path_factory.mktemp("models") / "int8")


@pytest.fixture(scope="session")
def mixtral_model(models, tmp_path_factory) -> Path:
    """A random mixture of experts."""
    return models.random_mixtral(tmp_path_factory.mktemp("models") / "mixtral")


@pytest.fixture(scope="session")
def rounded_router_model(models, mixtral_model: Path, tmp_path_factory) -> Path:
    """`mixtral_model` with the router of layer 1 in 4 bits."""
    return models.with_rounded_router(mixtral_model, tmp_path_factory.mktemp("models") / "rounded-router", 1)


@pytest.fixture(scope="session")
def wikitext() -> str:
    """The beginning of WikiText-2's test text, rows joined with two newlines."""
    return WIKITEXT.read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A headless Chromium, for one module only: while it runs, no test can run an asyncio loop."""
    from tests.browser import EXECUTABLES, installed_chromium, running_browser

    executable = installed_chromium()
    if executable is None:
        pytest.skip(f"needs a browser, and none of {', '.join(EXECUTABLES)} is installed: apt-get install chromium")
    with running_browser(executable) as browser:
        yield browser
