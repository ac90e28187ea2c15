"""What the command `scoremode` sets for the processes of a server."""

import os

import pytest
from vllm.platforms import current_platform

from scoremode_server.cli import MMAP_THRESHOLD, MMAP_THRESHOLD_VARIABLE, keep_tensors_off_the_heap, tokenizer_threads


@pytest.mark.parametrize(
    ("is_cpu", "given", "expected"),
    [(True, None, str(MMAP_THRESHOLD)), (True, "4194304", "4194304"), (False, None, None)],
)
def test_tensors_of_a_cpu_engine_stay_off_the_heap(monkeypatch, is_cpu, given, expected):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: is_cpu)
    # Set first, so that it is restored.
    monkeypatch.setenv(MMAP_THRESHOLD_VARIABLE, given or "")
    if given is None:
        del os.environ[MMAP_THRESHOLD_VARIABLE]
    keep_tensors_off_the_heap()
    assert os.environ.get(MMAP_THRESHOLD_VARIABLE) == expected


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (4, 1), (8, 2), (16, 4), (128, 4)])
def test_one_core_in_four_encodes_texts(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert tokenizer_threads() == threads
