"""The command `scoremode`."""

import os
import platform
import subprocess
import sys

import pytest
from vllm.platforms import current_platform

from scoremode_server.cli import MMAP_THRESHOLD_VARIABLE, keep_tensors_off_the_heap, tokenizer_threads


@pytest.mark.processes
@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["--help"], 0), ([], 2), (["score"], 2)])
def test_unknown_commands_have_an_exit_status(arguments, status):
    command = [sys.executable, "-c", "from scoremode_server.cli import main; main()", *arguments]
    assert subprocess.run(command, capture_output=True).returncode == status


HOLES = """
import ctypes

class Mallinfo2(ctypes.Structure):
    _fields_ = [(f"field_{index}", ctypes.c_size_t) for index in range(8)] + [("free", ctypes.c_size_t)]
    _fields_ += [("top", ctypes.c_size_t)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
bytearray(24 << 20)
tensor = bytearray(8 << 20)
stays = bytearray(1 << 20)
del tensor
info = libc.mallinfo2()
print(info.free - info.top)
"""
"""Prints the bytes of holes in a process's heap after a large block was freed below one that stays."""


@pytest.mark.processes
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not current_platform.is_cpu(), reason="for a CPU engine, on glibc"
)
def test_tensors_leave_no_holes_in_the_heap_of_an_engine(monkeypatch):
    def holes() -> int:
        return int(subprocess.run([sys.executable, "-c", HOLES], capture_output=True, check=True).stdout)

    monkeypatch.delenv(MMAP_THRESHOLD_VARIABLE, raising=False)
    assert holes() > 4 * 1024**2
    keep_tensors_off_the_heap()
    assert holes() < 1024**2
    monkeypatch.setenv(MMAP_THRESHOLD_VARIABLE, "4194304")
    keep_tensors_off_the_heap()
    assert os.environ[MMAP_THRESHOLD_VARIABLE] == "4194304"


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (4, 1), (8, 2), (16, 4), (128, 4)])
def test_one_core_in_four_encodes_texts(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert tokenizer_threads() == threads
