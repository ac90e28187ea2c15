"""Write `ScoreClient` from `AsyncScoreClient`: the same methods without `async` and `await`.

    python scripts/write_sync_client.py [--check]

With --check nothing is written, and the exit status is 1 if the file is out of date.
"""

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "client" / "scoremode"
SOURCE, TARGET = PACKAGE / "client.py", PACKAGE / "_sync_client.py"
HEADER = '"""`ScoreClient`, generated from `client.py` by `python scripts/write_sync_client.py`. Do not edit it."""\n'
REPLACEMENTS = (
    (r"import asyncio\n", "import time\n"),
    (r"asyncio\.sleep", "time.sleep"),
    (r" server, for asyncio\.", " server."),
    (r"\n    Cancelling a call .*?\n", ""),
    (r"\basync (?=def|for|with)|\bawait ", ""),
    (r"\b__a(?=enter__|exit__)", "__"),
    (r"\ba(?=close\(|iter_bytes\()", ""),
    (r"\bAsync(?=ScoreClient|Client|BaseTransport)", ""),
    (r'\A""".*?"""\n', HEADER),
)
"""Regular expressions, and the text in place of their matches."""


def sync_source() -> str:
    """The source that the generated file should have, as ruff formats it."""
    text = SOURCE.read_text()
    for pattern, replacement in REPLACEMENTS:
        text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
        if not count:
            sys.exit(f"{SOURCE} has nothing like {pattern!r}: change REPLACEMENTS in {__file__}")
    for command in (["check", "--quiet", "--fix", "--select", "I"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> None:
    source = sync_source()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(source)
    elif not TARGET.is_file() or TARGET.read_text() != source:
        sys.exit(f"{TARGET} is out of date: run python scripts/write_sync_client.py")


if __name__ == "__main__":
    main()
