"""Which vLLM Scoremode accepts: the installed one, others by their version, and others by their sources."""

import re
import shutil
from pathlib import Path

import pytest
import vllm

from scoremode_server import cli, enable, plugin
from scoremode_server.vllm_patches import versions
from scoremode_server.vllm_patches.manifest import PRIVATE, recorded_hashes
from scoremode_server.vllm_patches.source import Sources, digest
from scoremode_server.vllm_patches.versions import SUPPORTED, SUPPORTED_SERIES, require_supported

ENTRIES = {"vllm.one:Class.method": "wrapped", "vllm.two:CHUNK": "replaced"}
ONE, TWO = "class Class:\n    def method(self):\n        return 1\n", "CHUNK = 1024\n"
KNOWN = ("0.32.0", "0.33.0")
PYPROJECT = Path(__file__).parents[4] / "pyproject.toml"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up vLLM 0.33.0.post1, with the sources of a made-up 0.33.0; in 0.32.0 both names were something else."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    for name, text in {"__init__.py": "", "one.py": ONE, "two.py": TWO}.items():
        (folder / name).write_text(text)
    sources = Sources(tmp_path)
    now = {key: digest(sources.segment(key)) for key in ENTRIES}
    hashes = {"0.32.0": dict.fromkeys(now, "0123456789abcdef"), "0.33.0": now}
    monkeypatch.setattr(versions, "PRIVATE", ENTRIES)
    monkeypatch.setattr(versions, "recorded_hashes", lambda: hashes)
    monkeypatch.setattr(vllm, "__file__", str(folder / "__init__.py"))
    monkeypatch.setattr(vllm, "__version__", "0.33.0.post1")
    return folder


def test_the_installed_vllm_is_supported_and_found_without_reading_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions, "Sources", None)
    require_supported()


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.0", "0.33.0+cu130"])
def test_known_versions_of_any_build_are_supported(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(vllm, "__version__", version)
    require_supported()


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.34.0rc1", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"0\.32\.0 and 0\.33\.0 .*found vLLM {re.escape(version)}"):
        require_supported()


@pytest.mark.parametrize("version", ["0.33.0.post1", "0.33.1", "0.32.7+cpu"])
@pytest.mark.usefixtures("package")
def test_a_release_with_the_same_sources_is_supported(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(vllm, "__version__", version)
    require_supported()


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("one.py", ONE.replace("1", "2"), r"vllm\.one:Class\.method \(changed\)$"),
        ("two.py", "", r"vllm\.two:CHUNK \(gone\)$"),
    ],
)
def test_a_release_that_changed_something_is_refused_with_its_name(package: Path, file: str, text: str, said: str):
    (package / file).write_text(text)
    with pytest.raises(RuntimeError, match=r"found vLLM 0\.33\.0\.post1, which differs from 0\.33\.0 .*: " + said):
        require_supported()


def test_a_release_that_mixes_two_known_ones_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch):
    now = versions.recorded_hashes()["0.33.0"]
    first, second = now
    mixed = {"0.32.0": now | {first: "0123456789abcdef"}, "0.33.0": now | {second: "0123456789abcdef"}}
    monkeypatch.setattr(versions, "recorded_hashes", lambda: mixed)
    with pytest.raises(RuntimeError, match=first):
        require_supported()


def test_a_release_of_the_real_sources_is_supported_until_it_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    installed = Path(vllm.__file__).parent
    monkeypatch.setattr(vllm, "__version__", "0.33.0.post1")
    require_supported()
    for module in {key.partition(":")[0].replace(".", "/") for key in PRIVATE}:
        for file in (f"{module}.py", f"{module}/__init__.py"):
            if (installed.parent / file).is_file():
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(installed.parent / file, tmp_path / file)
    changed = tmp_path / "vllm/v1/worker/gpu/sample/prompt_logprob.py"
    changed.write_text(changed.read_text().replace("CHUNK_SIZE = 1024", "CHUNK_SIZE = 512"))
    monkeypatch.setattr(vllm, "__file__", str(tmp_path / "vllm" / "__init__.py"))
    with pytest.raises(RuntimeError, match=r"patches: vllm\.v1\.worker\.gpu\.sample\.prompt_logprob:CHUNK_SIZE \(ch"):
        require_supported()


def test_the_range_is_that_of_the_extra_and_holds_the_known_versions():
    assert f'"vllm{SUPPORTED}"' in PYPROJECT.read_text()
    newest = max(int(series.split(".")[1]) for series in SUPPORTED_SERIES)
    assert f">={SUPPORTED_SERIES[0][:-1]},<0.{newest + 1}" == SUPPORTED
    assert tuple(recorded_hashes()) == KNOWN


def test_without_the_plugin_no_vllm_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    for plugins in (None, "", "lora"):
        if plugins is None:
            monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        else:
            monkeypatch.setenv("VLLM_PLUGINS", plugins)
        plugin.general_plugin()
    monkeypatch.setenv("VLLM_PLUGINS", "lora,scoremode")
    with pytest.raises(RuntimeError, match=r"found vLLM 0\.31\.0"):
        plugin.general_plugin()


def test_enable_adds_the_plugin_for_this_process_and_those_it_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    enable()
    enable()
    assert plugin.os.environ["VLLM_PLUGINS"] == "lora,scoremode"


def test_enable_refuses_a_vllm_that_is_not_known_and_leaves_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(RuntimeError, match=r"found vLLM 0\.31\.0"):
        enable()
    assert plugin.os.environ["VLLM_PLUGINS"] == "lora"


def test_scoremode_serve_says_which_versions_it_knows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(SystemExit, match=r"^scoremode: Scoremode runs on vLLM 0\.32\.0 and 0\.33\.0 .*0\.31\.0"):
        cli.serve(["model"])
