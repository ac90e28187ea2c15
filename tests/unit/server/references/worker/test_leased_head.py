"""Which reference's head a worker has: the same on every rank, whatever its files and threads do meanwhile."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scoremode_server.references.worker.heads import LeasedHead
from scoremode_server.references.worker.orders import WindowMark


class Layer:
    """A head of one byte, its reference's name."""

    num_bytes = 1

    def __init__(self, head: Any) -> None:
        self.memory = torch.empty(0)

    def read(self, name: str) -> str:
        return name

    def place(self, name: str, memory: torch.Tensor) -> None:
        self.memory = memory.fill_(ord(name))

    def ready(self, *, local: bool) -> str:
        return chr(int(self.memory))


class Threads:
    """Calls are made when the test says so, in any order."""

    def __init__(self) -> None:
        self.calls: dict[str, Any] = {}

    def submit(self, reference: str, call: Any) -> Future[None]:
        future: Future[None] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        self.calls[reference] = run
        return future


@pytest.fixture
def threads() -> Threads:
    return Threads()


@pytest.fixture
def leased(threads: Threads) -> LeasedHead:
    return LeasedHead(1, torch.device("cpu"), Layer, SimpleNamespace(open_same=lambda name, identity: name), threads)


def hold(leased: LeasedHead, key: str, holder: str = "one") -> bool:
    return leased.hold(WindowMark("compare", key, key, 0, 1, head=key), holder, None)  # type: ignore[arg-type]


def test_a_reference_is_held_until_no_api_server_needs_it(leased: LeasedHead, threads: Threads):
    assert hold(leased, "a")
    assert leased.find("a", local=False) is None
    threads.calls["a"]()
    assert hold(leased, "a", "two")
    leased.release("a", "one")
    assert not hold(leased, "b")
    assert (leased.num_refused, leased.find("a", local=False)) == (1, "a")
    # That of another reference changes nothing.
    leased.release("b", "two")
    assert not hold(leased, "b")
    leased.release("a", "two")
    # Until another one is held, it stays and need not be read again.
    threads.calls.clear()
    assert hold(leased, "a")
    assert (threads.calls, leased.find("a", local=False)) == ({}, "a")


def test_a_head_that_was_read_too_late_does_not_replace_the_next(leased: LeasedHead, threads: Threads):
    hold(leased, "a")
    leased.release("a", "one")
    assert hold(leased, "b")
    threads.calls["b"]()
    threads.calls["a"]()
    assert [leased.find(key, local=False) for key in "ab"] == [None, "b"]
    assert leased.progress("a") is None


def test_a_head_that_could_not_be_read_is_read_again(leased: LeasedHead, threads: Threads):
    root, leased._root = leased._root, SimpleNamespace(open_same=lambda name, identity: 1 / 0)  # type: ignore[assignment]
    hold(leased, "a")
    threads.calls["a"]()
    assert "division" in str(leased.progress("a").exception())  # type: ignore[union-attr]
    assert leased.find("a", local=False) is None
    leased._root = root
    assert hold(leased, "a")
    threads.calls["a"]()
    assert leased.find("a", local=False) == "a"
