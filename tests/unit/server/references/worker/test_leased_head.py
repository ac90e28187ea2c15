"""Which reference's head is on a worker's device, whatever its threads do meanwhile."""

from concurrent.futures import Future
from typing import Any

import torch

from scoremode_server.references.worker.heads import LeasedHead


class Layer:
    """A head of one byte."""

    num_bytes = 1

    def __init__(self, head: Any) -> None:
        self.memory = torch.empty(0)

    def place(self, content: str, memory: torch.Tensor) -> None:
        self.memory = memory.fill_(ord(content))

    def ready(self, *, local: bool) -> str:
        return chr(int(self.memory))


class Threads:
    """One thread, which makes calls when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def submit(self, name: str, call: Any) -> Future[None]:
        future: Future[None] = Future()
        self.calls.append(lambda: future.set_result(call()))
        return future


def test_a_head_is_found_once_it_is_placed_and_a_late_one_does_not_replace_the_next():
    leased, threads = LeasedHead(1, torch.device("cpu"), Layer), Threads()  # type: ignore[arg-type]
    leased._threads = threads  # type: ignore[assignment]
    for name in "ab":
        leased.place(name, Layer(None), name)  # type: ignore[arg-type]
    found = []
    for place in threads.calls:
        place()
        found.append([leased.find(name, local=False) for name in "ab"])
    assert found == [[None, None], [None, "b"]]
    assert leased.progress("a") is None
