"""The journal of a run and the file of its result: lost servers, torn lines, full disks, links, and what is refused."""

import dataclasses
import json
import math
from contextlib import closing
from io import FileIO
from unittest.mock import Mock

import pytest
from fake_server import INFO, FakeServer, serve

from scoremode import OutputError, ServerInfo, cut_windows
from scoremode.cli.main import main
from scoremode.runs import Corpus, Output, Plan, WindowNlls
from scoremode.runs.journal import Journal, count_windows

# Values that only a shortest repr and float64 bring back: float32 widened, a denormal, a negative zero.
WINDOWS = [
    WindowNlls(index=1, num_scored=3, nll_sum=6.5, nlls=[1.100000023841858, -0.0, 5.399999976158142]),
    WindowNlls(index=0, num_scored=3, nll_sum=3.0, nlls=[1.401298464324817e-45, 1.0, 2.0]),
    WindowNlls(index=2, num_scored=3, nll_sum=0.75, nlls=[0.25, 0.25, 0.25]),
]


def plan_of(**server) -> Plan:
    """A plan with these fields of the server's info instead of the usual ones."""
    return Plan(
        corpus=Corpus("text", "some text", "made up", 1),
        server=ServerInfo(**INFO | {"fingerprint": "v2-1"} | server),
        model="bytes",
        tokens=list(range(13)),
        num_bytes=9,
        num_words=2,
        windows=cut_windows(13, "disjoint", 4),
        method="disjoint",
        context_length=4,
        stride=4,
        max_tokens=None,
        add_special_tokens=True,
    )


PLAN = plan_of()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result.json.journal"


def write(path, windows=WINDOWS, plan=PLAN) -> bytes:
    """A journal of some windows, as a killed process leaves it; gives its bytes."""
    journal = Journal(path, plan)
    for number, window in enumerate(windows, start=1):
        num_lines = path.read_bytes().count(b"\n")
        journal.add(window, 10.0 * number)
        assert path.read_bytes().count(b"\n") == num_lines + 1, "when add returns"
    journal._file.close()
    return path.read_bytes()


def resumed(path, plan=PLAN) -> dict[int, WindowNlls]:
    with closing(Journal(path, plan)) as journal:
        return journal.windows


def test_values_are_read_back_to_the_last_bit(path):
    before = write(path, WINDOWS[:2])
    journal = Journal(path, plan_of(max_num_seqs=256, max_top_logprobs=5, weight_bytes=9, num_parameters=3))
    assert {index: list(map(float.hex, window.nlls)) for index, window in journal.windows.items()} == {
        window.index: list(map(float.hex, window.nlls)) for window in WINDOWS[:2]
    }
    assert (journal.num_done, journal.seconds) == (2, 20.0)
    journal.add(WINDOWS[2], 30.0)
    journal.close()
    assert path.read_bytes().startswith(before)
    assert count_windows(path) == (3, 3)


def test_a_torn_last_line_or_header_is_cut_off(path):
    header, whole, full = write(path, []), write(path, WINDOWS[:2]), write(path, WINDOWS[2:])
    for torn in (1, 20, -1):
        path.write_bytes(whole + full[len(whole) :][:torn])
        assert sorted(resumed(path)) == [0, 1]
        assert path.read_bytes() == whole
    for torn in (0, 5, 100, -1):
        path.write_bytes(header[:torn])
        assert count_windows(path) == (0, 0)
        assert write(path, []) == header


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dataclasses.replace(PLAN, context_length=8, stride=8), "is 4 instead of 8, stride is 4 instead of 8"),
        (dataclasses.replace(PLAN, tokens=[7, *range(1, 13)]), "tokens_sha256 is "),
        (dataclasses.replace(PLAN, return_ranks=True), "return_ranks is False instead of True"),
        (plan_of(fingerprint="v2-2"), "server.fingerprint is 'v2-1' instead of 'v2-2'"),
        (dataclasses.replace(PLAN, model="adapter"), "model is 'bytes' instead of 'adapter'"),
    ],
)
def test_a_journal_of_another_run_is_refused_with_the_differences(path, plan, message):
    before = write(path)
    with pytest.raises(OutputError, match=f"to another run.*{message}"):
        Journal(path, plan)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        *(b"{", b"[1]", b"[" * 100_000),
        *({"index": 9}, {"nlls": [1.0, 0.0]}, {"index": 1}, {"ranks": [1, 2, 3]}, {"seconds": None}),
        *({"nlls": [1.0, value, 0.0], "nll_sum": 1.0 + value} for value in (-0.5, math.nan, math.inf)),
        *({"nll_sum": 2.0}, {"nll_sum": math.nan}, {"seconds": math.nan}, {"seconds": -1.0}),
    ],
    ids=lambda line: str(line)[:40],
)
def test_a_damaged_line_is_named_and_nothing_is_changed(path, line):
    if isinstance(line, dict):
        window = {"index": 0, "num_scored": 3, "nll_sum": 1.0, "nlls": [1.0, 0.0, 0.0], "ranks": None, "seconds": 1.0}
        line = json.dumps({**window, **line}).encode()
    damaged = write(path, WINDOWS[:1]) + line + b"\n"
    path.write_bytes(damaged)
    with pytest.raises(OutputError, match="damaged at line 3"):
        Journal(path, PLAN)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"object": "ppl-client.journal", "format": 2}\n',
        b"my notes",
        b'{"object": "score"}\n',
        b'["a"]\n',
        b"\xff\xfe\n",
    ],
    ids=lambda content: str(content)[:20],
)
def test_another_file_of_that_name_is_left_alone(path, content):
    path.write_bytes(content)
    for attempt in (lambda: Journal(path, PLAN), lambda: count_windows(path)):
        with pytest.raises(OutputError, match="not a journal"):
            attempt()
    assert path.read_bytes() == content


