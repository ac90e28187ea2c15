"""The manifest is complete: the hashes of every version are of all that is used, and right for the installed one."""

import importlib
import inspect
from pathlib import Path

import pytest
import vllm

from check_vllm import SERVER, imported_names, used_names
from scoremode_server.vllm_patches.manifest import PRIVATE, recorded_hashes
from scoremode_server.vllm_patches.source import Sources, digest
from vllm_sources import segment

INSTALLED = vllm.__version__.partition("+")[0]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(Path(vllm.__file__).parents[1])


@pytest.mark.parametrize("version", recorded_hashes())
def test_every_version_has_a_hash_of_all_that_is_used(sources: Sources, version: str):
    """If this fails: python scripts/check_vllm.py VERSION --write, for every version."""
    assert sorted(recorded_hashes()[version]) == used_names(sources)


def test_the_hashes_are_those_of_the_installed_files(sources: Sources):
    recorded = recorded_hashes()[INSTALLED]
    assert {key: digest(segment(sources, key)) for key in recorded} == recorded


def test_private_names_are_listed_where_they_are_defined(sources: Sources):
    """There alone the server looks for them."""
    recorded = recorded_hashes()[INSTALLED]
    found = {key: digest(sources.segment(key)) for key in PRIVATE}
    assert found == {key: recorded[key] for key in found}


def test_no_name_is_missing_in_every_version():
    versions = recorded_hashes().values()
    assert not [key for key in next(iter(versions)) if all(hashes[key] is None for hashes in versions)]


def test_a_module_that_is_imported_counts_with_what_is_used_of_it(sources: Sources):
    names = imported_names(SERVER, sources)
    assert "vllm.envs:VLLM_SERVER_DEV_MODE" in names
    assert "vllm.outputs:RequestOutput" in names
    assert not [name for name in names if name.startswith("vllm:envs")]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        # Not one that a test before may have replaced, by loading the plugin.
        ("vllm.v1.engine.logprobs", "LogprobsProcessor.update_from_output"),
        ("vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc"),
        ("vllm", "SamplingParams.clone"),
    ],
)
def test_the_text_is_what_inspect_finds_in_the_imported_module(sources: Sources, module: str, name: str):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    text = segment(sources, f"{module}:{name}")
    assert text is not None
    assert [line.strip() for line in text.split("\n")] == [
        line.strip() for line in inspect.getsource(found).rstrip().split("\n")
    ]
