"""The examples of README.md and docs/ that make an engine of their own, with a small model as MODEL."""

from pathlib import Path

import pytest

from local_server import CPU_ENVIRONMENT
from tests.doc_examples import examples, run

EXAMPLES = examples('LLM("MODEL"')


@pytest.mark.parametrize(("language", "code"), EXAMPLES.values(), ids=EXAMPLES)
def test_examples_without_a_server(random_model: Path, tmp_path: Path, monkeypatch, language: str, code: str):
    for name, value in {**CPU_ENVIRONMENT, "VLLM_LOGGING_STREAM": "ext://sys.stderr"}.items():
        monkeypatch.setenv(name, value)
    code = code.replace('LLM("MODEL"', f'LLM("{random_model}", enforce_eager=True')
    assert run(language, code, tmp_path).strip()
