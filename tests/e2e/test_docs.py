"""The examples of README.md and docs/ run as they stand, but for the server's address, the model's name, and the length
of a text: a CPU takes long for a real model's tokens."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.command_line import TIMEOUT_SECONDS
from tests.e2e.metrics import metrics_of

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(part: str) -> dict[str, tuple[str, str]]:
    """Language and code of the blocks that have `part` in them, by page and number."""
    return {
        f"{page.name} {number} {language}": (language, code)
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        for number, (language, code) in enumerate(BLOCK.findall(page.read_text()))
        if part in code
    }


KLD = [code for name, (_, code) in examples("").items() if name.startswith("kld.md") and "bash" in name]
"""In this order they are one story."""
FOR_A_SERVER = {name: block for name, block in examples("localhost:8000").items() if not name.startswith("kld.md")}
WITHOUT_A_SERVER = examples('LLM("MODEL"')


MAX_TOKENS = re.compile(r"--max-tokens \d+")
SOME_WINDOWS = "--max-tokens 768"
"""Several windows of each of the examples."""


def run(language: str, code: str, folder: Path) -> str:
    (folder / "scripts").symlink_to(ROOT / "scripts")
    script = folder / "example"
    script.write_text(MAX_TOKENS.sub(SOME_WINDOWS, code))
    command = [sys.executable, str(script)] if language == "python" else ["bash", "-euo", "pipefail", str(script)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    # vLLM's threads may abort an interpreter that has finished its script and has made an engine.
    assert done.returncode == 0 or (done.returncode == -signal.SIGABRT and "LLM(" in code), done.stderr
    return done.stdout


@pytest.mark.parametrize(("language", "code"), FOR_A_SERVER.values(), ids=FOR_A_SERVER)
def test_examples_for_a_server(server: str, tmp_path: Path, language: str, code: str):
    assert run(language, code.replace("http://localhost:8000", server), tmp_path).strip()


def test_from_two_checkpoints_to_a_table(server: str, int8_server: str, tmp_path: Path):
    story = "".join(f"echo '{STEP}'\n{code}" for code in KLD)
    story = story.replace("http://localhost:8000", server).replace("http://localhost:8001", int8_server)
    _, recorded, compared, floor, listed, deleted = run("bash", story, tmp_path).split(STEP)
    assert "perplexity" in recorded
    assert re.search(r"^Mean    KLD:  +0\.0\d+ ± ", compared, re.MULTILINE)
    assert "kept with the reference" in floor
    [reference] = [each for each in json.loads(listed)["data"] if each["name"] == "base-pydoc"]
    assert reference["complete"]
    assert (
        reference["noise_floor"]["mean"] < json.loads((tmp_path / "run.json").read_text())["statistics"]["kld"]["mean"]
    )
    assert json.loads(deleted)["deleted"]


# An engine takes long to start: examples that make the same one share it.
ONE_ENGINE = """\
import functools, os
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
import vllm
vllm.LLM = functools.cache(functools.partial(vllm.LLM, enforce_eager=True))
"""
STEP = "the next step of an example"
THE_END = "if __name__ == '__main__': print('the end of an example', flush=True)\n"


def test_examples_without_a_server(random_model: Path, tmp_path: Path):
    code = ONE_ENGINE + "".join(code + THE_END for _, code in WITHOUT_A_SERVER.values())
    output = run("python", code.replace('"MODEL"', f'"{random_model}"'), tmp_path)
    *printed, _ = output.split("the end of an example\n")
    assert len(printed) == len(WITHOUT_A_SERVER)
    assert all(text.strip() for text in printed)


def test_alerts_ask_for_metrics_that_there_are(server: str):
    names = re.findall(r"\b(?:scoremode_|vllm:|http_requests)[a-z_]+", (ROOT / "docs" / "deployment.md").read_text())
    assert len(set(names)) > 5
    # Requests are not shown before there was one.
    httpx.get(f"{server}/v1/models", timeout=60).raise_for_status()
    metrics = metrics_of(server)
    assert [name for name in names if f"\n{name}" not in metrics] == []
