"""The folder of references: names, files, and what happens when several processes write, delete and read."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest
import torch

from scoremode_server.references.files.directory import NoReferenceError, ReferenceDirectory
from scoremode_server.references.files.manifest import Manifest
from scoremode_server.references.files.tensors import BrokenFileError
from tests.unit.server.references.reference_setup import (
    DOCUMENTS,
    FLOOR,
    HIDDEN,
    RESULT,
    TEXT,
    create,
    files,
    full_disk,
    manifest,
    random_shard,
)


def test_the_tokens_of_windows_are_those_of_their_documents():
    windows = [(tokens, window) for tokens, windows in DOCUMENTS for window in windows]
    assert [TEXT.window(index) for index in range(len(windows))] == [
        (window.token_ids(tokens), window.first_scored) for tokens, window in windows
    ]
    assert TEXT.num_tokens.tolist() == [len(window.token_ids(tokens)) for tokens, window in windows]
    # A head is not part of the text, and the first target can be the first token after it.
    assert TEXT.window(0) == ([99, *range(10, 18)], 1)
    assert TEXT.window(3) == (list(range(50, 57)), 1)


def test_a_copied_reference_is_what_was_written(tmp_path: Path):
    created = create(tmp_path / "here")
    shards = {index: random_shard(index % 7 + 1, index) for index in (0, 2, 1_234_567)}
    for index, shard in shards.items():
        created.write_shard(index, *shard)
    weight, bias = torch.randn(100, HIDDEN).bfloat16(), torch.randn(100).bfloat16()
    created.write_head(weight, bias)
    shutil.copytree(tmp_path / "here" / "base", tmp_path / "there" / "copy")
    opened = ReferenceDirectory(tmp_path / "there").open("copy")
    assert opened.manifest == manifest()
    assert opened.recorded_windows() == shards.keys()
    for index, shard in shards.items():
        assert all(map(torch.equal, opened.read_shard(index), shard))
    assert all(map(torch.equal, opened.read_head(), (weight, bias)))
    created.write_head(weight, None)
    assert created.read_head()[1] is None
    assert np.array_equal(opened.text.token_ids, TEXT.token_ids)
    assert np.array_equal(opened.text.windows, TEXT.windows)
    assert opened.disk_bytes() == sum(map(len, files(tmp_path / "there").values()))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../base", "a/b", "/etc", ".base", "-base", "base\n", "bäse", "a b", "a" * 129, "a\0"]
)
def test_names_are_never_paths(tmp_path: Path, name: str):
    directory = ReferenceDirectory(tmp_path / "root")
    create(tmp_path, "base")
    before = files(tmp_path)
    for use in (directory.open, directory.delete, lambda name: directory.create(name, manifest(), TEXT)):
        with pytest.raises(NoReferenceError):
            use(name)
    assert files(tmp_path) == before


def test_whatever_may_be_a_reference_has_a_name_and_opening_it_tells(tmp_path: Path):
    root = tmp_path / "root"
    directory = ReferenceDirectory(root)
    assert directory.names() == []
    for name in ("b", "a"):
        create(root, name)
    for name in ("cut", "latin", "not a name", ".partial"):
        create(root, "x").path.rename(root / name)
    (root / "cut" / "manifest.json").write_text("{")
    (root / "latin" / "manifest.json").write_bytes(b"\xff")
    (root / "empty").mkdir()
    (root / "file").write_text("")
    assert directory.names() == ["a", "b", "cut", "empty", "file", "latin"]
    for name in ("empty", "file", "none"):
        with pytest.raises(NoReferenceError, match=name):
            directory.open(name)
    for name in ("cut", "latin"):
        with pytest.raises(BrokenFileError, match=rf"{name}/manifest\.json"):
            directory.open(name)


def test_files_of_other_windows_and_references_are_refused(tmp_path: Path):
    mine, other = create(tmp_path, "mine", "one"), create(tmp_path, "other", "two")
    for reference in (mine, other):
        reference.write_shard(0, *random_shard(4))
        reference.write_head(torch.ones(100, HIDDEN), None)
    shutil.copy(mine.shard(0), mine.shard(1))
    for name in ("windows/000000.safetensors", "lm_head.safetensors", "tokens.safetensors"):
        shutil.copy(other.path / name, mine.path / name)
    for read in (lambda: mine.read_shard(0), lambda: mine.read_shard(1), mine.read_head, lambda: mine.text):
        with pytest.raises(BrokenFileError, match="belongs to something else"):
            read()


def test_files_of_killed_writers_are_not_windows(tmp_path: Path):
    reference = create(tmp_path)
    reference.write_shard(0, *random_shard(4))
    for name in (".000001.safetensors.c0ffee", "000002.safetensors.bak", "1 copy.safetensors"):
        (reference.path / "windows" / name).write_bytes(b"half")
    assert reference.recorded_windows() == {0}


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


def test_what_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reference = create(tmp_path)
    before = files(tmp_path)
    monkeypatch.setattr(Path, "write_text", lambda path, text: full_disk(path.write_bytes(text.encode()[:10])))
    with pytest.raises(OSError, match="No space left"):
        reference.save(manifest("two"))
    with pytest.raises(OSError, match="No space left"):
        create(tmp_path, "another")
    assert files(tmp_path) == before


def test_a_reference_that_is_deleted_while_it_is_open_stays_away(tmp_path: Path):
    reference = create(tmp_path, "base")
    reference.write_shard(0, *random_shard(4))
    text = reference.text
    create(tmp_path, "first").path.rename(tmp_path / ".deleted-by-a-server-that-was-killed")
    ReferenceDirectory(tmp_path).delete("base")
    assert text.window(0) == TEXT.window(0)
    assert (reference.recorded_windows(), reference.disk_bytes()) == (set(), 0)
    for read in (lambda: reference.read_shard(0), reference.read_head):
        with pytest.raises(BrokenFileError, match="is missing"):
            read()
    for write in (lambda: reference.write_shard(1, *random_shard(4)), lambda: reference.save(manifest())):
        with pytest.raises(OSError, match="base"):
            write()
    with pytest.raises(NoReferenceError):
        ReferenceDirectory(tmp_path).delete("base")
    assert not os.listdir(tmp_path)


def test_two_changes_at_once_are_both_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reference, both_have_read = create(tmp_path), Barrier(2)
    from_json = Manifest.from_json.__func__

    def read_then_meet(cls: type[Manifest], text: str) -> Manifest:
        read = from_json(cls, text)
        # Where only one can read at a time, nobody else comes.
        with suppress(BrokenBarrierError):
            both_have_read.wait(0.5)
        return read

    with monkeypatch.context() as patch, ThreadPoolExecutor() as threads:
        patch.setattr(Manifest, "from_json", classmethod(read_then_meet))
        for changes in (lambda of_disk: of_disk.noise_floor_changes("decode", FLOOR), lambda _: {"result": RESULT}):
            threads.submit(ReferenceDirectory(tmp_path).update, reference, changes)
        threads.shutdown()
    directory = ReferenceDirectory(tmp_path)
    changed = directory.open("base").manifest
    assert (changed.lane_noise_floors, changed.result) == ({"decode": FLOOR}, RESULT)
    # But not to another reference of the name.
    directory.delete("base")
    create(tmp_path, identity="two")
    with pytest.raises(NoReferenceError, match="another has its name now"):
        directory.update(reference, lambda _: {"result": RESULT})
    assert directory.open("base").manifest.result is None


def test_deleting_a_link_leaves_what_it_leads_to_and_nothing_else(tmp_path: Path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    create(elsewhere)
    before = files(elsewhere)
    root.mkdir()
    (root / "link").symlink_to(elsewhere / "base")
    (root / "broken").symlink_to(elsewhere / "none")
    (root / "file").write_text("")
    for name in ("link", "broken", "file"):
        ReferenceDirectory(root).delete(name)
    assert os.listdir(root) == []
    assert files(elsewhere) == before
