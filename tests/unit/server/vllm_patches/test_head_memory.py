"""Which heads are in a worker's room: the same on every rank, whatever its files and threads do meanwhile."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from scoremode_server.vllm_patches.reference_heads import ALIGNMENT, HeadMemory

CPU = torch.device("cpu")


class Layer:
    """A head of some units of memory."""

    def __init__(self, units: int) -> None:
        self.num_bytes = units * ALIGNMENT - 1
        self.memory = torch.empty(0)
        self.read = self.ready = lambda *arguments, **options: self

    def place(self, memory: torch.Tensor) -> None:
        self.memory = memory


class Threads:
    """Calls are made at once, or only when the test says so."""

    def __init__(self) -> None:
        self.held: list[Any] | None = None

    def submit(self, reference: str, call: Any) -> Future[None]:
        future: Future[None] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        if self.held is None:
            run()
        else:
            self.held.append(run)
        return future


@pytest.fixture
def threads() -> Threads:
    return Threads()


@pytest.fixture
def room(threads: Threads) -> HeadMemory:
    room = HeadMemory(0, CPU, Layer, threads)  # type: ignore[arg-type]
    room._memory = room._memory[: 4 * ALIGNMENT]
    room._placing = threads  # type: ignore[assignment]
    return room


def read(room: HeadMemory, key: str, units: int) -> None:
    room.read(key, key, units, lambda: None)  # type: ignore[arg-type, return-value]


def hold(room: HeadMemory, key: str, units: int, holder: str = "one") -> str:
    read(room, key, units)
    room.hold(key, holder)
    return room.state(key, holder)


def test_a_held_head_stays_and_others_wait_in_order(room: HeadMemory):
    hold(room, "a", 3)
    hold(room, "a", 3, "two")
    assert hold(room, "b", 3) == "waiting"
    # It would fit, but the one before it would then wait for ever.
    assert hold(room, "c", 1) == "waiting"
    assert room.is_contended
    room.release("a", "one")
    assert room.state("b", "one") == "waiting"
    room.release("a", "two")
    assert [room.state(key, "one") for key in "abc"] == ["absent", "placed", "placed"]
    assert not room.is_contended


def test_heads_of_other_sizes_do_not_overlap(room: HeadMemory):
    for key, units in (("a", 1), ("b", 2), ("c", 1)):
        hold(room, key, units)
    room.release("b", "one")
    for key in "de":
        hold(room, key, 1)
    placed = sorted((each.start, each.end) for each in room._placed.values())
    assert placed == [(start * ALIGNMENT, (start + 1) * ALIGNMENT) for start in range(4)]
    for key in "acde":
        found: Any = room.find(key, local=False)
        found.memory.fill_(ord(key))
    assert sorted(set(room._memory.tolist()) & set(b"acde")) == list(b"acde")


def test_no_decision_depends_on_how_far_a_thread_is(room: HeadMemory, threads: Threads):
    """A rank that is slow says so, and has the same heads in the same places."""
    hold(room, "a", 3)
    room.release("a", "one")
    read(room, "b", 2)
    threads.held = []
    room.hold("b", "one")
    assert room.state("b", "one") == "waiting"
    assert room.find("b", local=False) is None
    assert (room.state("a", "one"), room._placed["b"].start) == ("absent", 0)
    (run,) = threads.held
    run()
    assert room.state("b", "one") == "placed"
