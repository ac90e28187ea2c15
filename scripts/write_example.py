"""Measure the runs that `ppl-client example` shows: the demo's model and two quantized copies of it, on this machine.

python scripts/write_example.py MODEL EXAMPLE.zip [options of ppl-client quick]
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import load_file, save

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from checkpoints import write_checkpoint

from demo_model import NAME

FORMATS = {"INT8": "int8", "W4A16": "w4a16"}
TEXT = """# The text of these runs

The runs hold tokens of articles of WikiText-2 (raw), test split: Stephen Merity, Caiming Xiong, James Bradbury, Richard
Socher, *Pointer Sentinel Mixture Models*, 2016 (arXiv 1609.07843). The authors of the articles are those of Wikipedia.
The text is under [CC BY-SA 3.0](https://creativecommons.org/licenses/by-sa/3.0/), not under the license of Scoremode.
"""
NUM_WITH_TOPS = 100
"""Most divergent tokens whose top tokens are kept."""


def write_example(model: Path, archive: Path, options: list[str]) -> None:
    """Measure the three models, and write what a comparison of their runs needs."""
    with TemporaryDirectory() as temporary:
        work = Path(temporary)
        shutil.copytree(model, work / NAME)
        for name, preset in FORMATS.items():
            write_checkpoint(work / NAME, work / name, preset)
        # Relative paths: a run keeps the path of its model.
        command = [sys.executable, "-m", "scoremode.cli", "quick", NAME, *FORMATS, "--output", "runs", *options]
        subprocess.run(command, cwd=work, check=True)
        folder = work / "example"
        folder.mkdir()
        (folder / "TEXT.md").write_text(TEXT)
        for name in (NAME, *FORMATS):
            write_small(work / "runs" / f"{name}.json", folder)
        shutil.make_archive(str(archive.with_suffix("")), "zip", folder)


def write_small(run: Path, folder: Path) -> None:
    """Write a run without what only a resumed measurement needs, so that the package stays small."""
    record, arrays = json.loads(run.read_text()), load_file(run.with_suffix(".safetensors"))
    for name in ("windows", "sweep"):
        record.pop(name, None)
    if "top_tokens.positions" in arrays:
        kept = np.argsort(-arrays["kld"][arrays["top_tokens.positions"]], kind="stable")[:NUM_WITH_TOPS]
        arrays |= {name: value[np.sort(kept)] for name, value in arrays.items() if name.startswith("top_tokens.")}
    content = save(arrays)
    record["arrays"]["sha256"] = hashlib.sha256(content).hexdigest()
    (folder / run.name).write_text(json.dumps(record, separators=(",", ":")) + "\n")
    (folder / record["arrays"]["file"]).write_bytes(content)


if __name__ == "__main__":
    write_example(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:])
