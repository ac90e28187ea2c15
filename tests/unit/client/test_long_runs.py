"""`ppl-client` through what happens in hours: kills, restarts, servers that die, disks that fill up."""

import functools
import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from fake_scoremode import INFO, answer, error, serve

from local_server import reserved_port
from scoremode import journal, pool
from scoremode.cli import main

pytestmark = pytest.mark.processes

# No window of it is like another.
TEXT = "The quick brown fox jumps over the lazy dog. Sphinx of black quartz, judge my vow!"
OPTIONS = ["--text", TEXT, "--context-length", "8", "--stride", "4", "--quiet"]
NUM_WINDOWS = 20

DiskUsage = namedtuple("DiskUsage", "total used free")


class Server:
    """Scores as many windows as it is allowed, and keeps the requests for more waiting."""

    def __init__(self, allowed=1000):
        self.scored = []
        self._allowed = allowed
        self._dead = False
        self._changed = threading.Condition()

    def __call__(self, request):
        if request.url.path != "/v1/score" or request.method != "POST":
            return answer(request)
        with self._changed:
            self._changed.wait_for(lambda: self._dead or len(self.scored) < self._allowed)
            if self._dead:
                return None
            (window,) = json.loads(request.content)["prompt"]
            self.scored.append(tuple(window))
        return answer(request)

    def allow(self, allowed):
        with self._changed:
            self._allowed = allowed
            self._changed.notify_all()

    def die(self):
        """Close the connections of the requests that wait, and of any that come."""
        with self._changed:
            self._dead = True
            self._changed.notify_all()


@contextmanager
def served(server, port=0):
    with serve(server, port) as url:
        try:
            yield url
        finally:
            server.die()


@pytest.fixture
def output(tmp_path):
    return tmp_path / "result.json"


@pytest.fixture
def journal_file(tmp_path):
    return tmp_path / "result.json.journal"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The record of a run that nothing happened to."""
    output = tmp_path_factory.mktemp("unbroken") / "result.json"
    with served(Server()) as url:
        assert main(["--url", url, *OPTIONS, "--output", str(output)]) == 0
    return figures(output)


def figures(output):
    """What must not hang on how the run went."""
    record = json.loads(output.read_text())
    for name in ("finished", "urls", "seconds", "tokens_per_second"):
        del record[name]
    del record["settings"]["concurrency"]
    return record


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def start(*arguments, **settings):
    command = [sys.executable, "-m", "scoremode.cli", *OPTIONS, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **settings)


def run_until_killed(output, journal_file, num_windows, *more):
    """Let a process score so many windows more, and kill it; gives the windows, and the journal's bytes."""
    server = Server(allowed=num_windows)
    wanted = (num_lines(journal_file) or 1) + num_windows
    with served(server) as url, start("--url", url, "--output", output, *more) as client:
        try:
            wait_until(lambda: num_lines(journal_file) == wanted or client.poll() is not None)
        finally:
            client.kill()
    assert client.returncode == -signal.SIGKILL
    return server.scored, journal_file.read_bytes()


def run_to_the_end(output, *more):
    """Score what is left; gives the windows."""
    server = Server()
    with served(server) as url:
        assert main(["--url", url, *OPTIONS, "--output", str(output), *more]) == 0
    return server.scored


def test_a_run_that_is_killed_twice_scores_every_window_once_and_gives_the_same_result(
    output, journal_file, unbroken, capsys
):
    first, journal_of_first = run_until_killed(output, journal_file, 5)
    second, journal_of_both = run_until_killed(output, journal_file, 6, "--resume")
    assert journal_of_both.startswith(journal_of_first), "what is done stays byte for byte"
    assert not output.exists()
    third = run_to_the_end(output, "--resume")
    assert capsys.readouterr().err == f"ppl-client: going on with {journal_file}: it has 11 of {NUM_WINDOWS} windows\n"
    assert figures(output) == unbroken
    assert (len(first), len(second), len(third)) == (5, 6, NUM_WINDOWS - 11)
    assert len({*first, *second, *third}) == NUM_WINDOWS
    assert not journal_file.exists(), "the output has all"


