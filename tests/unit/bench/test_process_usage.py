"""What a benchmark takes for a process's memory, for growth, and for something left over."""

import subprocess

import process_usage
import pytest
from process_usage import Growth, Usage


def test_memory_of_files_does_not_count():
    rollup = "00400000-7ffe ---p 00000000 00:00 0  [rollup]\nRss: 99 kB\nPss: 90 kB\nPss_Anon: 20 kB\nPss_File: 60 kB\n"
    assert process_usage.own_bytes(rollup + "Pss_Shmem: 10 kB\nSwap: 7 kB\nSwapPss: 5 kB\n") == 35 * 1024


def test_processes_of_a_session_are_looked_at():
    # A session of its own: what leads this one may belong to another user, whose memory nobody may read.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        found = process_usage.usage(process.pid)
        process.communicate()
    assert list(found) == [process.pid]
    assert found[process.pid].num_bytes > 0
    assert found[process.pid].open_files >= 3


def usage(num_bytes: int = 0, open_files: int = 0, name: str = "engine") -> Usage:
    return Usage(name, num_bytes, open_files)


def test_growth_is_from_the_first_tenth_to_the_last():
    sizes = [100, 110, *[500] * 16, 120, 132]
    samples = [{1: usage(size), 2: usage(7)} for size in sizes] + [{1: usage(132)}]
    (growth,) = process_usage.growths(samples[:20])[:1]
    assert (growth.name, growth.first, growth.last) == ("engine (1)", 105, 126)
    assert growth.share == pytest.approx(0.2)
    assert [each.name for each in process_usage.growths(samples)] == ["engine (1)"], (
        "process 2 is gone, and told of elsewhere"
    )


def test_few_samples_have_a_growth_too():
    assert process_usage.growths([{1: usage(100)}, {1: usage(103)}]) == [Growth("engine (1)", 100, 103)]


def test_processes_and_files_that_are_left_over():
    before = {1: usage(open_files=10), 2: usage(open_files=10), 3: usage(name="worker")}
    after = {1: usage(open_files=13), 2: usage(open_files=14), 4: usage(name="helper")}
    assert list(process_usage.left_over(before, after, clients=4)) == [
        "a process is gone: worker (3)",
        "a process is new: helper (4)",
        "engine (2) has 4 more open files",
    ]
    assert list(process_usage.left_over(before, before, clients=1)) == []
