"""The folder of references: names, files, and what happens when several processes write, delete and read."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_setup import DOCUMENTS, HIDDEN, TEXT, create, files, manifest, random_shard

from scoremode_server.references.directory import NoReferenceError, ReferenceDirectory
from scoremode_server.references.tensor_files import BrokenFileError


def test_the_tokens_of_windows_are_those_of_their_documents():
    windows = [(tokens, window) for tokens, windows in DOCUMENTS for window in windows]
    for index, (tokens, window) in enumerate(windows):
        assert TEXT.window(index) == (window.token_ids(tokens), window.first_scored)
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
    assert opened.recorded() == shards.keys()
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


def test_files_of_killed_writers_are_not_windows_and_can_be_removed(tmp_path: Path):
    reference = create(tmp_path)
    reference.write_shard(0, *random_shard(4))
    before = files(tmp_path)
    now = (reference.path / "manifest.json").stat().st_mtime
    abandoned = {"windows/.000001.safetensors.c0ffee", ".manifest.json.c0ffee"}
    others = {".manifest.json.being-written", "windows/000002.safetensors.bak", "windows/1 copy.safetensors"}
    for name in abandoned | others:
        (reference.path / name).write_bytes(b"half")
        os.utime(reference.path / name, (0, now - (90 if name in abandoned else 30)))
    assert reference.recorded() == {0}
    reference.remove_partial_files()
    assert files(tmp_path).keys() - before.keys() == {f"base/{name}" for name in others}


def test_a_reference_that_is_deleted_while_it_is_open_stays_away(tmp_path: Path):
    reference = create(tmp_path, "base")
    reference.write_shard(0, *random_shard(4))
    text = reference.text
    create(tmp_path, "first").path.rename(tmp_path / ".deleted-by-a-server-that-was-killed")
    ReferenceDirectory(tmp_path).delete("base")
    assert text.window(0) == TEXT.window(0)
    assert (reference.recorded(), reference.disk_bytes()) == (set(), 0)
    for read in (lambda: reference.read_shard(0), reference.read_head):
        with pytest.raises(BrokenFileError, match="is missing"):
            read()
    for write in (lambda: reference.write_shard(1, *random_shard(4)), lambda: reference.save(manifest())):
        with pytest.raises(OSError, match="base"):
            write()
    with pytest.raises(NoReferenceError):
        ReferenceDirectory(tmp_path).delete("base")
    assert not os.listdir(tmp_path)


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


HANGS = """
import threading
from scoremode_server.references.file_threads import FileThreads
begun = threading.Event()
FileThreads().submit("hangs", lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""


@pytest.mark.processes
def test_a_process_ends_while_a_file_hangs():
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=120)
