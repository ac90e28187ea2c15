"""The file of a result and the journal next to it: lost servers, full disks and links."""

import json

import pytest
from fake_server import FakeServer, serve

from scoremode.cli import main
from scoremode.runs.journal import Journal

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
    """What must not depend on how the run went."""
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


def test_an_interrupted_run_scores_each_missing_window_once(output, journal_file, unbroken, capsys):
    first = journal_file.read_bytes()
    assert first.count(b"\n") == 6, "a header and five windows"
    assert run(output, "--resume", "--retry-for", "0", "--concurrency", "1", server=FakeServer(allowed=6)) == 1
    both = journal_file.read_bytes()
    assert both.startswith(first), "what is done stays byte for byte"
    assert both.count(b"\n") == 12
    assert not output.exists()
    *whole, last, torn = both.splitlines(keepends=True)
    last = json.dumps({**json.loads(last), "seconds": 3600.0}).encode() + b"\n"
    journal_file.write_bytes(b"".join([*whole, last, torn[:-30]]))
    capsys.readouterr()
    server = FakeServer()
    assert run(output, "--resume", server=server) == 0
    assert f"{journal_file}: it has 10 of {NUM_WINDOWS} windows" in capsys.readouterr().err
    assert server.num_scored == NUM_WINDOWS - 10, "the torn line's window again"
    assert figures(output) == unbroken
    assert json.loads(output.read_text())["seconds"] > 3600, "of all sessions"
    assert not journal_file.exists(), "the output has all"


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

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_space)
        assert run(output, "--resume") == 1
    printed = capsys.readouterr()
    last_line = printed.err.splitlines()[-1]
    assert f"cannot write {output.with_suffix('.safetensors')}: No space left on device" in last_line
    assert f"{journal_file} has {NUM_WINDOWS} of {NUM_WINDOWS} windows: the same command with --resume" in last_line
    assert "perplexity" in printed.out, "the number is shown all the same"
    assert output.read_text() == "an earlier result"
    assert sorted(path.name for path in output.parent.iterdir()) == [output.name, journal_file.name]
    assert run(output) == 1, "the earlier result is not this run's"
    assert run(output, "--resume") == 0
    assert figures(output) == unbroken


@pytest.mark.parametrize("name", ["result.json", "result.safetensors"])
def test_a_finished_output_is_replaced_by_force_alone(output, unbroken, name, capsys):
    (finished := output.with_name(name)).write_text("finished")
    server = FakeServer()
    for more in ([], ["--resume"]):
        assert run(output, *more, server=server) == 1
        assert f"{finished} is there already: --force replaces it" in capsys.readouterr().err
    assert (server.requests, finished.read_text()) == ([], "finished")
    assert run(output, "--force") == 0
    assert figures(output) == unbroken


def test_an_output_behind_a_link_is_replaced_and_the_link_stays(output, unbroken, tmp_path):
    link = tmp_path / "latest.json"
    link.symlink_to(output)
    assert run(link) == 0
    assert link.is_symlink()
    assert figures(output) == unbroken