def test_a_line_that_was_torn_by_the_kill_is_scored_again(output, journal_file, unbroken):
    _, whole = run_until_killed(output, journal_file, 5)
    journal_file.write_bytes(whole[:-30])
    assert len(run_to_the_end(output, "--resume")) == NUM_WINDOWS - 4
    assert figures(output) == unbroken


def test_seconds_are_those_of_all_sittings(output, journal_file):
    run_until_killed(output, journal_file, 5)
    *lines, last = journal_file.read_text().splitlines()
    last = json.dumps({**json.loads(last), "seconds": 3600.0})
    journal_file.write_text("\n".join([*lines, last]) + "\n")
    run_to_the_end(output, "--resume")
    assert 3600 < json.loads(output.read_text())["seconds"] < 3700


@pytest.fixture
def unfinished(output, journal_file):
    """The address of a server, where a run that was killed has left five windows."""
    run_until_killed(output, journal_file, 5)
    with served(Server()) as url:
        yield url


def test_without_resume_the_journal_of_an_unfinished_run_is_not_overwritten(unfinished, output, journal_file, capsys):
    before = journal_file.read_bytes()
    for more in ([], ["--server-side"]):
        assert main(["--url", unfinished, *OPTIONS, "--output", str(output), *more]) == 1
        message = capsys.readouterr().err
        assert "--resume, or delete it" in message
        assert f"{journal_file} has 5 of {NUM_WINDOWS} windows" in message
    assert journal_file.read_bytes() == before


def test_other_options_than_those_of_the_journal_are_refused(unfinished, output, journal_file, capsys):
    before = journal_file.read_bytes()
    assert main(["--url", unfinished, *OPTIONS, "--output", str(output), "--resume", "--stride", "2"]) == 1
    message = capsys.readouterr().err
    assert "stride is 4 instead of 2" in message
    assert "goes on" not in message, "these options cannot"
    assert journal_file.read_bytes() == before


def test_a_journal_that_outlived_its_finished_run_is_in_nobodys_way(unfinished, output, journal_file, unbroken):
    command = ["--url", unfinished, *OPTIONS, "--output", str(output)]

    def killed_before_it_could_delete(self):
        self._file.close()

    for more in ([], ["--resume"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal.Journal, "remove", killed_before_it_could_delete)
            assert main([*command, "--resume"]) == 0
        assert journal_file.exists()
        assert main([*command, *more]) == 0
        assert not journal_file.exists()
        assert figures(output) == unbroken


def test_a_whole_journal_whose_output_could_not_be_written_is_kept(unfinished, output, journal_file, unbroken, capsys):
    output.write_text("an earlier result")
    command = ["--url", unfinished, *OPTIONS, "--output", str(output)]

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", no_space)
        assert main([*command, "--resume"]) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == (
        f"ppl-client: error: cannot write {output.with_suffix('.safetensors')}: No space left on device; "
        f"{journal_file} has {NUM_WINDOWS} of {NUM_WINDOWS} windows: the same command with --resume goes on"
    )
    assert "perplexity" in printed.out, "the number is shown all the same"
    assert output.read_text() == "an earlier result"
    assert sorted(path.name for path in output.parent.iterdir()) == [output.name, journal_file.name]
    assert main(command) == 1, "the earlier result is not this run's"
    assert main([*command, "--resume"]) == 0
    assert figures(output) == unbroken


def test_resume_without_a_journal_starts_at_the_beginning(output, unbroken, capsys):
    with served(Server()) as url:
        assert main(["--url", url, *OPTIONS, "--output", str(output), "--resume"]) == 0
    assert "starting at the beginning" in capsys.readouterr().err
    assert figures(output) == unbroken


def test_a_disk_that_is_full_in_the_middle_ends_the_run_and_it_can_go_on(output, journal_file, unbroken):
    # A limit on the size of files stops a write in the middle of a line, as a full disk does.
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2000, 2000))
    with served(Server()) as url, start("--url", url, "--output", output, preexec_fn=limit) as client:
        _, messages = client.communicate(timeout=60)
    assert client.returncode == 1
    (line,) = messages.splitlines()
    assert line.startswith(f"ppl-client: error: cannot write {journal_file}: File too large; {journal_file} has ")
    assert line.endswith("the same command with --resume goes on")
    assert journal_file.stat().st_size == 2000
    run_to_the_end(output, "--resume")
    assert figures(output) == unbroken


