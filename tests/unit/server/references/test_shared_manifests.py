"""Manifests that several change at once, and what is reserved for heads by what a folder's manifests say."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from reference_setup import HEAD, HIDDEN, TEXT, create, manifest

from scoremode.wire.protocol import NoiseFloor
from scoremode_server.references.directory import ReferenceDirectory, ReplacedReferenceError
from scoremode_server.references.manifest import HeadFormat, Manifest, Result

FLOOR = NoiseFloor(mean=1.0, p99=2.0, max=3.0, num_scored=4, created=5)
RESULT = Result(perplexity=2.0, perplexity_stderr=0.5, nll_mean=0.7)


def test_two_changes_at_once_are_both_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reference, both_have_read = create(tmp_path), Barrier(2)
    from_json = Manifest.from_json.__func__

    def read_then_meet(cls: type[Manifest], text: str) -> Manifest:
        read = from_json(cls, text)
        # Where only one can read at a time, nobody else comes.
        with suppress(BrokenBarrierError):
            both_have_read.wait(0.5)
        return read

    monkeypatch.setattr(Manifest, "from_json", classmethod(read_then_meet))
    with ThreadPoolExecutor() as threads:
        for changes in ({"noise_floor": FLOOR}, {"result": RESULT}):
            threads.submit(ReferenceDirectory(tmp_path).update, reference, changes)
    changed = ReferenceDirectory(tmp_path).open("base").manifest
    assert (changed.noise_floor, changed.result) == (FLOOR, RESULT)


def test_another_reference_of_the_name_is_not_changed(tmp_path: Path):
    reference, directory = create(tmp_path), ReferenceDirectory(tmp_path)
    directory.delete("base")
    create(tmp_path, identity="two")
    with pytest.raises(ReplacedReferenceError):
        directory.update(reference, {"result": RESULT})
    assert directory.open("base").manifest.result is None


def test_room_is_made_for_the_largest_head_that_can_be_compared(tmp_path: Path):
    directory = ReferenceDirectory(tmp_path)
    heads: dict[str, HeadFormat | None] = {
        "none": None,
        "fits": HEAD,
        "wider": HEAD.model_copy(update={"hidden_size": 2 * HIDDEN}),
        "of-others": HEAD.model_copy(update={"vocab_size": 500}),
        "too-many-tokens": HEAD.model_copy(update={"vocab_size": 10**12}),
        "too-wide": HEAD.model_copy(update={"hidden_size": 10**12}),
    }
    for name, head in heads.items():
        reference = directory.create(name, manifest(name, head), TEXT)
        if head is not None:
            rows, columns = min(head.vocab_size, 500), min(head.hidden_size, 100)
            reference.write_head(torch.zeros(rows, columns, dtype=torch.bfloat16), None)
    (tmp_path / "hangs").mkdir()
    os.mkfifo(tmp_path / "hangs" / "manifest.json")
    assert directory.largest_head(HEAD.vocab_size, seconds=1) == 2 * HEAD.num_bytes
    os.close(os.open(tmp_path / "hangs" / "manifest.json", os.O_RDWR))
