"""The folder of references: names, files, and what becomes of them when several write, delete and read."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from reference_setup import DOCUMENTS, HIDDEN, TEXT, create, files, manifest, random_shard

from scoremode_server.references import tensor_files
from scoremode_server.references.directory import NoReferenceError, ReferenceDirectory, StoredReference, StoredText
from scoremode_server.references.tensor_files import BrokenFileError

PATHS = [
    "",
    ".",
    "..",
    "../base",
    "a/b",
    "/etc",
    ".base",
    "-base",
    "base\n",
    "bäse",
    "a b",
    "a" * 129,
    "a\0",
]


def test_the_tokens_of_windows_are_those_of_their_documents():
    windows = [(tokens, window) for tokens, windows in DOCUMENTS for window in windows]
    for index, (tokens, window) in enumerate(windows):
        assert TEXT.window(index) == (window.token_ids(tokens), window.first_scored)
    assert TEXT.num_tokens.tolist() == [len(window.token_ids(tokens)) for tokens, window in windows]
    # A head is not of the text, and the first target can be the first token after it.
    assert TEXT.window(0) == ([99, *range(10, 18)], 1)
    assert TEXT.window(3) == (list(range(50, 57)), 1)


def test_a_reference_is_what_was_written(tmp_path: Path):
    created = create(tmp_path)
    shards = {index: random_shard(index + 1, index) for index in (0, 2)}
    for index, shard in shards.items():
        created.write_shard(index, *shard)
    weight, bias = torch.randn(100, HIDDEN).bfloat16(), torch.randn(100).bfloat16()
    created.write_head(weight, bias)

    opened = ReferenceDirectory(tmp_path).open("base")
    assert opened.manifest == manifest()
    assert opened.recorded() == {0, 2}
    for index, shard in shards.items():
        assert all(map(torch.equal, opened.read_shard(index), shard))
    assert all(map(torch.equal, opened.read_head(), (weight, bias)))
    assert np.array_equal(opened.text.token_ids, TEXT.token_ids)
    assert np.array_equal(opened.text.windows, TEXT.windows)
    assert opened.disk_bytes() == sum(map(len, files(tmp_path).values()))


def test_a_head_without_a_bias(tmp_path: Path):
    reference = create(tmp_path)
    reference.write_head(torch.ones(100, HIDDEN), None)
    assert reference.read_head()[1] is None


def test_a_folder_can_be_copied_to_another_place_and_name(tmp_path: Path):
    create(tmp_path / "here").write_shard(1, *random_shard(4))
    shutil.copytree(tmp_path / "here" / "base", tmp_path / "there" / "copy")
    copied = ReferenceDirectory(tmp_path / "there").open("copy")
    assert torch.equal(copied.read_shard(1)[0], random_shard(4)[0])


@pytest.mark.parametrize("name", PATHS)
def test_names_are_never_paths(tmp_path: Path, name: str):
    directory = ReferenceDirectory(tmp_path / "root")
    create(tmp_path, "base")
    before = files(tmp_path)
    for use in (directory.open, directory.delete, lambda name: directory.create(name, manifest(), TEXT)):
        with pytest.raises(NoReferenceError):
            use(name)
    assert files(tmp_path) == before


def test_names_are_of_references_alone(tmp_path: Path):
    create(tmp_path, "b")
    create(tmp_path, "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "not a name").mkdir()
    (tmp_path / "not a name" / "manifest.json").write_text("{}")
    shutil.copytree(tmp_path / "a", tmp_path / ".partial")
    directory = ReferenceDirectory(tmp_path)
    assert directory.names() == ["a", "b", "empty", "file"]
    for name in ("empty", "file", "none"):
        with pytest.raises(NoReferenceError, match=name):
            directory.open(name)


def test_a_folder_that_is_not_there_has_no_references(tmp_path: Path):
    directory = ReferenceDirectory(tmp_path / "none")
    assert not directory.names()
    assert directory.largest_head(100, 10) == 0


def test_a_damaged_manifest_is_told_and_does_not_hide_the_others(tmp_path: Path):
    create(tmp_path, "good")
    bad = create(tmp_path, "bad").path / "manifest.json"
    text = bad.read_text()
    for damaged in (
        "",
        text[:-5],
        text.replace("1700000000", "1700000001"),
        text.replace('"scale": 1.0', '"scale": 2.0'),
    ):
        assert damaged != text
        bad.write_text(damaged)
        with pytest.raises(BrokenFileError, match=r"bad/manifest\.json"):
            ReferenceDirectory(tmp_path).open("bad")
    bad.write_bytes(b"\xff")
    with pytest.raises(BrokenFileError, match=r"bad/manifest\.json"):
        ReferenceDirectory(tmp_path).open("bad")
    bad.write_text(text)
    assert ReferenceDirectory(tmp_path).open("bad").manifest == manifest()


def test_windows_cannot_be_taken_for_each_other(tmp_path: Path):
    reference = create(tmp_path)
    reference.write_shard(0, *random_shard(4, 0))
    reference.write_shard(1, *random_shard(4, 1))
    first, second = reference.shard(0), reference.shard(1)
    first.rename(tmp_path / "swap")
    second.rename(first)
    (tmp_path / "swap").rename(second)
    for index in (0, 1):
        with pytest.raises(BrokenFileError, match=f"{index:06}.* belongs to something else"):
            reference.read_shard(index)


def test_files_of_another_reference_are_refused(tmp_path: Path):
    mine, other = create(tmp_path, "mine", "one"), create(tmp_path, "other", "two")
    for reference in (mine, other):
        reference.write_shard(0, *random_shard(4))
        reference.write_head(torch.ones(100, HIDDEN), None)
    for name in ("windows/000000.safetensors", "lm_head.safetensors", "tokens.safetensors"):
        shutil.copy(other.path / name, mine.path / name)
    for read in (lambda: mine.read_shard(0), mine.read_head, lambda: mine.text):
        with pytest.raises(BrokenFileError, match="belongs to something else"):
            read()


def test_what_killed_writers_left_is_no_window_and_can_be_removed(tmp_path: Path):
    reference = create(tmp_path)
    reference.write_shard(0, *random_shard(4))
    before = files(tmp_path)
    for left in ("windows/.000001.safetensors.c0ffee", ".manifest.json.c0ffee"):
        (reference.path / left).write_bytes(b"half")
        os.utime(reference.path / left, (0, 0))
    being_written = reference.path / ".manifest.json.beef"
    being_written.write_bytes(b"ha")
    for foreign in ("windows/000002.safetensors.bak", "windows/1 copy.safetensors"):
        (reference.path / foreign).write_bytes(b"")
    assert reference.recorded() == {0}
    reference.remove_partial_files()
    assert files(tmp_path).keys() - before.keys() == {
        "base/.manifest.json.beef",
        "base/windows/000002.safetensors.bak",
        "base/windows/1 copy.safetensors",
    }
    assert reference.read_shard(0)[1].shape == (4,)


def test_a_name_is_given_once(tmp_path: Path):
    create(tmp_path).write_shard(0, *random_shard(4))
    before = files(tmp_path)
    with pytest.raises(FileExistsError):
        create(tmp_path, identity="two")
    assert files(tmp_path) == before
    assert os.listdir(tmp_path) == ["base"]


def test_of_those_who_create_at_the_same_time_one_does(tmp_path: Path):
    barrier = Barrier(8)

    def try_to(number: int) -> str | None:
        barrier.wait()
        try:
            return create(tmp_path, identity=str(number)).manifest.identity
        except FileExistsError:
            return None

    with ThreadPoolExecutor(8) as threads:
        created = [identity for identity in threads.map(try_to, range(8)) if identity]
    assert created == [ReferenceDirectory(tmp_path).open("base").manifest.identity]
    assert os.listdir(tmp_path) == ["base"]


def test_a_reference_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        create(tmp_path)
    assert not os.listdir(tmp_path)


def test_a_manifest_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reference = create(tmp_path)
    before = files(tmp_path)

    def full(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        reference.save(manifest("two"))
    assert files(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        create(tmp_path)
    tmp_path.chmod(0o700)


def test_what_is_deleted_while_it_is_open(tmp_path: Path):
    reference = create(tmp_path)
    reference.write_shard(0, *random_shard(4))
    text = reference.text
    ReferenceDirectory(tmp_path).delete("base")
    assert text.window(0) == TEXT.window(0)
    assert reference.recorded() == set()
    assert reference.disk_bytes() == 0
    for read in (lambda: reference.read_shard(0), reference.read_head):
        with pytest.raises(BrokenFileError, match="is missing"):
            read()
    with pytest.raises(OSError, match="base"):
        reference.write_shard(1, *random_shard(4))
    with pytest.raises(OSError, match="base"):
        reference.save(manifest())
    with pytest.raises(NoReferenceError):
        ReferenceDirectory(tmp_path).delete("base")
    assert not os.listdir(tmp_path)


def test_what_another_server_did_not_delete_to_the_end_goes_with_the_next(tmp_path: Path):
    create(tmp_path, "first")
    (tmp_path / "first").rename(tmp_path / ".deleted-by-a-server-that-was-killed")
    create(tmp_path, "second")
    ReferenceDirectory(tmp_path).delete("second")
    assert not os.listdir(tmp_path)


def test_files_that_come_and_go_while_their_bytes_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reference = create(tmp_path)
    num_bytes = reference.disk_bytes()
    (reference.path / ".partial").write_bytes(b"half")
    stat = Path.stat

    def gone(path: Path, **options: bool) -> os.stat_result:
        if path.name == ".partial":
            path.unlink(missing_ok=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", gone)
    assert reference.disk_bytes() == num_bytes


def test_one_reference_has_many_windows(tmp_path: Path):
    """More than six digits name."""
    reference: StoredReference = create(tmp_path, text=StoredText.of(DOCUMENTS))
    reference.write_shard(1_234_567, *random_shard(1))
    assert reference.recorded() == {1_234_567}
