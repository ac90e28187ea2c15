"""README's lines for a machine without a GPU, on a real model in formats that are deployed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint

from tests.doc_examples import ROOT

BINARIES = Path(sys.executable).parent
[LINES] = [
    block for block in re.findall(r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S) if "CPU_" in block
]
FIRST, LAST = "python3 -m venv .venv && scripts/install.sh .venv/bin/python cpu report datasets\n", "--max-windows 8"

pytestmark = pytest.mark.slow


def quick(original: Path, quantized: Path, folder: Path, dtype: str) -> subprocess.CompletedProcess[str]:
    """Run README's lines in this environment, over two short windows."""
    assert LINES.startswith(FIRST)
    lines = LINES.removeprefix(FIRST).replace(".venv/bin", str(BINARIES))
    lines = lines.replace("ORIGINAL QUANTIZED", f"{original} {quantized}").replace("float32", dtype)
    lines = lines.replace(LAST, "--max-windows 2").replace("--context-length 512", "--context-length 128")
    return subprocess.run(["bash", "-ec", lines], cwd=folder, capture_output=True, text=True)


def dtype_of(name: str) -> str:
    """As README says."""
    is_16_bit = name == "w4a16" or (name == "int8" and torch.cpu._is_amx_tile_supported())
    return "bfloat16" if is_16_bit else "float32"


@pytest.mark.parametrize("name", ["int8", "fp8", "w4a16"])
def test_readmes_lines_measure_each_format(smollm2, tmp_path, name):
    done = quick(smollm2, write_checkpoint(smollm2, tmp_path / name, name), tmp_path, dtype_of(name))
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^{name}: .* % PPL.*, KLD 0\.", done.stdout, re.MULTILINE)
    [run] = (tmp_path / "scoremode-quick").glob(f"{name}.json")
    assert json.loads(run.read_text())["server"]["dtype"] == dtype_of(name)
    # It prints the time before the first server starts.
    assert re.search(r"model 1 of 2.*; all may take \d+ min, a rough estimate", done.stderr)


def test_a_copy_without_a_kernel_is_reported_with_the_servers_own_words(smollm2, tmp_path):
    done = quick(smollm2, write_checkpoint(smollm2, tmp_path / "w4a16", "w4a16"), tmp_path, "float32")
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("ppl-client: w4a16 failed: ")]
    assert "scoremode: --dtype float32 does not work with weights of 4 bits on a CPU: " in line
    assert "loading weights" not in (tmp_path / "scoremode-quick" / "logs" / "w4a16.log").read_text().lower()
