"""A line of a file, or a text, takes as long as it is: no regular expression goes back over it again and again."""

import time
from pathlib import Path

import numpy as np
import pytest

from scoremode.comparison.engine_log import load_log
from scoremode.runs.conversations import token_classes
from scoremode.runs.presets import detokenized
from scoremode.sweep.processes import _reason
from scoremode.wire.calls import EventParser

LOG = Path(__file__).parents[2] / "data" / "llama_perplexity_kld.txt"


def read_log(line: str, folder: Path) -> None:
    (folder / "log.txt").write_text(f"{LOG.read_text()}\n{line}\n")
    load_log(folder / "log.txt", "log")


def read_reason(line: str, folder: Path) -> None:
    (folder / "log.txt").write_text(line)
    _reason(folder / "log.txt")


def read_stream(chunk: str, _folder: Path) -> None:
    parser = EventParser()
    for _ in range(2048):
        assert list(parser.feed(chunk.encode())) == []
    assert list(parser.feed(b"\ndata: one\n\n")) == [b"one"]


def classify(tag: str, folder: Path) -> None:
    token_classes(np.array([0, 1] * 60_000), [120_000], ["assistant"], {0: tag, 1: tag.replace("<", "</")})


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((read_log, text) for text in ("a" + " " * 300_000, "file size " + " " * 300_000)),
        (read_reason, "a." * 150_000),
        *((classify, text) for text in ("<think>", "<tool_call>")),
        # 32 MiB.
        (read_stream, "x" * 16_384),
        *((lambda text, _: detokenized(text), text) for text in ("( " + " " * 5000, "(" * 60_000)),
    ],
    ids=lambda value: value[:9] if isinstance(value, str) else "",
)
def test_a_long_line_is_read_in_a_moment(read, text, tmp_path):
    started = time.process_time()
    read(text, tmp_path)
    assert time.process_time() - started < 3, "a quadratic one takes minutes"
