"""Models, texts and servers that tests share, made once a session, and a browser.

The real model and its INT8 copy stay in the demo cache. What makes models is imported where one is made: it takes seven
seconds, and every process of a test run reads this file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyarrow import parquet

from demo_model import cache_root, demo_model, made_once
from rounded_model import rounded_model
from tests.shared_servers import Servers, needed

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WIKITEXT = Path(__file__).resolve().parents[2] / "shared/data/wikitext/wikitext-2-raw-v1/test-00000-of-00001.parquet"


@pytest.fixture(scope="session", autouse=True)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers that the collected tests need begin to start before the first test runs."""
    servers = Servers(lambda: tmp_path_factory.mktemp("server"), request.getfixturevalue)
    try:
        for name in needed(request.session.items):
            servers.begin(name)
        yield servers
    finally:
        servers.stop()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M, bfloat16."""
    return demo_model()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory) -> Path:
    """Two random blocks, 1,024 tokens of vocabulary, 2,048 positions; its tokenizer adds no BOS."""
    from tests import models

    return models.random_llama(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def disturbed_model(random_model: Path, tmp_path_factory) -> Path:
    """`random_model` with noise on its weights."""
    from tests import models

    return models.disturbed(random_model, tmp_path_factory.mktemp("models") / "disturbed", 0.05)


@pytest.fixture(scope="session")
def byte_fallback_model(tmp_path_factory) -> Path:
    """`random_model` with a tokenizer of SentencePiece's kind that puts BOS (token 0) first by itself."""
    from tests import models

    return models.random_llama(tmp_path_factory.mktemp("models") / "fallback", add_bos=True, byte_fallback=True)


@pytest.fixture(scope="session")
def int8_smollm2(smollm2) -> Path:
    """SmolLM2 with its last block as INT8 W8A8: `int8_logprobs` agrees with vLLM token by token.

    With every block quantized, no two implementations do. Activations are asymmetric, because symmetric ones do not run
    in float32 on every CPU (see `int8_model`).
    """
    from tests import models

    return made_once(
        cache_root() / "SmolLM2-135M-INT8-last-block",
        lambda folder: models.int8_model(smollm2, folder, last_blocks=1, symmetric_activations=False),
    )


@pytest.fixture(scope="session")
def rounded_smollm2(smollm2, tmp_path_factory) -> Path:
    """SmolLM2 with weights rounded to 4 bits, as float32, and an LM head that is 0.9 times its embedding."""
    from tests import models

    folder = tmp_path_factory.mktemp("models")
    return models.with_scaled_head(rounded_model(smollm2, folder / "rounded"), folder / "scaled", 0.9)


@pytest.fixture(scope="session")
def wikitext() -> str:
    """The WikiText-2 test text, rows joined with two newlines; Python's language reference where it is not present."""
    if not WIKITEXT.exists():
        from tests import models

        return models.pydoc_text()
    return "\n\n".join(parquet.read_table(WIKITEXT)["text"].to_pylist())


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A headless Chromium, for one module only: while it runs, no test can run an asyncio loop."""
    from tests.browser import EXECUTABLES, installed_chromium, running_browser

    executable = installed_chromium()
    if executable is None:
        left_out = f"needs a browser, and none of {', '.join(EXECUTABLES)} is installed: apt-get install chromium"
        pytest.skip(left_out)
    with running_browser(executable) as browser:
        yield browser
