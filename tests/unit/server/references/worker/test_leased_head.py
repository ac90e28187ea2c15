"""The right reference's head is on a worker's device, whatever its threads do meanwhile."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from scoremode_server.references.files.directory import ReferenceDirectory
from scoremode_server.references.worker.heads import PADDING_BYTES, LeasedHead
from scoremode_server.references.worker.orders import LeaseCall
from scoremode_server.references.worker.sinks import WorkerWindows
from scoremode_server.settings import HEAD_VARIABLE


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


def test_on_a_gpu_a_head_that_is_larger_than_what_is_reserved_is_refused():
    layer = Layer(None)
    layer.num_bytes = 2 * PADDING_BYTES
    leased = LeasedHead(1, torch.device("meta"), Layer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"more than the {1 + PADDING_BYTES} that this server reserves: start it with"):
        leased._place(layer, "a")  # type: ignore[arg-type]
    LeasedHead(1, torch.device("cpu"), Layer)._place(layer, "a")  # type: ignore[arg-type]


def test_a_flag_reserves_memory_for_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    windows, model = WorkerWindows(ReferenceDirectory(tmp_path)), SimpleNamespace(dtype=torch.bfloat16)
    model.get_vocab_size, model.get_hidden_size = lambda: 10, lambda: 3
    monkeypatch.setenv(HEAD_VARIABLE, "1K")
    config = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=2))
    windows.allocate(config, torch.device("cpu"))  # type: ignore[arg-type]
    assert len(windows.leased._memory) == 1024 + PADDING_BYTES


def test_each_reference_with_the_lease_has_its_own_head_placed(tmp_path: Path):
    """Even if both were read under one ticket, one after the other."""
    windows, threads = WorkerWindows(ReferenceDirectory(tmp_path)), Threads()
    windows.leased = LeasedHead(1, torch.device("cpu"), Layer)  # type: ignore[arg-type]
    windows.leased._threads = threads  # type: ignore[assignment]
    for now, name in enumerate("ab"):
        read: Future[Any] = Future()
        read.set_result((Layer(None), name))
        windows.reads.threads = SimpleNamespace(submit=lambda _, call, read=read: read)  # type: ignore[assignment]
        windows.reads.begin("ticket", name, lambda: None)
        windows.exchange([], [], msgspec.to_builtins(LeaseCall("me", now, {name: "ticket"}, held=False, used=False)))
        threads.calls.pop()()
        assert windows.leased.find(name, local=False) == name
