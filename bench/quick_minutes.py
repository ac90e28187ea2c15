"""Minutes of `ppl-client quick` with servers one after another and at once, in turns, and when each model was measured.

    python bench/quick_minutes.py FOLDER TURNS ORIGINAL COPY... [any option of quick] [-- any vllm serve flag]

TURNS are values of --at-once, such as 1,fit,fit,1: `fit` leaves it out. Each turn has a folder in FOLDER for its runs
and for what vLLM compiles, so that every start is a first one; a turn whose folder is there is only shown. Columns are
seconds since the turn's start, and the GPU's memory in use when the model was measured.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tables import table

EVENT = re.compile(r"ppl-client: (?:model \d+ of \d+, )?(\S+): (loading|recording|measuring|stopping|server stopped)")
COLUMNS = ("loading", "measuring", "stopping", "server stopped", "GPU memory")
MEMORY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader", "--id=0")


def run_turn(folder: Path, at_once: str, words: list[str]) -> None:
    """Run `quick`, and write when its lines came."""
    options = ["--output", str(folder), *(() if at_once == "fit" else ("--at-once", at_once))]
    command = [sys.executable, "-m", "scoremode.cli", "quick", *options, *words]
    models: dict[str, dict[str, str]] = {}
    environment, started = {**os.environ, "VLLM_CACHE_ROOT": str(folder / "compiled")}, time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as quick:
        for line in quick.stderr or ():
            seconds = f"{time.monotonic() - started:.1f}"
            print(seconds, line, end="", flush=True)
            if event := EVENT.match(line):
                times = models.setdefault(event[1], {})
                times.setdefault(event[2].replace("recording", "measuring"), seconds)
                if event[2] == "stopping" and shutil.which(MEMORY[0]):
                    times["GPU memory"] = subprocess.check_output(MEMORY, text=True).strip()
    total = {"all": {COLUMNS[3]: f"{time.monotonic() - started:.1f}"}}
    (folder / "minutes.json").write_text(json.dumps(models | total))


def main() -> None:
    folder, turns, rows, figures = Path(sys.argv[1]).absolute(), sys.argv[2].split(","), [], {}
    for index, at_once in enumerate(turns):
        turn = folder / f"{index}-{at_once}"
        if not (turn / "minutes.json").exists():
            turn.mkdir(parents=True)
            run_turn(turn, at_once, sys.argv[3:])
        models = json.loads((turn / "minutes.json").read_text())
        for name, times in models.items():
            rows.append((turn.name, name, *(times.get(column, "-") for column in COLUMNS)))
            if (run := turn / f"{name}.json").exists():
                figures.setdefault(name, set()).add(json.dumps(json.loads(run.read_text())["statistics"]))
    print(table(("turn", "model", *COLUMNS), rows))
    print("figures equal in all turns:", {name: len(values) == 1 for name, values in figures.items()})


if __name__ == "__main__":
    main()
