"""Files of references that do not answer, are copied, or are damaged, on a real server."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scoremode import APIStatusError, ScoreClient
from tests.shared_servers import Servers

TOKENS = [(37 * position + position**2) % 1021 for position in range(160)]


@pytest.fixture(scope="module")
def root(server: str, servers: Servers) -> Path:
    return servers.references("shared")


@pytest.fixture
def recorded(client: ScoreClient, root: Path) -> Iterator[Path]:
    """The folder of a reference of four windows."""
    client.record_reference("files", TOKENS, method="disjoint", context_length=32)
    yield root / "files"
    shutil.rmtree(root / "files", ignore_errors=True)


@pytest.fixture
def copied(recorded: Path) -> Iterator[Path]:
    copy = recorded.with_name("files-copied")
    shutil.copytree(recorded, copy)
    yield copy
    shutil.rmtree(copy, ignore_errors=True)


@pytest.mark.parametrize("name", ["windows/000002.safetensors", "lm_head.safetensors", "manifest.json"])
def test_a_file_that_does_not_answer_holds_up_its_own_reference(
    client: ScoreClient, recorded: Path, copied: Path, name: str
):
    file = recorded / name
    expected = client.kld("files-copied").statistics
    file.unlink()
    os.mkfifo(file)
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(client.kld, "files", (2, 3)) for _ in range(8)]
        try:
            assert len(client.score(TOKENS)) == 1
            assert client.kld("files-copied").statistics == expected
            assert not any(each.done() for each in waiting)
        finally:
            # A writer that says nothing lets those go on who wait for one, and the file is there for all others.
            writer = os.open(file, os.O_RDWR)
            shutil.copy(copied / name, file.with_name(".again"))
            file.with_name(".again").replace(file)
            os.close(writer)
        for each in waiting:
            # Who had waited found an empty file, or the one that is there now.
            error = each.exception()
            assert error is None or (isinstance(error, APIStatusError) and error.status_code == 409)
    assert client.kld("files").statistics == expected


def test_a_copy_outlives_what_it_is_of(client: ScoreClient, recorded: Path, copied: Path):
    expected = client.kld("files").statistics
    assert client.kld("files-copied").statistics == expected
    client.delete_reference("files")
    assert client.kld("files-copied").statistics == expected


@pytest.mark.parametrize("name", ["windows/000001.safetensors", "lm_head.safetensors"])
@pytest.mark.parametrize("reference", ["files", "files-copied"])
def test_damage_is_told_and_never_a_number(
    client: ScoreClient, recorded: Path, copied: Path, reference: str, name: str
):
    client.kld("files")
    with (recorded.with_name(reference) / name).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(APIStatusError, match=f"reference '{reference}' is damaged: {name} was changed") as error:
        client.kld(reference)
    assert error.value.status_code == 409