def test_room_on_the_disk_is_checked_before_a_window_is_scored(output, journal_file, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: DiskUsage(10**9, 10**9, 20_000))
    server = Server()
    with served(server) as url:
        assert main(["--url", url, *OPTIONS, "--output", str(output)]) == 1
    assert f"no room in {output.parent}" in capsys.readouterr().err
    assert server.scored == []
    assert list(output.parent.iterdir()) == []


def test_the_room_that_is_asked_for_is_enough(output, monkeypatch, capsys):
    sizes = []
    remove = journal.Journal.remove

    def note_size(self):
        sizes.append(self.path.stat().st_size)
        remove(self)

    def long_numbers(request):
        response = answer(request)
        if request.url.path == "/v1/score" and request.method == "POST":
            content = response.json()
            (result,) = content["data"]
            result["logprobs"] = [None] + [-1.1920928244535389e-07] * (len(result["token_ids"]) - 1)
            result["ranks"] = [None] + [151_936] * (len(result["token_ids"]) - 1)
            return httpx.Response(200, json=content)
        return response

    monkeypatch.setattr(journal.Journal, "remove", note_size)
    options = ["--text", TEXT * 20, "--context-length", "64", "--stride", "32", "--quiet", "--output", str(output)]
    with serve(long_numbers) as url:
        assert main(["--url", url, *options]) == 0
        written = sizes[0] + output.stat().st_size + output.with_suffix(".safetensors").stat().st_size
        monkeypatch.setattr("shutil.disk_usage", lambda folder: DiskUsage(0, 0, written))
        assert main(["--url", url, *options]) == 1
    assert "no room" in capsys.readouterr().err


def test_an_output_by_way_of_a_link_replaces_what_the_link_leads_to(output, unbroken, tmp_path):
    link = tmp_path / "latest.json"
    link.symlink_to(output)
    run_to_the_end(link)
    assert link.is_symlink()
    assert figures(output) == unbroken


def test_an_output_that_is_no_file_is_refused(capsys):
    assert main([*OPTIONS, "--output", "/dev/null"]) == 1
    assert capsys.readouterr().err == "ppl-client: error: cannot write /dev/null: it is no file\n"


def test_a_server_that_is_restarted_is_waited_for(output, unbroken, capsys, caplog):
    server = Server(allowed=5)
    restarted = threading.Event()
    over = threading.Event()

    def restart():
        with served(server, port):
            wait_until(lambda: len(server.scored) == 5)
        wait_until(lambda: "waiting for" in caplog.text)
        restarted.set()
        with served(Server(), port):
            over.wait(60)

    with reserved_port() as port:
        thread = threading.Thread(target=restart)
        thread.start()
        try:
            url = f"http://127.0.0.1:{port}"
            assert main(["--url", url, *OPTIONS, "--concurrency", "2", "--output", str(output)]) == 0
        finally:
            over.set()
            thread.join()
    assert restarted.is_set()
    assert figures(output) == unbroken
    waiting, going_on = capsys.readouterr().err.splitlines()
    assert waiting.startswith(f"ppl-client: waiting for {url}, 600 s at most: no answer from {url}/v1/score")
    assert going_on.startswith(f"ppl-client: {url} answers again after ")


def test_a_server_that_never_comes_back_ends_the_run_and_its_windows_are_kept(output, journal_file, capsys):
    server = Server(allowed=5)
    with ExitStack() as stack:
        url = stack.enter_context(served(server))
        killer = threading.Thread(target=lambda: (wait_until(lambda: num_lines(journal_file) == 6), stack.close()))
        killer.start()
        options = [*OPTIONS, "--concurrency", "1", "--retry-for", "1", "--output", str(output)]
        assert main(["--url", url, *options]) == 1
        killer.join()
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"ppl-client: error: no answer from {url}/v1/score")
    assert message.endswith("windows: the same command with --resume goes on")
    assert num_lines(journal_file) >= 6