def test_a_journal_belongs_to_one_process_and_is_deleted_if_empty(path):
    Journal(path, PLAN).close()
    assert not path.exists()
    with closing(Journal(path, PLAN)) as journal:
        for attempt in (lambda: Journal(path, PLAN), lambda: Output(path.with_suffix(""), resume=False)):
            with pytest.raises(OutputError, match="in use"):
                attempt()
        journal.add(WINDOWS[0], 1.0)
    assert resumed(path) == {1: WINDOWS[0]}


class AlmostFull(FileIO):
    """A file on a disk with room for half a line, and then, when something was deleted, for more."""

    room = iter([40, OSError(28, "No space left on device")])

    def write(self, data):
        room = next(self.room, len(data))
        if isinstance(room, OSError):
            raise room
        return super().write(data[:room])


def test_nothing_is_written_after_a_failed_write(path, monkeypatch):
    before = write(path, WINDOWS[:1])
    monkeypatch.setattr("scoremode.runs.journal.FileIO", AlmostFull)
    journal = Journal(path, PLAN)
    for window in WINDOWS[1:]:
        with pytest.raises(OutputError, match=f"cannot write {path}: No space left"):
            journal.add(window, 1.0)
    journal._file.close()
    assert len(path.read_bytes()) == len(before) + 40
    assert list(resumed(path)) == [1]


def test_other_gpus_resume_with_a_warning(path, caplog):
    a100, h200 = ({"computed_by": {"device": device, "kernels": ["k"]}} for device in ("A100", "H200"))
    write(path, plan=plan_of(**a100))
    assert len(resumed(path, plan_of(**h200))) == 3
    [of_gpu] = (record.getMessage() for record in caplog.records)
    assert "device is 'A100' instead of 'H200'" in of_gpu
    caplog.clear()
    newer = {"computed_by": {**a100["computed_by"], "implementation": "vllm"}}
    assert len(resumed(path, plan_of(**newer))) == 3
    assert not caplog.records, "what an older server did not say is unknown, not another"


# No window of it is like another.
TEXT = "The quick brown fox jumps over the lazy dog. Sphinx of black quartz, judge my vow!"
OPTIONS = ["--text", TEXT, "--context-length", "8", "--stride", "4", "--quiet"]
NUM_WINDOWS = 20


@pytest.fixture
def output(tmp_path):
    return tmp_path / "result.json"


def run(output, *more, server=None) -> int:
    """The exit status of a run to the end, or until its server drops connections."""
    with serve(server or FakeServer()) as url:
        return main(["--url", url, *OPTIONS, "--output", str(output), *more])


def figures(output):
    """The figures that must not depend on how the run went."""
    record = json.loads(output.read_text())
    for name in ("finished", "urls", "seconds", "tokens_per_second"):
        del record[name]
    del record["settings"]["concurrency"]
    return record


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The record of a run that nothing happened to."""
    output = tmp_path_factory.mktemp("unbroken") / "result.json"
    assert run(output) == 0
    return figures(output)


@pytest.fixture
def journal_file(output, capsys):
    """The journal of a run that lost its server after five windows."""
    assert run(output, "--retry-for", "0", "--concurrency", "1", server=FakeServer(allowed=5)) == 1
    capsys.readouterr()
    return output.with_name("result.json.journal")


@pytest.mark.parametrize("allowed", [NUM_WINDOWS + 5, NUM_WINDOWS])
def test_both_lanes_are_resumed_where_the_second_ended(output, allowed, capsys):
    lanes = ["--lane", "both", "--retry-for", "0", "--concurrency", "1"]
    assert run(output, *lanes, server=FakeServer(allowed=allowed)) == 1
    assert "the same command with --resume resumes it" in capsys.readouterr().err
    first, second = (output.with_name(f"result-{lane}.json") for lane in ("prefill", "decode"))
    finished = figures(first)
    assert not second.exists()
    server = FakeServer()
    assert run(output, *lanes, "--resume", server=server) == 0
    assert "decode agrees with prefill" in capsys.readouterr().out
    assert server.num_scored == 2 * NUM_WINDOWS - allowed, "nothing twice"
    assert figures(first) == finished
    assert not [*output.parent.glob("*.journal")]


@pytest.mark.parametrize("more", ["--force", "--resume"])
def test_a_journal_that_outlived_its_output_is_removed(output, journal_file, unbroken, more, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", lambda self: self._file.close())
        assert run(output, "--resume") == 0
    assert journal_file.exists()
    assert run(output, more) == 0
    assert not journal_file.exists()
    assert figures(output) == unbroken


def test_a_journal_is_kept_if_the_output_cannot_be_written(output, journal_file, unbroken, monkeypatch, capsys):
    output.write_text("an earlier result")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
        assert run(output, "--resume") == 1
    printed = capsys.readouterr()
    assert f"cannot write {output.with_suffix('.safetensors')}: No space left on device" in printed.err
    assert "perplexity" in printed.out, "the number is shown all the same"
    assert output.read_text() == "an earlier result"
    assert sorted(path.name for path in output.parent.iterdir()) == [output.name, journal_file.name]
    assert run(output, "--resume") == 0
    assert figures(output) == unbroken


@pytest.mark.parametrize("name", ["result.json", "result.safetensors"])
def test_force_replaces_a_finished_output(output, unbroken, name):
    output.with_name(name).write_text("finished")
    assert run(output, "--force") == 0
    assert figures(output) == unbroken
