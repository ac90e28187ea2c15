"""Minutes of `ppl-client quick` with servers one after another and at once, in turns, and when each model was measured.

    python bench/quick_minutes.py FOLDER TURNS ORIGINAL COPY... [any option of quick] [-- any vllm serve flag]

TURNS are values of --at-once, such as 1,fit,fit,1: `fit` leaves it out. Each turn has a folder in FOLDER for its runs
and for what vLLM compiles, so that every start is a first one. The figures of all turns in FOLDER are compared, also
those of earlier calls. GPU memory is what was in use at that moment.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from servers import Row
from tables import table

from local_server import has_gpu

EVENT = re.compile(r"ppl-client: (?:model \d+ of \d+, )?(\S+): (loading|recording|measuring|stopping|server stopped)")
MEMORY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader", "--id=0")


def event_rows(folder: Path, at_once: str, words: list[str]) -> list[Row]:
    """Run `quick`: one row per line that says what it does."""
    options = ["--output", str(folder), *(() if at_once == "fit" else ("--at-once", at_once))]
    command = [sys.executable, "-m", "scoremode.cli", "quick", *options, *words]
    environment, rows, started = {**os.environ, "VLLM_CACHE_ROOT": str(folder / "compiled")}, [], time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as quick:
        for line in quick.stderr or ():
            print(line, end="", flush=True)
            if event := EVENT.match(line):
                memory = subprocess.check_output(MEMORY, text=True).strip() if has_gpu() else "-"
                rows.append((at_once, f"{time.monotonic() - started:.1f}", *event.groups(), memory))
    return [*rows, (at_once, f"{time.monotonic() - started:.1f}", "all", f"ended with status {quick.returncode}")]


def main() -> None:
    folder, rows, figures = Path(sys.argv[1]).absolute(), list[Row](), defaultdict[str, set[str]](set)
    for at_once in sys.argv[2].split(","):
        rows += event_rows(folder / f"{at_once}-{time.time():.0f}", at_once, sys.argv[3:])
    for run in folder.glob("*/*.json"):
        figures[run.stem].add(json.dumps(json.loads(run.read_text())["statistics"]))
    print(table(("at once", "seconds", "model", "does", "GPU memory"), rows))
    print("figures equal in all turns:", {name: len(values) == 1 for name, values in figures.items()})


if __name__ == "__main__":
    main()
