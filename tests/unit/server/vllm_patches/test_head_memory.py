"""Which heads are in a worker's room: the same on every rank, whatever its files and threads do meanwhile."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scoremode_server.vllm_patches.reference_heads import ALIGNMENT, HeadMemory
from scoremode_server.vllm_patches.row_spec import WindowMark

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
    root = SimpleNamespace(open_same=lambda name, identity: None)
    room = HeadMemory(0, CPU, Layer, root, threads)  # type: ignore[arg-type]
    room._memory = room._memory[: 4 * ALIGNMENT]
    room._placing = threads  # type: ignore[assignment]
    return room


def hold(room: HeadMemory, key: str, units: int, holder: str = "one") -> bool:
    """Whether it is placed at once."""
    room.hold(WindowMark("compare", key, key, 0, 1, head=key), holder, units)  # type: ignore[arg-type]
    room.place(key)
    return is_placed(room, key)


def is_placed(room: HeadMemory, key: str) -> bool:
    return room.find(key, local=False) is not None


def test_the_head_that_was_held_last_stays_longest(room: HeadMemory):
    for key in "abcd":
        assert hold(room, key, 1)
        room.release(key, "one", is_usable=True)
    for key in "ae":
        hold(room, key, 1)
        room.release(key, "one", is_usable=True)
    assert [is_placed(room, key) for key in "abcde"] == [True, False, True, True, True]


def test_a_held_head_stays_and_others_wait_in_order(room: HeadMemory):
    hold(room, "a", 3)
    hold(room, "a", 3, "two")
    assert not hold(room, "b", 3)
    # It would fit, but the one before it would then wait for ever.
    assert not hold(room, "c", 1)
    assert room.is_contended
    assert room.progress("b") is None
    room.release("a", "one", is_usable=True)
    assert not is_placed(room, "b")
    room.release("a", "two", is_usable=True)
    assert [is_placed(room, key) for key in "abc"] == [False, True, True]
    assert not room.is_contended


def test_heads_of_other_sizes_do_not_overlap(room: HeadMemory):
    for key, units in (("a", 1), ("b", 2), ("c", 1)):
        hold(room, key, units)
    room.release("b", "one", is_usable=True)
    for key in "de":
        hold(room, key, 1)
    placed = sorted((each.start, each.end) for each in room._heads.values())
    assert placed == [(start * ALIGNMENT, (start + 1) * ALIGNMENT) for start in range(4)]
    for key in "acde":
        found: Any = room.find(key, local=False)
        found.memory.fill_(ord(key))
    assert sorted(set(room._memory.tolist()) & set(b"acde")) == list(b"acde")


def test_no_decision_depends_on_how_far_a_thread_is(room: HeadMemory, threads: Threads):
    """A rank that is slow says so, and has the same heads in the same places."""
    hold(room, "a", 3)
    room.release("a", "one", is_usable=True)
    room.hold(WindowMark("compare", "b", "b", 0, 1, head="b"), "one", 2)  # type: ignore[arg-type]
    threads.held = []
    room.place("b")
    begun = room.progress("b")
    assert begun is not None
    assert not begun.done()
    assert not is_placed(room, "b")
    assert (room.progress("a"), room._heads["b"].start) == (None, 0)
    (run,) = threads.held
    run()
    assert begun.done()
    assert is_placed(room, "b")


def test_a_head_that_is_not_usable_is_dropped(room: HeadMemory):
    def missing(name: str, identity: str) -> None:
        raise ValueError("it is missing")

    room._root = SimpleNamespace(open_same=missing)  # type: ignore[assignment]
    room.hold(WindowMark("compare", "a", "a", 0, 1, head="a"), "one", 2)  # type: ignore[arg-type]
    assert str(room.progress("a").exception()) == "it is missing"  # type: ignore[union-attr]
    room.release("a", "one", is_usable=False)
    assert room.progress("a") is None
    # An order that comes too late changes nothing.
    room.release("a", "one", is_usable=False)
    hold(room, "b", 1)
    room.release("b", "one", is_usable=False)
    assert not room._heads
