"""The examples of README.md and docs/, and how they run: as they stand, but for the length of a text. A CPU takes long
for a real model's tokens."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAX_TOKENS = re.compile(r"--max-tokens \d+")
TIMEOUT_SECONDS = 900
SOME_WINDOWS = "--max-tokens 640"
"""Several windows of each of the examples."""


def examples(part: str) -> dict[str, tuple[str, str]]:
    """Language and code of the blocks that have `part` in them, by page and number."""
    return {
        f"{page.name} {number} {language}": (language, code)
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        for number, (language, code) in enumerate(BLOCK.findall(page.read_text()))
        if part in code
    }


def run(language: str, code: str, folder: Path) -> str:
    """Run an example in an empty folder, and return what it prints."""
    (folder / "scripts").symlink_to(ROOT / "scripts")
    script = folder / "example"
    script.write_text(MAX_TOKENS.sub(SOME_WINDOWS, code))
    command = [sys.executable, str(script)] if language == "python" else ["bash", "-euo", "pipefail", str(script)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    # vLLM's threads may abort an interpreter that has finished its script and has made an engine.
    assert done.returncode == 0 or (done.returncode == -signal.SIGABRT and "LLM(" in code), done.stderr
    return done.stdout
