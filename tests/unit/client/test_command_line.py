"""`ppl-client` from end to end against a server on a real socket: what it prints, writes and exits with."""

import functools
import hashlib
import json
import math
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from fake_scoremode import BOS, answer, error, events, logprob, rank, result_event, serve, window_event
from safetensors.numpy import load_file

from scoremode import __version__
from scoremode.cli import main

TEXT = "Hello, world"
TOKENS = [BOS, *TEXT.encode()]
# One window takes the whole text, so that each token's NLL is conditioned on all before it.
NLLS = [-logprob(TOKENS, position) for position in range(1, len(TOKENS))]
PERPLEXITY = math.exp(sum(NLLS) / len(NLLS))


@pytest.fixture
def url():
    with serve(answer) as address:
        yield address


def test_the_table_ends_with_the_perplexity(url, capsys):
    assert main(["--url", url, "--text", TEXT]) == 0
    table = capsys.readouterr().out
    assert f"{PERPLEXITY:.4f} ±" in table.splitlines()[-1]
    assert "bytes" in table
    assert max(map(len, table.splitlines())) <= 80


def test_progress_goes_to_stderr_and_quiet_leaves_it_out(url, capsys):
    main(["--url", url, "--text", TEXT])
    assert f"ppl {PERPLEXITY:.4f}" in capsys.readouterr().err
    main(["--url", url, "--text", TEXT, "--quiet"])
    assert capsys.readouterr().err == ""


def test_the_output_has_all_that_it_takes_to_repeat_the_run(url, tmp_path):
    output = tmp_path / "result.json"
    address = url.replace("http://", "http://me:secret@")
    assert main(["--url", address, "--text", TEXT, "--context-length", "32", "--output", str(output), "--quiet"]) == 0
    record = json.loads(output.read_text())
    assert record["perplexity"] == pytest.approx(PERPLEXITY)
    assert record["nll_sum"] == pytest.approx(sum(NLLS))
    assert record["windows"] == [{"index": 0, "num_scored": 12, "nll_sum": sum(NLLS), "nlls": NLLS}]
    assert record["settings"] == {
        "method": "sliding",
        "context_length": 32,
        "stride": 8,
        "max_tokens": None,
        "add_special_tokens": True,
        "server_side": False,
        "concurrency": 8,
    }
    assert record["corpus"] == {
        "name": "text",
        "source": "the text 'Hello, world'",
        "sha256": "4ae7c3b6ac0beff671efa8cf57386151c06e58ca53a78d83f36107316cec125f",
        "num_rows": 1,
    }
    assert (record["num_tokens"], record["num_scored"], record["num_bytes"], record["num_words"]) == (13, 12, 12, 2)
    assert record["client_version"] == __version__
    assert record["server"]["vllm_version"] == "0.32.0"
    assert record["urls"] == [url], "without the password"


def test_the_values_of_every_token_are_beside_the_output(url, tmp_path):
    output = tmp_path / "result.json"
    options = ["--method", "disjoint", "--context-length", "4", "--output", str(output), "--quiet"]
    assert main(["--url", url, "--text", TEXT, *options]) == 0
    record = json.loads(output.read_text())
    assert (record["kind"], record["version"]) == ("perplexity", 1)
    windows = [TOKENS[start : start + 4] for start in (0, 4, 8)]
    arrays = load_file(tmp_path / "result.safetensors")
    assert {name: (str(array.dtype), array.tolist()) for name, array in arrays.items()} == {
        "token_ids": ("int32", [token for window in windows for token in window[1:]]),
        "logprobs": ("float32", [logprob(window, position) for window in windows for position in (1, 2, 3)]),
        "ranks": ("int32", [rank(window, position) for window in windows for position in (1, 2, 3)]),
        "window_sizes": ("int32", [3, 3, 3]),
    }
    assert record["arrays"] == {
        "file": "result.safetensors",
        "sha256": hashlib.sha256((tmp_path / "result.safetensors").read_bytes()).hexdigest(),
    }
    assert record["statistics"] == {
        "num_scored": 9,
        "num_windows": 3,
        "nll_q": record["nll_mean"],
        "nll_q_stderr": record["nll_stderr"],
        "ppl_q": record["perplexity"],
        "ppl_q_stderr": record["perplexity_stderr"],
    }


def test_ranks_are_asked_for_only_where_they_are_written():
    asked = []

    def note(request):
        if request.url.path == "/v1/score" and request.method == "POST":
            asked.append(json.loads(request.content)["return_ranks"])
        return answer(request)

    with serve(note) as url:
        assert main(["--url", url, "--text", TEXT, "--quiet"]) == 0
    assert asked == [False]


def test_an_output_that_has_the_name_of_its_arrays_is_refused(tmp_path, capsys):
    assert main(["--text", TEXT, "--output", str(tmp_path / "result.safetensors")]) == 1
    assert "the values of single tokens go to a file of that name" in capsys.readouterr().err
    (tmp_path / "taken.safetensors").mkdir()
    assert main(["--text", TEXT, "--output", str(tmp_path / "taken.json")]) == 1
    assert "taken.safetensors: it is no file" in capsys.readouterr().err


def test_a_result_beyond_floats_is_null_in_json(url, tmp_path):
    output = tmp_path / "result.json"
    # A single word of many tokens: exp(NLL of the word) is more than a float holds.
    (tmp_path / "long.txt").write_text("~" * 600)
    options = ["--text-file", str(tmp_path / "long.txt"), "--output", str(output), "--quiet"]
    assert main(["--url", url, *options]) == 0
    assert json.loads(output.read_text())["word_perplexity"] is None


