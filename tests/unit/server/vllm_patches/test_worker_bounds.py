"""What a worker keeps of references is bounded, and neither a step nor a call waits for a file."""

import os
from dataclasses import asdict
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

from scoremode_server.references import tensor_files
from scoremode_server.references.directory import ReferenceDirectory, StoredReference
from scoremode_server.vllm_patches import install, reference_windows
from scoremode_server.vllm_patches.reference_windows import Orders, RecordedWindow, ReferenceWindows
from scoremode_server.vllm_patches.row_spec import WindowMark
from tests.unit.server.references.reference_setup import HIDDEN, create, random_shard
from tests.unit.server.vllm_patches.linear_scorer import let_all_be_written

WINDOW_BYTES = 5 * HIDDEN * 4


@pytest.fixture
def windows(tmp_path: Path) -> ReferenceWindows:
    windows = ReferenceWindows(ReferenceDirectory(tmp_path))
    windows.heads = SimpleNamespace(is_contended=False)  # type: ignore[assignment]
    return windows


def mark(action: Any, index: int) -> WindowMark:
    return WindowMark(action, "base", "one", index, 5, ticket=str(index))


def finish(windows: ReferenceWindows, index: int) -> None:
    """What a step does with the last rows of a window that is recorded."""
    window = windows.begin(mark("record", index), writes=True)
    assert isinstance(window, RecordedWindow)
    window.hidden_states, window.logprobs = [torch.zeros(5, HIDDEN)], [torch.zeros(5)]
    window.finish()


def told(windows: ReferenceWindows, *tickets: str) -> list[str | None]:
    files: dict[str, str | None] = windows.exchange("test", Orders(files=list(tickets)), pinned=False)["files"]
    return list(files.values())


def test_a_step_does_not_wait_for_the_disk(windows: ReferenceWindows, monkeypatch: pytest.MonkeyPatch):
    create(windows.root.root)
    let_go, write_shard = Event(), StoredReference.write_shard
    monkeypatch.setattr(StoredReference, "write_shard", lambda *each: (let_go.wait(), write_shard(*each)))
    monkeypatch.setattr(reference_windows, "MAX_UNWRITTEN_BYTES", 40 * WINDOW_BYTES)
    for index in range(50):
        finish(windows, index)
    assert told(windows, "0", "39", "40", "49") == [
        None,
        None,
        *2 * [f"{40 * WINDOW_BYTES} bytes wait for the disk already"],
    ]
    let_go.set()
    let_all_be_written(windows)
    assert windows.root.open("base").recorded() == set(range(40))
    assert told(windows, "0", "39") == ["", ""]


def test_of_files_that_nobody_asks_for_the_last_are_known(windows: ReferenceWindows, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    create(windows.root.root)
    monkeypatch.setattr(tensor_files, "save_file", full)
    monkeypatch.setattr(reference_windows, "MAX_WRITTEN", 10)
    for index in range(30):
        finish(windows, index)
        let_all_be_written(windows)
    assert len(windows._written) == 10
    assert told(windows, "19", "29") == [None, "[Errno 28] No space left on device"]


def test_a_call_does_not_wait_for_a_file(windows: ReferenceWindows):
    reference = create(windows.root.root)
    os.mkfifo(reference.shard(0))
    reference.write_shard(1, *random_shard(5))
    orders = Orders(read=[asdict(mark("compare", index)) for index in (0, 1)], files=["0"])
    assert windows.exchange("test", orders, pinned=False)["files"] == {"0": None}
    while told(windows, "1") == [None]:
        pass
    assert told(windows, "0", "1") == [None, ""]
    # Nobody waits for it any more.
    windows.exchange("test", Orders(forget=["0", "1"]), pinned=False)
    assert not windows._read
    os.close(os.open(reference.shard(0), os.O_RDWR))


def test_a_file_of_another_size_is_not_read(windows: ReferenceWindows):
    create(windows.root.root).write_shard(1, *random_shard(4))
    windows.exchange("test", Orders(read=[asdict(mark("compare", 1))]), pinned=False)
    while told(windows, "1") == [None]:
        pass
    assert "000001.safetensors has hidden states (4, 8)" in str(told(windows, "1"))


@pytest.mark.parametrize(
    ("setting", "largest", "expected"), [(None, 0, 1800), (None, 5000, 5000), (5, 5000, 5), (0, 1, 0)]
)
def test_room_for_heads_is_what_is_set_or_needed(
    monkeypatch: pytest.MonkeyPatch, setting: int | None, largest: int, expected: int
):
    """Needed by the served model of 100 tokens, or by a reference."""
    monkeypatch.setattr(install, "reference_directory", lambda: Path("root"))
    monkeypatch.setattr(
        ReferenceDirectory, "largest_head", lambda self, vocab_size, seconds: largest * (vocab_size == 100)
    )
    model = SimpleNamespace(get_vocab_size=lambda: 100, get_hidden_size=lambda: 8, dtype=torch.bfloat16)
    assert install.room_for_heads(setting, model) == expected


def test_an_adapter_for_the_lm_head_is_refused_when_it_is_loaded(monkeypatch):
    monkeypatch.setattr(LogitsProcessorWithLoRA, "set_lora", LogitsProcessorWithLoRA.set_lora)
    install.refuse_adapters_of_heads()
    layer = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.lora_a_stacked, layer.lora_b_stacked = torch.ones(1, 1, 8, 16), torch.ones(1, 1, 32, 8)
    with pytest.raises(ValueError, match="weights for the LM head"):
        layer.set_lora(0, torch.zeros(8, 16), torch.ones(32, 8))
    # As vLLM's own, with which it warms up: a server would not start.
    layer.set_lora(0, torch.zeros(8, 16), torch.zeros(32, 8))
    assert not layer.lora_b_stacked.any()
