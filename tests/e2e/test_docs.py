"""The examples of README.md and docs/ run as they stand, but for the server's address and the model's name."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(served: bool) -> list[object]:
    """Code blocks that talk to a server, or those that bring an engine of their own."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, (language, code) in enumerate(BLOCK.findall(page.read_text())):
            if ("localhost:8000" if served else 'LLM("MODEL"') in code:
                found.append(pytest.param(language, code, id=f"{page.name} {number} {language}"))
    return found


def run(language: str, code: str, folder: Path) -> str:
    (folder / "scripts").symlink_to(ROOT / "scripts")
    script = folder / "example"
    script.write_text(code)
    command = [sys.executable, str(script)] if language == "python" else ["bash", "-euo", "pipefail", str(script)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    # vLLM's threads may abort an interpreter that is through with its script and has an engine of its own.
    assert done.returncode == 0 or (done.returncode == -signal.SIGABRT and "LLM(" in code), done.stderr
    return done.stdout


@pytest.mark.parametrize(("language", "code"), examples(served=True))
def test_examples_for_a_server(server: str, tmp_path: Path, language: str, code: str):
    assert run(language, code.replace("http://localhost:8000", server), tmp_path).strip()


@pytest.mark.parametrize(("language", "code"), examples(served=False))
def test_examples_without_a_server(random_model: Path, tmp_path: Path, language: str, code: str):
    environment = "import os; os.environ |= {'VLLM_CPU_OMP_THREADS_BIND': 'nobind', 'VLLM_CPU_KVCACHE_SPACE': '1'}\n"
    assert run(language, environment + code.replace('"MODEL"', f'"{random_model}"'), tmp_path).strip()
