"""The core works without an extension."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

LINES = {
    "app.py": {
        "from scoremode_server.references import routes as references\n": "",
        "        references.router,\n": "",
        "    references.start(core, state)\n": "",
    },
    "plugin.py": {
        "    from scoremode_server.references.worker.sinks import reference_sinks\n": "",
        " | reference_sinks()\n": "\n",
    },
}
"""Code outside of the package that names references, and its replacement."""

# They take most of the time, and import nothing that is deleted.
LEFT_OUT = (
    "--ignore=tests/unit/server/worker/test_wrong_logits.py",
    "--deselect=tests/unit/server/completions/test_logprobs_json.py",
)

ROUTES = """
from tests.unit.server.light_app import light_app

def test_the_other_routes_are_there():
    paths = set(light_app().openapi()["paths"])
    assert {"/v1/completions", "/v1/score", "/v1/perplexity", "/v1/tokens", "/v1/turns"} <= paths
    assert not [path for path in paths if "references" in path or "kld" in path]
"""


@pytest.mark.processes
def test_without_references_the_rest_is_whole(tmp_path: Path):
    """The package, its tests and its lines elsewhere are deleted in a copy, where others' tests pass."""
    for name in ("server", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("references", "__pycache__"))
    for name in ("pyproject.toml", "client", "scripts", "bench", "openapi"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, lines in LINES.items():
        file = tmp_path / "server" / "scoremode_server" / name
        content = file.read_text()
        for line, other in lines.items():
            assert content.count(line) == 1
            content = content.replace(line, other)
        file.write_text(content)
    (tmp_path / "tests" / "unit" / "server" / "test_routes.py").write_text(ROUTES)
    tests = [
        f"tests/unit/server/{name}" for name in ("test_routes.py", "worker", "completions", "scoring/test_scorer.py")
    ]
    path = os.pathsep.join(str(tmp_path / name) for name in ("client", "server", "scripts"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *LEFT_OUT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
