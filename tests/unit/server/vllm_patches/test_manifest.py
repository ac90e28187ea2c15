"""The manifest is complete: the hashes of every version are of all that is used, and right for the installed one."""

from pathlib import Path

import pytest
import vllm

from check_vllm import SERVER, imported_names, used_names
from scoremode_server.vllm_patches.versions import PRIVATE, Sources, digest, recorded_hashes
from vllm_sources import segment

INSTALLED = vllm.__version__.partition("+")[0]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(Path(vllm.__file__).parents[1])


def test_every_version_has_a_hash_of_all_that_is_used(sources: Sources):
    """If this fails: python scripts/check_vllm.py VERSION --write, for every version."""
    used = used_names(sources)
    assert {version: sorted(hashes) for version, hashes in recorded_hashes().items()} == dict.fromkeys(
        recorded_hashes(), used
    )
    assert not [key for key in used if all(hashes[key] is None for hashes in recorded_hashes().values())]


def test_the_hashes_are_those_of_the_installed_files(sources: Sources):
    """Of private names where they are defined: there alone the server looks for them."""
    recorded = recorded_hashes()[INSTALLED]
    assert {key: digest(segment(sources, key)) for key in recorded} == recorded
    found = {key: digest(sources.segment(key)) for key in PRIVATE}
    assert found == {key: recorded[key] for key in found}


def test_a_module_that_is_imported_counts_with_what_is_used_of_it(sources: Sources):
    names = imported_names(SERVER, sources)
    assert {"vllm.envs:VLLM_SERVER_DEV_MODE", "vllm.outputs:RequestOutput"} <= names
    assert not [name for name in names if name.startswith("vllm:envs")]
