"""Scoremode installed as the images do it, and next to a vLLM, which it leaves alone until asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def install(environment: Path, engine: str) -> Path:
    """The `bin` folder of an environment that `engine` was installed into."""
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    subprocess.run([str(ROOT / "scripts" / "install.sh"), str(python), engine], check=True)
    return environment / "bin"


def output(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout.strip()


# It installs another vLLM, of gigabytes.
@pytest.mark.slow
def test_the_cpu_image_has_a_server_and_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_VERSION", "0.32.0")
    binaries = install(tmp_path / "venv", "cpu")
    assert output(binaries / "scoremode", "--version") == output(binaries / "ppl-client", "--version").split()[-1]
    loaded = "from importlib.metadata import entry_points as e; [print(p.load()().name) for p in e(group=G)]"
    assert output(binaries / "python", "-c", f"G='vllm.endpoint_plugins'; {loaded}").splitlines()[-1] == "scoremode"
    # The CUDA image has vLLM already: the same script adds the rest, and checks the version against ours.
    install(tmp_path / "venv", "bundled")


def test_the_client_alone_is_small_and_needs_neither_torch_nor_vllm(tmp_path: Path):
    binaries = install(tmp_path / "venv", "none")
    output(binaries / "python", "-m", "pip", "uninstall", "--yes", "uv")
    packages = Path(output(binaries / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    assert sum(file.stat().st_size for file in packages.rglob("*") if file.is_file()) < 200e6
    assert not {"torch", "vllm", "pandas"} & {entry.name for entry in packages.iterdir()}
    assert "--dataset" in output(binaries / "ppl-client", "--help")
    texts = "from scoremode.runs import load_corpus as load; print(len(load(preset='categories').documents))"
    assert output(binaries / "python", "-P", "-c", texts) == "261"


LOAD = """
import sys
from vllm.plugins import load_general_plugins
print("a line", flush=True)
load_general_plugins()
print("a line", flush=True)
print(*[name for name in sys.modules if name.startswith("scoremode")])
"""


def test_unasked_its_plugins_print_nothing_and_import_nothing_that_patches():
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        check=True,
        text=True,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    _, printed, imported = done.stdout.split("a line\n")
    assert printed == ""
    ours = {"settings", "plugin", "vllm_compat", "vllm_compat.versions"}
    assert set(imported.split()) <= {"scoremode_server", *(f"scoremode_server.{name}" for name in ours)}
