"""Scoremode accepts the installed vLLM, and others by their version or their sources. The manifest has right hashes of
all that is used."""

import ast
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import vllm

from check_vllm import used_names
from scoremode_server import cli, enable, plugin
from scoremode_server.vllm_compat import versions
from scoremode_server.vllm_compat.versions import (
    PRIVATE,
    SUPPORTED,
    SUPPORTED_SERIES,
    Sources,
    digest,
    recorded_hashes,
    require_supported,
)
from vllm_sources import segment

INSTALLED = Path(vllm.__file__).parents[1]
VERSION = vllm.__version__.partition("+")[0]
CHUNK_SIZE = "vllm.v1.worker.gpu.sample.prompt_logprob:CHUNK_SIZE"
METHODS = "vllm.v1.engine.async_llm:AsyncLLM.*"
ABORT = "    async def abort("
PARSED = cache(ast.parse)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vLLM 0.33.0.post1, with the sources of the installed vLLM that Scoremode changes."""
    for module in {key.partition(":")[0].replace(".", "/") for key in PRIVATE}:
        for file in (f"{module}.py", f"{module}/__init__.py"):
            if (INSTALLED / file).is_file():
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(INSTALLED / file, tmp_path / file)
    # Tests change one module each.
    monkeypatch.setattr(versions.ast, "parse", PARSED)
    monkeypatch.setattr(vllm, "__file__", str(tmp_path / "vllm" / "__init__.py"))
    monkeypatch.setattr(vllm, "__version__", "0.33.0.post1")
    return tmp_path


def test_known_versions_and_releases_with_the_same_sources_are_supported(package: Path, monkeypatch):
    client = package / "vllm/v1/engine/async_llm.py"
    client.write_text(client.read_text().replace(ABORT, f"    def _new(self): ...\n\n{ABORT}", 1))
    require_supported()
    monkeypatch.setattr(versions, "Sources", None)
    for version in ("0.32.0+cpu", "0.33.0", "0.33.0+cu130"):
        monkeypatch.setattr(vllm, "__version__", version)
        require_supported()


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.34.0rc1", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"0\.32\.0 and 0\.33\.0 .*found vLLM {re.escape(version)}"):
        require_supported()


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        (CHUNK_SIZE, "CHUNK_SIZE = 1024", "CHUNK_SIZE = 512"),
        (CHUNK_SIZE, "\nCHUNK_SIZE = 1024", ""),
        # A method that nobody has looked at may change weights.
        (METHODS, ABORT, f"    async def load_other_weights(self): ...\n\n{ABORT}"),
        (METHODS, ABORT, f"    reload = abort\n\n{ABORT}"),
        (METHODS, "class AsyncLLM(EngineClient)", "class AsyncLLM(EngineClient, Reloading)"),
    ],
)
def test_a_release_that_changed_something_is_refused_with_its_name(package: Path, key: str, before: str, after: str):
    file = package / f"{key.partition(':')[0].replace('.', '/')}.py"
    file.write_text(file.read_text().replace(before, after, 1))
    with pytest.raises(RuntimeError, match=rf"found vLLM 0\.33\.0\.post1, .*patches: {re.escape(key)}$"):
        require_supported()


def test_a_release_that_mixes_two_known_ones_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch):
    installed = recorded_hashes()[VERSION]
    mixed = {"0.32.0": installed | {CHUNK_SIZE: "0123"}, "0.33.0": installed | {METHODS: "0123"}}
    monkeypatch.setattr(versions, "recorded_hashes", lambda: mixed)
    with pytest.raises(RuntimeError, match=re.escape(CHUNK_SIZE)):
        require_supported()


def test_the_range_is_that_of_the_extra_and_holds_the_known_versions():
    assert f'"vllm{SUPPORTED}"' in (Path(__file__).parents[4] / "pyproject.toml").read_text()
    newest = max(int(series.split(".")[1]) for series in SUPPORTED_SERIES)
    assert f">={SUPPORTED_SERIES[0][:-1]},<0.{newest + 1}" == SUPPORTED
    assert [f"{version.rpartition('.')[0]}." for version in recorded_hashes()] == [*SUPPORTED_SERIES]


def test_without_the_plugin_no_vllm_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    plugin.general_plugin()
    with pytest.raises(RuntimeError, match=r"found vLLM 0\.31\.0"):
        enable()
    assert "VLLM_PLUGINS" not in plugin.os.environ
    with pytest.raises(SystemExit, match=r"^scoremode: Scoremode runs on vLLM 0\.32\.0 and 0\.33\.0 .*0\.31\.0"):
        cli.serve(["model"])
    monkeypatch.setenv("VLLM_PLUGINS", "lora,scoremode")
    with pytest.raises(RuntimeError, match=r"found vLLM 0\.31\.0"):
        plugin.general_plugin()


# The manifest


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(INSTALLED)


def test_every_version_has_a_hash_of_all_that_is_used(sources: Sources):
    """If this fails: python scripts/check_vllm.py VERSION --write, for every version."""
    used = used_names(sources)
    assert {version: sorted(hashes) for version, hashes in recorded_hashes().items()} == dict.fromkeys(
        recorded_hashes(), used
    )
    assert not [key for key in used if all(hashes[key] is None for hashes in recorded_hashes().values())]


def test_the_hashes_are_those_of_the_installed_files(sources: Sources):
    """Private names are hashed where they are defined, because the server looks for them only there. Any change in how
    a source text is found, with its decorators or without its indentation, changes a hash."""
    recorded = recorded_hashes()[VERSION]
    assert {key: digest(segment(sources, key)) for key in recorded} == recorded
    found = {key: digest(sources.segment(key)) for key in PRIVATE}
    assert found == {key: recorded[key] for key in found}
    assert sources.segment(CHUNK_SIZE) == "CHUNK_SIZE = 1024"
    assert sources.segment("vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA.scale").startswith("@property")
    assert sources.segment("vllm.missing:Engine") is sources.segment("vllm.outputs:Missing.*") is None