def test_one_of_two_servers_dies_and_the_other_takes_over(output, unbroken, monkeypatch, capsys):
    monkeypatch.setattr(pool, "GRACE", 0.3)
    dying, other = Server(allowed=4), Server(allowed=6)
    with ExitStack() as death, served(other) as other_url:
        dying_url = death.enter_context(served(dying))

        def kill():
            wait_until(lambda: len(dying.scored) == 4 and len(other.scored) == 6)
            death.close()
            other.allow(1000)

        killer = threading.Thread(target=kill)
        killer.start()
        urls = ["--url", dying_url, "--url", other_url]
        assert main([*urls, *OPTIONS, "--concurrency", "2", "--output", str(output)]) == 0
        killer.join()
    assert figures(output) == unbroken
    assert len(other.scored) >= NUM_WINDOWS - 6
    dropped = [line for line in capsys.readouterr().err.splitlines() if "dropped" in line]
    assert len(dropped) == 1
    assert dropped[0].startswith(f"ppl-client: {dying_url} is dropped, its windows go to the other servers: no answer")
    assert json.loads(output.read_text())["urls"] == [dying_url, other_url]


def test_servers_that_differ_are_refused_before_a_window_is_scored(output, capsys):
    def quantized(request):
        if request.method == "GET":
            return httpx.Response(200, json={**INFO, "quantization": "fp8"})
        return answer(request)

    server = Server()
    with served(server) as one, serve(quantized) as other:
        assert main(["--url", one, "--url", other, *OPTIONS, "--output", str(output)]) == 1
    assert capsys.readouterr().err == (
        f"ppl-client: error: {other} does not serve the same as {one}: quantization is 'fp8' instead of None\n"
    )
    assert server.scored == []
    assert list(output.parent.iterdir()) == []


def test_ctrl_c_says_how_to_go_on(output, journal_file):
    server = Server(allowed=5)
    default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with served(server) as url, start("--url", url, "--output", output, preexec_fn=default) as client:
        try:
            wait_until(lambda: num_lines(journal_file) == 6)
            client.send_signal(signal.SIGINT)
            _, messages = client.communicate(timeout=60)
        finally:
            client.kill()
    assert client.returncode == 130
    assert messages == (
        f"ppl-client: interrupted; {journal_file} has 5 of {NUM_WINDOWS} windows: "
        "the same command with --resume goes on\n"
    )


def test_a_run_that_fails_before_its_first_window_leaves_nothing(output, capsys):
    def refuses(request):
        if request.url.path == "/v1/score" and request.method == "POST":
            return error(400, "not these tokens")
        return answer(request)

    with serve(refuses) as url:
        assert main(["--url", url, *OPTIONS, "--output", str(output)]) == 1
    assert capsys.readouterr().err == "ppl-client: error: not these tokens (HTTP 400)\n"
    assert list(output.parent.iterdir()) == []


def test_two_processes_do_not_write_one_output(output, journal_file, capsys):
    server = Server(allowed=5)
    with served(server) as url, start("--url", url, "--output", output) as client:
        try:
            wait_until(lambda: num_lines(journal_file) == 6)
            for more in ([], ["--resume"]):
                assert main(["--url", url, *OPTIONS, "--output", str(output), *more]) == 1
                assert f"{journal_file} is in use" in capsys.readouterr().err
        finally:
            client.kill()


@pytest.mark.parametrize("reported", [None, 3], ids=["server of before", "3 sequences"])
def test_as_many_windows_are_in_flight_as_the_server_runs_at_once(output, reported):
    def small(request):
        if request.method == "GET":
            return httpx.Response(200, json={**INFO, "max_num_seqs": reported})
        return answer(request)

    with serve(small) as url:
        assert main(["--url", url, *OPTIONS, "--output", str(output)]) == 0
    assert json.loads(output.read_text())["settings"]["concurrency"] == (reported or 8)
