"""`ppl-client record` and `ppl-client kld` from end to end, and through kills, against servers on real sockets."""

import functools
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from fake_references import KldServer, compare
from fake_scoremode import error, serve
from safetensors.numpy import load_file

from scoremode.cli import main
from scoremode.kld import POSITION_DTYPES, KldPositions

TEXT = "The quick brown fox jumps over the lazy dog. Sphinx of black quartz, judge my vow!"
TEXT_OPTIONS = ["--text", TEXT, "--method", "disjoint", "--context-length", "8"]
NUM_WINDOWS = 10
NOISE = 0.5


@pytest.fixture(scope="module")
def references():
    """What a server keeps that has recorded `TEXT` as `base`; not to be changed."""
    server = KldServer()
    with serve(server) as url:
        assert main(["record", "--url", url, "--reference", "base", *TEXT_OPTIONS, "--quiet"]) == 0
    return server.references


def expected(references) -> KldPositions:
    return KldPositions.concatenate([compare(*window, NOISE) for window in references["base"].windows])


@pytest.fixture
def output(tmp_path):
    return tmp_path / "run.json"


@pytest.fixture
def journal_file(tmp_path):
    return tmp_path / "run.json.journal"


def test_recording_says_what_was_recorded(capsys):
    server = KldServer()
    with serve(server) as url:
        assert main(["record", "--url", url, "--reference", "base", *TEXT_OPTIONS, "--max-tokens", "30"]) == 0
        printed = capsys.readouterr()
        assert main(["record", "--url", url, "--reference", "base", *TEXT_OPTIONS, "--max-tokens", "30"]) == 0
    lines = printed.out.splitlines()
    assert lines[0] == "reference       base"
    assert "tokens          21 scored, 30 in the text" in lines
    assert "recorded        3 windows" in lines
    reference = server.references["base"].json()
    assert lines[-1] == f"perplexity      {reference['perplexity']:.4f} ± 0.5000"
    assert f"ppl {reference['perplexity']:.4f}" in printed.err, "the progress bar"
    again = capsys.readouterr().out.splitlines()
    assert "recorded        3 windows, 3 of them before" in again
    assert server.references["base"].request["max_tokens"] == 30


def test_comparing_prints_llama_cpps_tables(references, capsys):
    with serve(KldServer(references, noise=NOISE)) as url:
        assert main(["kld", "--url", url, "--reference", "base"]) == 0
    printed = capsys.readouterr()
    kld = expected(references).kld.astype(np.float64)
    stderr = kld.std(ddof=1) / np.sqrt(len(kld))
    assert f"Mean    KLD: {kld.mean():10.6f} ± {stderr:10.6f}" in printed.out
    assert f"99.0%   KLD: {np.percentile(kld, 99):10.6f}" in printed.out
    assert f"kld {kld.mean():.6f}" in printed.err, "the progress bar"


def test_the_output_is_the_record_and_the_values_of_every_position(references, output):
    with serve(KldServer(references, noise=NOISE)) as url:
        assert main(["kld", "--url", url, "--reference", "base", "--output", str(output), "--quiet"]) == 0
    record = json.loads(output.read_text())
    assert (record["kind"], record["version"], record["urls"]) == ("kld", 1, [url])
    assert record["reference"]["name"] == "base"
    assert record["server"]["fingerprint"] == "noise 0.5"
    positions = expected(references)
    kld = positions.kld.astype(np.float64)
    assert record["statistics"]["kld"]["mean"] == pytest.approx(kld.mean(), rel=1e-12)
    same = (positions.top_token_ids == positions.reference_top_token_ids).mean()
    assert record["statistics"]["same_top_p"] == same, "a fraction"
    arrays_file = output.with_suffix(".safetensors")
    arrays = load_file(arrays_file)
    assert arrays.pop("window_sizes").tolist() == [7] * NUM_WINDOWS
    assert {name: array.tolist() for name, array in arrays.items()} == {
        name: getattr(positions, name).tolist() for name in POSITION_DTYPES
    }
    assert record["arrays"] == {
        "file": "run.safetensors",
        "sha256": hashlib.sha256(arrays_file.read_bytes()).hexdigest(),
    }
    assert sorted(path.name for path in output.parent.iterdir()) == ["run.json", "run.safetensors"]


def test_the_floor_is_measured_on_the_references_own_model_and_printed_afterwards(capsys, output):
    base = KldServer()
    with serve(base) as url:
        assert main(["record", "--url", url, "--reference", "base", *TEXT_OPTIONS, "--quiet"]) == 0
        options = ["kld", "--url", url, "--reference", "base", "--quiet", "--floor", "--output", str(output)]
        assert main(options) == 0
    assert "Noise floor        : this comparison, kept with the reference" in capsys.readouterr().out
    assert json.loads(output.read_text())["settings"] == {"concurrency": None, "as_noise_floor": True}
    base.references["base"].noise_floor["mean"] = 0.01
    with serve(KldServer(base.references, noise=NOISE)) as url:
        assert main(["kld", "--url", url, "--reference", "base", "--quiet"]) == 0
        multiple = expected(base.references).kld.astype(np.float64).mean() / 0.01
        assert f"; this is {multiple:,.1f} times the floor" in capsys.readouterr().out
        assert main(["kld", "--url", url, "--reference", "base", "--quiet", "--floor"]) == 1
    assert capsys.readouterr().err == "ppl-client: error: the served model is not the reference's (HTTP 400)\n"


