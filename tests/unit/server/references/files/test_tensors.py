"""Files of tensors and the manifest: whole or not there, and unchanged or refused."""

import math
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scoremode_server.references.files.manifest import Manifest, text_fingerprint
from scoremode_server.references.files.tensors import BrokenFileError, read_tensors, write_tensors
from tests.full_disk import no_file_longer_than
from tests.unit.server.references.reference_setup import FLOOR, PLAN, RESULT, TEXT, manifest

ABOUT = {"reference": "one", "part": "window 3"}
VALUES = torch.arange(24).view(4, 6)
TENSORS = {
    "states": VALUES.bfloat16(),
    "logprobs": torch.ones(3, 1, 2),
    "ids": VALUES.int(),
    "none": torch.ones(0, 5).half(),
}


def is_written(actual: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == TENSORS.keys() and all(
        tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name]) for name, tensor in actual.items()
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "000003.safetensors"
    write_tensors(path, TENSORS, ABOUT)
    return path


def test_tensors_are_read_in_their_shapes_and_dtypes_by_us_and_others(path: Path):
    assert is_written(load_file(path))
    read, before = read_tensors(path, ABOUT), path.read_bytes()
    # A memory map would end the process when the file is cut short.
    os.truncate(path, 0)
    assert is_written(read)
    write_tensors(path, TENSORS, ABOUT)
    assert path.read_bytes() == before


def test_what_is_read_is_what_was_written_whichever_byte_changes_or_is_missing(path: Path):
    content = path.read_bytes()
    damaged = [content[1:]]
    for position, byte in enumerate(content):
        changed = bytes([byte ^ 1 << position % 8])
        damaged += [content[:position], content[:position] + changed + content[position + 1 :]]
    for each in damaged:
        # To a new file: one that is written over is flushed to the disk.
        path.unlink()
        path.write_bytes(each)
        # The header's bytes may change where they mean the same.
        with suppress(BrokenFileError):
            assert is_written(read_tensors(path, ABOUT))


def test_other_files_are_refused(tmp_path: Path, path: Path):
    for about in ({**ABOUT, "reference": "two"}, {**ABOUT, "part": "window 4"}, {}):
        with pytest.raises(BrokenFileError, match="belongs to something else"):
            read_tensors(path, about)
    save_file(TENSORS, tmp_path / "foreign")
    (tmp_path / "text").write_text("hidden states")
    for name, reason in [("none", "is missing"), ("foreign", "damaged"), ("text", "damaged"), (".", "damaged")]:
        with pytest.raises(BrokenFileError, match=reason):
            read_tensors(tmp_path / name, ABOUT)


def test_a_full_disk_is_an_error_and_changes_nothing(path: Path):
    before = path.read_bytes()
    with no_file_longer_than(100), pytest.raises(OSError, match=path.name):
        write_tensors(path, {"values": torch.zeros(100)}, ABOUT)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


# The manifest


@pytest.mark.parametrize("perplexity", [12.5, math.inf])
def test_what_was_written_is_read(perplexity: float):
    result = RESULT.model_copy(update={"perplexity": perplexity, "perplexity_stderr": None})
    written = manifest().model_copy(update={"result": result, "noise_floor": FLOOR})
    assert Manifest.from_json(written.to_json()) == written


def test_no_character_that_means_something_can_change_or_be_cut_off():
    """Other white space between fields is not a change."""
    text = manifest().to_json()
    for position, character in enumerate(text):
        for changed in (text[:position], text[:position] + chr(ord(character) ^ 1) + text[position + 1 :]):
            if not character.isspace() or changed == text[:position]:
                with pytest.raises(ValueError, match=r"^it |^expected|^EOF|line"):
                    Manifest.from_json(changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format_version": 1, "layers": []}', "format version 1, and this server reads 2"),
        ('{"format_version": "2"}', "format version 2, and this server reads 2"),
        *(("{}", "format version None"), ("[]", "JSON"), ("null", "JSON"), ("[" * 100_000, "recursion")),
    ],
)
def test_other_json_and_other_format_versions_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        Manifest.from_json(text)


def test_text_fingerprints_differ_with_tokens_windows_and_methods():
    token_ids, windows = TEXT.token_ids, TEXT.windows
    others = [
        text_fingerprint(token_ids, windows, "rolling"),
        text_fingerprint(token_ids[:-1], windows, "sliding"),
        text_fingerprint(token_ids + 1, windows, "sliding"),
        text_fingerprint(token_ids, windows + 1, "sliding"),
        # As many numbers, divided otherwise.
        text_fingerprint(np.concatenate([token_ids, windows[0]]), windows[1:], "sliding"),
    ]
    assert len({PLAN.fingerprint, *others}) == 6
    assert text_fingerprint(token_ids.copy(), windows.copy(), "sliding") == PLAN.fingerprint
