"""CPU time out of /proc: which process counts as the API server, and which as the engine."""

import os
import time

import pytest
from cpu_time import TICKS_PER_SECOND, CpuSeconds, Process, cpu_seconds, total


def line(pid: int, name: str, parent: int, user: int, system: int) -> str:
    return f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 4194304 9 8 7 6 {user} {system} 55 66 20 0 5 0 100 200 300\n"


def processes(*lines: str) -> list[Process]:
    return [Process.parse(each) for each in lines]


@pytest.mark.parametrize("name", ["python3", "VLLM::EngineCor", "a (b) c", ") S 1 ("])
def test_a_name_may_hold_anything(name: str):
    assert Process.parse(line(41, name, 7, 120, 30)) == Process(41, name, 7, 150)


def test_the_engine_is_what_runs_below_the_server():
    found = total(
        processes(
            line(1, "init", 0, 999, 999),
            line(10, "python3", 1, 200, 100),
            line(11, "VLLM::EngineCor", 10, 1000, 500),
            line(12, "VLLM::Worker_TP", 11, 70, 30),
            line(20, "python3", 1, 5000, 5000),
            line(21, "VLLM::EngineCor", 20, 5000, 5000),
        ),
        server=10,
    )
    assert found == CpuSeconds(300 / TICKS_PER_SECOND, 1600 / TICKS_PER_SECOND)


def test_several_api_servers_are_summed():
    found = total(
        processes(
            line(10, "python3", 1, 1, 1),
            line(11, "VLLM::APIServer", 10, 20, 0),
            line(12, "VLLM::APIServer", 10, 30, 0),
            line(13, "VLLM::EngineCor", 10, 400, 0),
        ),
        server=10,
    )
    assert found == CpuSeconds(52 / TICKS_PER_SECOND, 400 / TICKS_PER_SECOND)


def test_what_was_used_between_two_readings():
    assert CpuSeconds(5, 7) - CpuSeconds(1, 4) == CpuSeconds(4, 3)


def test_this_process_is_charged_for_its_own_work():
    before = cpu_seconds(os.getpid())
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    used = cpu_seconds(os.getpid()) - before
    assert used.api == pytest.approx(0.2, abs=0.1)
