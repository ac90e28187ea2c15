"""Files of tensors: whole or not there, and unchanged or refused."""

import functools
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from scoremode_server.references.tensor_files import BrokenFileError, partial_path, read_tensors, write_tensors

ABOUT = {"reference": "one", "part": "window 3"}


def tensors() -> dict[str, torch.Tensor]:
    values = torch.arange(24).view(4, 6)
    return {"states": values.bfloat16(), "logprobs": -values[:, 0].float(), "ids": values.int()}


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]) for name, tensor in actual.items()
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "000003.safetensors"
    write_tensors(path, tensors(), ABOUT)
    return path


def test_what_was_written_is_read_in_its_dtypes(path: Path):
    assert same(read_tensors(path, ABOUT), tensors())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
@pytest.mark.parametrize("shape", [(0,), (1,), (0, 5), (3, 1, 2)])
def test_shapes_and_dtypes(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]):
    written = {"values": torch.ones(shape).to(dtype), "more": torch.zeros(3)}
    write_tensors(tmp_path / "file", written, ABOUT)
    assert same(read_tensors(tmp_path / "file", ABOUT), written)


def test_other_tools_read_it(path: Path):
    from safetensors.torch import load_file

    assert same(load_file(path), tensors())


def test_the_same_tensors_make_the_same_bytes(path: Path):
    before = path.read_bytes()
    write_tensors(path, tensors(), ABOUT)
    assert path.read_bytes() == before


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF, ord(" ") ^ ord("\t"), ord(" ") ^ ord("\n")])
def test_no_byte_can_change(path: Path, change: int):
    content = path.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= change
        path.write_bytes(changed)
        with pytest.raises(BrokenFileError, match="000003"):
            read_tensors(path, ABOUT)


def test_no_byte_can_be_missing_or_added(path: Path):
    content = path.read_bytes()
    for cut in [*(content[:length] for length in range(len(content))), content + b"\0", content[1:]]:
        path.write_bytes(cut)
        with pytest.raises(BrokenFileError, match="000003"):
            read_tensors(path, ABOUT)


@pytest.mark.parametrize("about", [{**ABOUT, "reference": "two"}, {**ABOUT, "part": "window 4"}, {}])
def test_a_file_of_something_else_is_refused(path: Path, about: dict[str, str]):
    with pytest.raises(BrokenFileError, match="belongs to something else"):
        read_tensors(path, about)


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path, path: Path):
    from safetensors.torch import save_file

    save_file(tensors(), tmp_path / "foreign")
    (tmp_path / "text").write_text("hidden states")
    for name, reason in [("none", "is missing"), ("foreign", "damaged"), ("text", "damaged"), (".", "damaged")]:
        with pytest.raises(BrokenFileError, match=reason):
            read_tensors(tmp_path / name, ABOUT)


def test_what_was_read_stays_when_the_file_goes(path: Path):
    """A memory map would end the process when the file is cut short."""
    read = read_tensors(path, ABOUT)
    os.truncate(path, 0)
    path.unlink()
    assert same(read, tensors())


@pytest.mark.processes
def test_a_full_disk_is_an_error_and_changes_nothing(path: Path):
    """In a process of its own, whose files may have 100 bytes at most."""
    before = path.read_bytes()
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from scoremode_server.references.tensor_files import write_tensors\n"
        "try:\n    write_tensors(Path(sys.argv[1]), {'values': torch.zeros(100)}, {})\n"
        "except OSError as error:\n    print(error)"
    )
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100, 100))
    writer = subprocess.run(
        [sys.executable, "-c", code, str(path)], preexec_fn=limit, capture_output=True, text=True, check=True
    )
    assert path.name in writer.stdout
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path):
    with pytest.raises(OSError, match="gone"):
        write_tensors(tmp_path / "gone" / "file", tensors(), ABOUT)


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path):
    path = tmp_path / "file"
    write_tensors(path, tensors(), ABOUT)

    def write_and_read(number: int) -> bool:
        write_tensors(path, tensors(), ABOUT)
        return same(read_tensors(path, ABOUT), tensors())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(write_and_read, range(100)))
    assert os.listdir(tmp_path) == ["file"]


def test_no_two_writers_share_a_partial_file(path: Path):
    """Neither two of one thread, as two hosts may have of the same ids."""
    assert partial_path(path) != partial_path(path)
    assert partial_path(path).parent == path.parent