def test_server_side_takes_the_servers_figures(tmp_path):
    stream = events(window_event(0, 1, [2.0] * 10, total_scored=10, perplexity=7.4), result_event(perplexity=7.4))

    def handler(request):
        if request.url.path != "/v1/perplexity":
            return answer(request)
        return httpx.Response(200, content=stream)

    output = tmp_path / "result.json"
    with serve(handler) as url:
        assert main(["--url", url, "--text", TEXT, "--server-side", "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert (record["perplexity"], record["settings"]["server_side"]) == (7.4, True)
    assert record["windows"] == [{"index": 0, "num_scored": 10, "nll_sum": 20.0, "nlls": None}]
    assert record["arrays"] is None
    assert list(tmp_path.iterdir()) == [output]


def test_datasets_text_files_and_samples(url, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "one"}\n{"body": "two"}\n{"body": "three"}\n')
    output = tmp_path / "result.json"
    options = ["--dataset", str(rows), "--text-column", "body", "--num-samples", "2", "--output", str(output)]
    assert main(["--url", url, *options]) == 0
    corpus = json.loads(output.read_text())["corpus"]
    assert (corpus["name"], corpus["num_rows"]) == ("rows.jsonl", 2)
    (tmp_path / "same.txt").write_text("one\n\ntwo")
    assert main(["--url", url, "--text-file", str(tmp_path / "same.txt"), "--output", str(output)]) == 0
    assert json.loads(output.read_text())["corpus"]["sha256"] == corpus["sha256"]


def test_the_api_key_and_model_reach_the_server():
    seen = []

    def handler(request):
        seen.append((request.headers.get("authorization"), json.loads(request.content or b"{}").get("model")))
        return answer(request)

    with serve(handler) as url:
        assert main(["--url", url, "--text", TEXT, "--api-key", "k", "--model", "m", "--quiet"]) == 0
    assert seen == [("Bearer k", None), ("Bearer k", "m"), ("Bearer k", "m")], "info, tokenize, one window"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --dataset --text --text-file is required"),
        (["--text", "a", "--dataset", "pydoc"], "not allowed with"),
        (["--text", "a", "--num-samples", "3"], "--num-samples needs --dataset"),
        (["--text", "a", "--concurrency", "0"], "at least 1"),
        (["--text", "a", "--timeout", "0"], "more than 0"),
        (["--text", "a", "--retry-for", "-1"], "at least 0"),
        (["--text", "a", "--resume"], "--resume needs --output"),
        (["--text", "a", "--url", "http://a", "--url", "http://a/v1"], "twice"),
        (["--text", "a", "--server-side", "--resume", "--output", "o"], "--resume does not work with --server-side"),
        (["--text", "a", "--server-side", "--concurrency", "2"], "--concurrency does not work with --server-side"),
        (["--text", "a", "--server-side", "--url", "http://a", "--url", "http://b"], "takes one --url"),
        (["--text", "a", "--method", "guess"], "invalid choice"),
        (["--text", "a", "--url", "localhost"], "not a server address"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ppl-client {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", ""], "no text"),
        (["--text", TEXT, "--stride", "65"], "stride 65 is larger"),
        (["--text", TEXT, "--context-length", "100"], "at most 64"),
        (["--text-file", "/no/where"], "No such file"),
        (["--dataset", "./nowhere"], "no such file or folder"),
    ],
)
def test_failures_exit_with_1_and_one_line(url, arguments, message, capsys):
    assert main(["--url", url, "--quiet", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ppl-client: error: ")
    assert message in line


def test_a_server_that_fails_in_the_middle(capsys):
    def handler(request):
        if request.url.path == "/v1/score" and request.method == "POST":
            return error(500, "the engine\ndied")
        return answer(request)

    with serve(handler) as url:
        assert main(["--url", url, "--text", TEXT, "--quiet", "--retry-for", "0"]) == 1
    assert capsys.readouterr().err == "ppl-client: error: the engine died (HTTP 500)\n"


@pytest.mark.parametrize("output", ["missing/result.json", "."], ids=["folder that is not there", "a folder"])
def test_an_output_that_cannot_be_written_is_found_before_the_run(tmp_path, output, capsys):
    requests = []

    def handler(request):
        requests.append(request)
        return answer(request)

    with serve(handler) as url:
        assert main(["--url", url, "--text", TEXT, "--output", str(tmp_path / output)]) == 1
    assert requests == []
    assert str(tmp_path) in capsys.readouterr().err


def test_a_failed_run_leaves_the_earlier_result_and_no_empty_file(url, tmp_path):
    earlier, new = tmp_path / "earlier.json", tmp_path / "new.json"
    earlier.write_text("earlier")
    for output in (earlier, new):
        assert main(["--url", url, "--text", TEXT, "--stride", "65", "--output", str(output)]) == 1
    assert earlier.read_text() == "earlier"
    assert not new.exists()


@pytest.mark.processes
def test_ctrl_c_exits_with_130_and_no_traceback():
    scoring, over = threading.Event(), threading.Event()

    def handler(request):
        if request.url.path == "/v1/score" and request.method == "POST":
            scoring.set()
            over.wait(60)
        return answer(request)

    with serve(handler) as url:
        command = [sys.executable, "-m", "scoremode.cli", "--url", url, "--text", TEXT]
        # A test run in the background ignores the signal, and so would its child.
        default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=default) as client:
            try:
                assert scoring.wait(60)
                client.send_signal(signal.SIGINT)
                _, messages = client.communicate(timeout=60)
            finally:
                client.kill()
                over.set()
    assert client.returncode == 130
    assert messages.splitlines()[-1] == "ppl-client: interrupted"
    assert "Traceback" not in messages
