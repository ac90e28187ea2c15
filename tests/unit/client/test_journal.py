"""The journal of a run: what is in it, what is taken from it again, and what is refused."""

import dataclasses
import json
import os
from contextlib import closing
from io import FileIO

import pytest
from fake_scoremode import INFO

from scoremode import OutputError, ServerInfo
from scoremode.corpora import Corpus
from scoremode.journal import Journal, count_windows, open_journal
from scoremode.plan import Plan, WindowNlls
from scoremode.windows import cut_windows

PLAN = Plan(
    corpus=Corpus("text", "some text", "made up", 1),
    server=ServerInfo(**INFO),
    model="bytes",
    method="disjoint",
    context_length=4,
    stride=4,
    max_tokens=None,
    add_special_tokens=True,
    tokens=list(range(13)),
    num_bytes=9,
    num_words=2,
    windows=cut_windows(13, "disjoint", 4),
)
# Values that only a shortest repr and float64 bring back: float32 widened, a denormal, a negative zero.
WINDOWS = [
    WindowNlls(1, 3, 6.5, [1.100000023841858, -0.0, 5.399999976158142]),
    WindowNlls(0, 3, 3.0, [1.401298464324817e-45, 1.0, 2.0]),
    WindowNlls(2, 3, 0.75, [0.25, 0.25, 0.25]),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result.json.journal"


def write(path, windows=WINDOWS, plan=PLAN) -> bytes:
    """A journal of some windows, as a killed process leaves it; gives its bytes."""
    journal = open_journal(path, plan)
    for number, window in enumerate(windows, start=1):
        journal.add(window, 10.0 * number)
    journal._file.close()
    return path.read_bytes()


def test_a_header_and_a_line_for_each_window_in_the_order_of_their_ends(path):
    header, *lines = map(json.loads, write(path).splitlines())
    assert lines == [
        {**dataclasses.asdict(window), "seconds": 10.0 * number} for number, window in enumerate(WINDOWS, start=1)
    ]
    assert header.pop("tokens_sha256")
    assert header == {
        "object": "ppl-client.journal",
        "format": 2,
        "kind": "perplexity",
        "sha256": PLAN.corpus.fingerprint,
        "method": "disjoint",
        "context_length": 4,
        "stride": 4,
        "max_tokens": None,
        "add_special_tokens": True,
        "return_ranks": False,
        "model": "bytes",
        "server.scoremode_version": "9.9.9",
        "server.vllm_version": "0.32.0",
        "server.model": "bytes",
        "server.max_model_len": 64,
        "server.vocab_size": 257,
        "server.bos_token_id": 256,
        "server.eos_token_id": None,
        "server.adds_bos": True,
        "server.dtype": "float32",
        "server.quantization": None,
        "server.fingerprint": None,
        "server.revision": None,
        "num_tokens": 13,
        "num_windows": 3,
    }


def test_ranks_come_back_where_they_are_asked_for_and_must_be_there(path):
    plan = dataclasses.replace(PLAN, return_ranks=True)
    window = dataclasses.replace(WINDOWS[0], ranks=[1, 151_936, 2])
    write(path, [window], plan)
    with closing(open_journal(path, plan)) as journal:
        assert journal.windows == {1: window}
    with pytest.raises(OutputError, match="return_ranks is True instead of False"):
        open_journal(path, PLAN)
    write(other := path.with_name("other.journal"), WINDOWS[:1], plan)
    with pytest.raises(OutputError, match="damaged at line 2"):
        open_journal(other, plan)


def test_every_line_is_in_the_file_when_add_returns(path):
    journal = open_journal(path, PLAN)
    for number, window in enumerate(WINDOWS, start=1):
        journal.add(window, 1.0)
        assert path.read_bytes().count(b"\n") == 1 + number
    journal.close()


def test_what_was_written_comes_back_to_the_last_bit(path):
    before = write(path, WINDOWS[:2])
    journal = open_journal(path, PLAN)
    assert {index: list(map(float.hex, window.nlls)) for index, window in journal.windows.items()} == {
        window.index: list(map(float.hex, window.nlls)) for window in WINDOWS[:2]
    }
    assert (journal.num_done, journal.seconds) == (2, 20.0)
    journal.add(WINDOWS[2], 30.0)
    journal.close()
    assert path.read_bytes().startswith(before)
    assert count_windows(path) == (3, 3)


@pytest.mark.parametrize("torn", [1, 20, -1], ids=["one byte", "half a line", "all but its end"])
def test_a_torn_last_line_is_cut_off(path, torn):
    whole, full = write(path, WINDOWS[:2]), write(path, WINDOWS[2:])
    path.write_bytes(whole + full[len(whole) :][:torn])
    journal = open_journal(path, PLAN)
    assert sorted(journal.windows) == [0, 1]
    journal.close()
    assert path.read_bytes() == whole


def test_a_torn_header_is_written_anew(path):
    header = write(path, [])
    for torn in (b"", header[:5], header[:100], header[:-1]):
        path.write_bytes(torn)
        assert count_windows(path) == (0, 0)
        open_journal(path, PLAN)._file.close()
        assert path.read_bytes() == header


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "overlapping"}, "method is 'disjoint' instead of 'overlapping'"),
        ({"context_length": 8, "stride": 8}, "context_length is 4 instead of 8, stride is 4 instead of 8"),
        ({"max_tokens": 13}, "max_tokens is None instead of 13"),
        ({"add_special_tokens": False}, "add_special_tokens is True instead of False"),
        ({"model": "adapter"}, "model is 'bytes' instead of 'adapter'"),
        ({"tokens": [7, *range(1, 13)]}, "tokens_sha256 is "),
        ({"corpus": Corpus("text", "other text", "made up", 1)}, "sha256 is "),
        ({"server": ServerInfo(**{**INFO, "vllm_version": "0.33.0"})}, "server.vllm_version is '0.32.0' instead of"),
        ({"server": ServerInfo(**{**INFO, "quantization": "fp8"})}, "server.quantization is None instead of 'fp8'"),
    ],
    ids=lambda part: next(iter(part)) if isinstance(part, dict) else "",
)
def test_a_journal_of_another_run_is_refused_with_what_differs(path, change, message):
    before = write(path)
    with pytest.raises(OutputError, match="of another run") as caught:
        open_journal(path, dataclasses.replace(PLAN, **change))
    assert message in str(caught.value)
    assert path.read_bytes() == before