def test_a_reference_that_is_not_there_is_one_line_on_stderr(capsys):
    with serve(KldServer()) as url:
        assert main(["kld", "--url", url, "--reference", "none"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "ppl-client: error: there is no reference 'none' (HTTP 404)"


def test_a_server_without_a_folder_for_references_says_so(capsys):
    reason = "start the server with --reference-dir"
    with serve(lambda request: error(404, reason)) as url:
        assert main(["record", "--url", url, "--reference", "base", *TEXT_OPTIONS, "--quiet"]) == 1
    assert capsys.readouterr().err == f"ppl-client: error: {reason} (HTTP 404)\n"


@pytest.mark.processes
def test_ctrl_c_while_recording_says_that_the_same_command_goes_on():
    recording, over = threading.Event(), threading.Event()
    server = KldServer()

    def slow(request):
        if request.method == "POST" and request.url.path == "/v1/references":
            recording.set()
            over.wait(60)
        return server(request)

    with serve(slow) as url:
        options = ["record", "--url", url, "--reference", "base", *TEXT_OPTIONS, "--quiet"]
        # A test run in the background ignores the signal, and so would its child.
        default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        command = [sys.executable, "-m", "scoremode.cli", *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=default) as client:
            try:
                assert recording.wait(60)
                client.send_signal(signal.SIGINT)
                _, messages = client.communicate(timeout=60)
            finally:
                client.kill()
                over.set()
    assert client.returncode == 130
    assert messages == "ppl-client: interrupted: the same command goes on\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["record", "--text", "a"], "the following arguments are required: --reference"),
        (["record", "--reference", "r"], "one of the arguments --dataset --text --text-file is required"),
        (["record", "--reference", "r", "--text", "a", "--output", "o"], "unrecognized arguments: --output"),
        (["record", "--reference", "r", "--text", "a", "--num-samples", "2"], "--num-samples needs --dataset"),
        (["record", "--reference", "r", "--text", "a", "--url", "http://a", "--url", "http://b"], "takes one --url"),
        (["kld"], "the following arguments are required: --reference"),
        (["kld", "--reference", "r", "--text", "a"], "unrecognized arguments: --text"),
        (["kld", "--reference", "r", "--resume"], "--resume needs --output"),
        (["kld", "--reference", "r", "--url", "http://a", "--url", "http://a/v1"], "twice"),
        (["kld", "--reference", "r", "--floor", "--resume", "--output", "o"], "does not work with --floor"),
        (["kld", "--reference", "r", "--floor", "--concurrency", "2"], "does not work with --floor"),
        (["kld", "--reference", "r", "--floor", "--url", "http://a", "--url", "http://b"], "takes one --url"),
        (["--reference", "r", "--text", "a"], "unrecognized arguments: --reference"),
        (["--text", "a", "kld"], "unrecognized arguments: kld"),
        (["perplexity", "--text", "a"], "unrecognized arguments: perplexity"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["record"], ["kld"]], ids=str)
def test_each_command_has_its_own_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {' '.join(['ppl-client', *command])} [-h]")
    assert ("--reference" in printed) == bool(command)


def figures(output):
    """What must not hang on how the run went."""
    record = json.loads(output.read_text())
    for name in ("finished", "urls", "seconds", "positions_per_second"):
        del record[name]
    return record


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_until_killed(references, output, journal_file, num_windows, *more):
    """Let a process compare so many windows more, and kill it; gives the windows, and the journal's bytes."""
    server = KldServer(references, noise=NOISE, allowed=num_windows)
    wanted = (num_lines(journal_file) or 1) + num_windows
    with serve(server) as url:
        options = ["kld", "--url", url, "--reference", "base", "--quiet", "--output", str(output), *more]
        command = [sys.executable, "-m", "scoremode.cli", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
            try:
                wait_until(lambda: num_lines(journal_file) == wanted or client.poll() is not None)
            finally:
                client.kill()
    assert client.returncode == -signal.SIGKILL
    return server.compared, journal_file.read_bytes()


@pytest.mark.processes
def test_a_comparison_that_is_killed_twice_compares_every_window_once_and_gives_the_same_result(
    references, output, journal_file, tmp_path, capsys
):
    unbroken = tmp_path / "unbroken" / "run.json"
    unbroken.parent.mkdir()
    command = ["kld", "--reference", "base", "--quiet"]
    with serve(KldServer(references, noise=NOISE)) as url:
        assert main([*command, "--url", url, "--output", str(unbroken)]) == 0
    first, journal_of_first = run_until_killed(references, output, journal_file, 3)
    second, journal_of_both = run_until_killed(references, output, journal_file, 4, "--resume")
    assert journal_of_both.startswith(journal_of_first), "what is done stays byte for byte"
    assert not output.exists()
    capsys.readouterr()
    last = KldServer(references, noise=NOISE)
    with serve(last) as url:
        assert main([*command, "--url", url, "--output", str(output)]) == 1
        assert f"{journal_file} has 7 of {NUM_WINDOWS} windows of an unfinished run" in capsys.readouterr().err
        assert main([*command, "--url", url, "--output", str(output), "--resume"]) == 0
    assert f"going on with {journal_file}: it has 7 of {NUM_WINDOWS} windows" in capsys.readouterr().err
    assert sorted(first + second + last.compared) == list(range(NUM_WINDOWS)), "each once"
    assert figures(output) == figures(unbroken)
    assert output.with_suffix(".safetensors").read_bytes() == unbroken.with_suffix(".safetensors").read_bytes()
    assert not journal_file.exists(), "the output has all"


def test_a_journal_of_the_other_command_is_refused(references, output, journal_file, capsys):
    run_until_killed(references, output, journal_file, 3)
    before = journal_file.read_bytes()
    with serve(KldServer(references, noise=NOISE)) as url:
        assert main(["--url", url, *TEXT_OPTIONS, "--quiet", "--output", str(output), "--resume"]) == 1
    assert "kind is 'kld' instead of 'perplexity'" in capsys.readouterr().err
    assert journal_file.read_bytes() == before
