"""Models and texts that tests share, made once a session; the real model and its INT8 copies stay in the demo cache."""

from pathlib import Path

import pytest

from demo_model import cache_root, demo_model, made_once
from tests import models

WIKITEXT = Path(__file__).resolve().parents[2] / "shared/data/wikitext/wikitext-2-raw-v1/test-00000-of-00001.parquet"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M, bfloat16."""
    return demo_model()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory) -> Path:
    """Two random blocks, 1,024 tokens of vocabulary, 2,048 positions; its tokenizer adds no BOS."""
    return models.random_llama(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def random_bos_model(tmp_path_factory) -> Path:
    """`random_model`, but for a tokenizer that puts BOS (token 0) first by itself."""
    return models.random_llama(tmp_path_factory.mktemp("models") / "random-bos", add_bos=True)


@pytest.fixture(scope="session")
def int8_smollm2(smollm2) -> Path:
    """SmolLM2 with its last block as INT8 W8A8: `int8_logprobs` agrees with vLLM token by token."""
    return _int8(smollm2, "SmolLM2-135M-INT8-last-block", last_blocks=1)


@pytest.fixture(scope="session")
def int8_whole_smollm2(smollm2) -> Path:
    """SmolLM2 with every block as INT8 W8A8: no two implementations agree token by token (see `int8_model`)."""
    return _int8(smollm2, "SmolLM2-135M-INT8", last_blocks=None)


@pytest.fixture(scope="session")
def wikitext() -> str:
    """The WikiText-2 test text, rows joined with two newlines; Python's language reference where it is not at hand."""
    if not WIKITEXT.exists():
        return models.pydoc_text()
    parquet = pytest.importorskip("pyarrow.parquet")
    return "\n\n".join(parquet.read_table(WIKITEXT)["text"].to_pylist())


def _int8(source: Path, name: str, last_blocks: int | None) -> Path:
    # Asymmetric activations, because symmetric ones do not run in float32 on every CPU (see `int8_model`).
    return made_once(
        cache_root() / name,
        lambda folder: models.int8_model(source, folder, last_blocks=last_blocks, symmetric_activations=False),
    )