def test_a_server_that_runs_more_sequences_at_once_goes_on_with_the_run(path):
    write(path)
    larger = ServerInfo(**{**INFO, "max_num_seqs": 256, "max_top_logprobs": 5, "weight_bytes": 9, "num_parameters": 3})
    with closing(open_journal(path, dataclasses.replace(PLAN, server=larger))) as journal:
        assert journal.num_done == 3


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b'{"index": 9, "num_scored": 3, "nll_sum": 1.0, "nlls": [1.0, 0.0, 0.0], "ranks": null, "seconds": 1.0}',
        b'{"index": -1, "num_scored": 3, "nll_sum": 1.0, "nlls": [1.0, 0.0, 0.0], "ranks": null, "seconds": 1.0}',
        b'{"index": 0, "num_scored": 3, "nll_sum": 1.0, "nlls": [1.0, 0.0], "ranks": null, "seconds": 1.0}',
        b'{"index": 0, "num_scored": 2, "nll_sum": 1.0, "nlls": [1.0, 0.0], "ranks": null, "seconds": 1.0}',
        b'{"index": 1, "num_scored": 3, "nll_sum": 1.0, "nlls": [1.0, 0.0, 0.0], "ranks": null, "seconds": 1.0}',
        b'{"index": 0, "num_scored": 3, "nll_sum": 1.0, "nlls": [1.0, 0.0, 0.0], "ranks": [1, 2, 3], "seconds": 1.0}',
        b'{"index": 0, "num_scored": 3, "nll_sum": 1.0, "nlls": [1.0, 0.0, 0.0], "ranks": null}',
    ],
    ids=[
        "not JSON",
        "no window",
        "too far",
        "negative",
        "too few",
        "not the window's",
        "twice",
        "ranks that were not asked for",
        "no time",
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_changed(path, line):
    damaged = write(path, WINDOWS[:1]) + line + b"\n"
    path.write_bytes(damaged)
    with pytest.raises(OutputError, match="damaged at line 3"):
        open_journal(path, PLAN)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"object": "score"}\n', b'["a"]\n', b"\xff\xfe\n"])
def test_another_file_of_that_name_is_left_alone(path, content):
    path.write_bytes(content)
    for attempt in (lambda: open_journal(path, PLAN), lambda: count_windows(path)):
        with pytest.raises(OutputError, match="no journal"):
            attempt()
    assert path.read_bytes() == content


def test_a_journal_belongs_to_one_process(path):
    journal = open_journal(path, PLAN)
    with pytest.raises(OutputError, match="in use"):
        open_journal(path, PLAN)
    journal.add(WINDOWS[0], 1.0)
    journal.close()
    with closing(open_journal(path, PLAN)) as journal:
        assert journal.num_done == 1


def test_a_journal_without_a_window_is_deleted_when_it_is_closed(path):
    open_journal(path, PLAN).close()
    assert not path.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file(path):
    with FileIO("/dev/full", "a") as full, pytest.raises(OutputError, match="No space left on device") as caught:
        Journal(path, full, PLAN).add(WINDOWS[0], 1.0)
    assert str(path) in str(caught.value)


class AlmostFull(FileIO):
    """A file on a disk with room for half a line, and then, when something was deleted, for more."""

    room = iter([40, OSError(28, "No space left on device")])

    def write(self, data):
        room = next(self.room, len(data))
        if isinstance(room, OSError):
            raise room
        return super().write(data[:room])


def test_after_a_failed_write_nothing_follows_the_torn_line(path):
    before = write(path, WINDOWS[:1])
    journal = Journal(path, AlmostFull(path, "a"), PLAN)
    for window in WINDOWS[1:]:
        with pytest.raises(OutputError, match="No space left"):
            journal.add(window, 1.0)
    journal._file.close()
    assert len(path.read_bytes()) == len(before) + 40
    with closing(open_journal(path, PLAN)) as journal:
        assert list(journal.windows) == [1]
