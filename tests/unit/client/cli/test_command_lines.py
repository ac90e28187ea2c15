"""Each command line as a row: its arguments, exit status, message and new files. Then what takes more than a row."""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_server import BOS, FakeServer, compare, error, logprob, rank, serve, token_text
from safetensors.numpy import load_file

from scoremode import __version__, errors
from scoremode.cli.compare import LIMIT_EXCEEDED
from scoremode.cli.main import COMMANDS, main
from scoremode.kld import POSITION_DTYPES, KldPositions
from tests.texts import DATA

ROOT = Path(__file__).parents[4]
TEXT = "The quick brown fox jumps over the lazy dog. Sphinx of black quartz, judge my vow!" * 2
TOKENS = [BOS, *TEXT.encode()]
WINDOWS = [TOKENS[start : start + 8] for start in range(0, len(TOKENS) - 7, 8)]
LOGPROBS = [logprob(window, position) for window in WINDOWS for position in range(1, 8)]
PERPLEXITY = math.exp(-sum(LOGPROBS) / len(LOGPROBS))
NOISE = 0.5
POSITIONS = KldPositions.concatenate([compare(window, 1, NOISE) for window in WINDOWS])
REFERENCE_NAMES = "--reference: must be up to 128 letters, digits, '.', '_' and '-', a letter or digit first, got "
MEAN_KLD = POSITIONS.kld.astype(np.float64).mean()


class Server(FakeServer):
    """Has a model `broken`, which fails."""

    def score(self, body: dict[str, Any]) -> httpx.Response | None:
        return error(500, "the engine\ndied\x1b") if body.get("model") == "broken" else super().score(body)


def run(command: str, url: str = "") -> int | str | None:
    """The exit status of a command line, where `TEXT` is the text and its windows, `SERVER` one that is asked quietly,
    `IDLE` one that is not asked, `URL` one with a progress bar, and `ANSWERS` a recording of answers."""
    command = command.replace("ANSWERS", "record --reference r --prompts p --max-new-tokens 3")
    command = command.replace("TEXT", f"--text '{TEXT}' --method disjoint --context-length 8")
    command = command.replace("SERVER", "--quiet URL").replace("IDLE", "--quiet URL").replace("URL", f"--url {url}")
    try:
        return main(shlex.split(command))
    except SystemExit as ended:
        return ended.code


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder of files that commands read, and a server's references."""
    folder = tmp_path_factory.mktemp("made")
    server = Server()
    with pytest.MonkeyPatch.context() as patch, serve(server) as url:
        patch.chdir(folder)
        assert run("record SERVER --reference base TEXT --routes", url) == 0
        assert run("SERVER TEXT --output plain.json", url) == 0
        assert run("kld SERVER --reference base --output own.json", url) == 0
        for name, noise in (("near", 0.1), ("far", 1.0)):
            with serve(Server(server.references, noise=noise)) as of_noise:
                assert run(f"kld SERVER --reference base --output {name}.json", of_noise) == 0
    (folder / "same.txt").write_text("one\n\ntwo")
    for name in ("old.json", "half.safetensors", "lanes-decode.json"):
        (folder / name).write_text("an earlier result")
    (folder / "latin.md").write_text("caf\xe9", encoding="latin-1")
    (folder / "utf16.md").write_text("text", encoding="utf-16-le")
    (folder / "empty.jsonl").touch()
    (folder / "two.md").write_text(2 * "<!-- scoremode -->\n<!-- /scoremode -->\n")
    (folder / "wrong.yaml").write_text("{output: o, text: {text: a}, models: [{name: base}]}")
    models = "{name: int8, model: ./begun}, {name: int4, model: ./int4}"
    (folder / "local.yaml").write_text(f"{{output: o, text: {{text: a}}, command: ['false'], models: [{models}]}}")
    card = (folder / "local.yaml").read_text().replace("./int4", "./begun").replace("output: o", "output: .")
    (folder / "card.yaml").write_text(card.replace("command:", "compare: {card: latin.md}, command:"))
    (folder / "taken.safetensors").mkdir()
    (folder / "begun").mkdir()
    for name in ("a", "b", "begun/a"):
        pq.write_table(pa.table({"text": [f"document {index}" for index in range(4)]}), folder / f"{name}.parquet")
    with serve(Server(noise=NOISE)) as url:
        assert run(f"corpus SERVER {folder}/a.parquet --output {folder}/done", url) == 0
    return folder, server.references


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> Path:
    """A copy of the folder, to work in."""
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def references(made) -> dict[str, Any]:
    return dict(made[1])


@pytest.mark.parametrize(
    ("command", "status", "message", "new_files"),
    [
        ("kdl --reference r", 2, "no command kdl; did you mean kld? (see ", ""),
        ("--url http://a record --reference r", 2, "It comes first: ppl-client record [options] (see ", ""),
        ("--text a --preset hf --method sliding", 2, "--method does not work with --preset", ""),
        ("--preset hf", 2, "give one of --dataset, --text, --text-file and --preset categories", ""),
        ("--preset categories --text ''", 2, "--text does not work with --preset categories, which has its own", ""),
        ("--dataset d --preset lm-eval --max-windows 3", 2, "the preset lm-eval, which measures whole documents", ""),
        ("--preset categories --by a", 2, "--by does not work with --preset categories, which has its own", ""),
        ("--preset categories --max-windows 3", 2, "the preset categories, which measures whole documents", ""),
        ("record --reference r", 2, "give one of --dataset, --text, --text-file and --preset categories", ""),
        ("quick a b --preset categories --dataset d", 2, "--dataset does not work with --preset categories", ""),
        ("quick a b --preset categories --max-windows 3", 1, "the preset categories, which measures whole", ""),
        ("quick a b.gguf --preset categories", 1, "gguf needs windows.preset: llama.cpp", ""),
        ("--text a --num-samples 3", 2, "--num-samples needs --dataset", ""),
        ("--text a --resume", 2, "--resume needs --output", ""),
        ("--text a --url http://a --url http://a/v1/", 2, "twice", ""),
        ("--text a --url http://a:99999", 2, "not a server address", ""),
        ("--text a --url http://a/v1/score/", 2, "ends in a route: give the server's address, http://a (see", ""),
        ("record --reference 'a b' --text a", 2, REFERENCE_NAMES, ""),
        ("kld --reference 'a b'", 2, REFERENCE_NAMES, ""),
        ("record --reference r --text a --url http://a --url http://b", 2, "takes one --url", ""),
        ("kld --reference r --floor --resume --output o", 2, "--resume does not work with --floor", ""),
        ("kld --reference r --floor --routes", 2, "--routes does not work with --floor, which compares", ""),
        ("--text a --decode-batch 2", 2, "--decode-batch needs --lane", ""),
        ("record --reference r --text a --max-new-tokens 3", 2, "--max-new-tokens needs --prompts", ""),
        ("record --reference r --text a --seed 0", 2, "--seed needs --prompts", ""),
        ("record --reference r --text a --temperature 0", 2, "--temperature needs --prompts", ""),
        ("--dataset d --by ''", 2, "--by: must be a name, got ", ""),
        ("kld --reference r --model ''", 2, "--model: must be a name, got ", ""),
        ("record --reference r --prompts p", 2, "--prompts needs --max-new-tokens", ""),
        ("ANSWERS --temperature 0.7", 2, "--temperature: must be 0 or 1, got 0.7", ""),
        ("ANSWERS --temperature 1", 2, "--temperature 1 and --seed S are given together", ""),
        ("ANSWERS --seed 1", 2, "--temperature 1 and --seed S are given together", ""),
        ("ANSWERS --temperature 1 --seed -1", 2, "--seed: must be at least 0", ""),
        ("ANSWERS --stride 1", 2, "--stride does not work with --prompts", ""),
        ("ANSWERS --layers", 2, "--layers does not work with --prompts", ""),
        ("ANSWERS --reference ../a", 2, REFERENCE_NAMES, ""),
        ("quick a", 2, "the following arguments are required: QUANT", ""),
        ("quick a b --text-file missing", 2, "--text-file: must be an existing file, got missing", ""),
        ("quick a b --text-file two.md --by c", 2, "--by does not work with --text-file, which is the whole text", ""),
        ("quick a b --text-file two.md --preset categories", 2, "--text-file does not work with --preset", ""),
        ("quick a b --prompts missing", 2, "--prompts: must be an existing file, got missing", ""),
        (
            "quick o/a o/b --prompts empty.jsonl --preset categories",
            1,
            "--prompts: empty.jsonl has no value in any",
            "",
        ),
        ("quick o/a o/b --tasks begun", 1, "--tasks: begun/a has no samples_TASK_DATE.jsonl below it; run lm-eval", ""),
        ("paths a --try ''", 2, "--try : give FLAG, FLAG=A,B, VARIABLE=A,B or command='...'", ""),
        ("paths a --try eager=", 2, "--try eager=: give FLAG, FLAG=A,B, VARIABLE=A,B or command='...'", ""),
        ("paths a --try VARIABLE", 2, "--try VARIABLE: give FLAG, FLAG=A,B, VARIABLE=A,B or command='...'", ""),
        ("paths a --try command", 2, "--try command: give FLAG, FLAG=A,B, VARIABLE=A,B or command='...'", ""),
        ("paths a --text-file two.md --try port=1", 1, "vary.flags.port", ""),
        ("paths a --text-file two.md --try command='\"'", 1, "vary.command.0", ""),
        ("quick a b --task-metric acc", 2, "--task-metric needs --tasks", ""),
        ("quick m m", 1, "error: quick: models: two are called 'm'", ""),
        ("quick a b --context-lenght 8", 2, "--context-lenght 8; did you mean --context-length? (see", ""),
        ("quick a b --max-kld=1", 2, "--max-kld=1; it is an option of compare (see", ""),
        ("quick a b --dtype float32", 2, "--dtype float32; flags of the servers come after -- (see", ""),
        ("compare near.json --dtype float32", 2, "unrecognized arguments: --dtype float32 (see", ""),
        (
            "quick a b --context-length 9 -- --max-model-len 8",
            1,
            "windows of 9 tokens do not fit in --max-model-len 8",
            "",
        ),
        ("quick a b -- --port 80", 1, "error: quick: serve: --port is set by the sweep", ""),
        ("--dataset d --chat-template-kwargs " + "[" * 1500, 2, "--chat-template-kwargs: must be a JSON object", ""),
        ("quick a b --messages m --preset hf", 2, "--preset does not work with --messages", ""),
        ("quick a b --write-card x.txt", 2, "must end in .md", ""),
        ("quick a b --html missing/x.html", 2, "missing is not a folder", ""),
        ("quick a b --write-card latin.md", 2, "--write-card: latin.md is not UTF-8 at byte 3: convert it", ""),
        ("quick a b --write-card utf16.md", 2, "--write-card: utf16.md is not UTF-8 at byte 1: convert it", ""),
        ("quick a b --write-card two.md", 2, "two.md: keep one <!-- scoremode --> and one <!-- /scoremode --> ", ""),
        ("sweep card.yaml", 1, "latin.md is not UTF-8 at byte 3: convert it", ""),
        ("compare a.json --markdown", 2, "--markdown is gone: --card prints the published table", ""),
        ("compare a.json --qbench b.json", 2, "--qbench is gone: use ppl-client kld for models that vLLM serves", ""),
        ("layers --reference r --keep 1", 2, "need --base-weights DIR", ""),
        ("record --reference r --text a --layers --stride 8", 2, "--stride does not work with --layers", ""),
        ("compare", 2, "give finished runs, or --tasks", ""),
        ("compare --tasks a=x", 2, "--tasks needs a folder for the base and one per other model", ""),
        ("corpus a.parquet", 2, "the following arguments are required: --output", ""),
        (
            "corpus a.parquet --output b --figures min_k,kld",
            2,
            "--figures: must be some of entropy, min_k, min_k++,",
            "",
        ),
        ("IDLE --text ''", 1, "no text", ""),
        ("IDLE TEXT --output missing/new.json", 1, "missing/new.json: No such file", ""),
        ("IDLE TEXT --output /dev/null", 1, "cannot write /dev/null: it is", ""),
        ("IDLE TEXT --output new.safetensors", 1, "a run's arrays need this name; choose another suffix", ""),
        ("IDLE TEXT --output taken.json", 1, "/taken.safetensors: it is", ""),
        ("IDLE TEXT --output old.json", 1, "old.json exists; --force replaces it", ""),
        ("IDLE TEXT --output old.json --resume", 1, "old.json exists; --force replaces it", ""),
        ("IDLE TEXT --output half.json", 1, "half.safetensors exists; --force replaces it", ""),
        ("IDLE TEXT --output half.json --resume", 1, "half.safetensors exists; --force replaces it", ""),
        ("IDLE TEXT --output lanes.json --lane both", 1, "lanes-decode.json exists; --force", ""),
        ("SERVER TEXT --model broken --retry-for 0 --output new.json", 1, r"error: the engine died\x1b (HTTP 500)", ""),
        ("SERVER --text a --context-length 8 --method disjoint", 1, "a smaller context_length (--context-length)", ""),
        ("kld SERVER --reference base --floor", 1, "the served model is not the reference's (HTTP 400)", ""),
        ("compare --tasks a=x a=y", 1, "--tasks: two folders are called 'a'", ""),
        ("compare near.json no.json", 1, "cannot read no.json: No such file or directory", ""),
        ("compare half.safetensors", 1, "has the values of a run's tokens: give the run itself, half.json", ""),
        ("corpus IDLE no.parquet --output out", 1, "no such file or folder: no.parquet", ""),
        ("sweep wrong.yaml", 1, "wrong.yaml: models.0: give a model to serve", ""),
        ("sweep local.yaml", 1, "int4: there is no ", ""),
        ("corpus SERVER a.parquet --output begun", 1, "begun/a.parquet exists or was started", ""),
        ("--version", 0, f"ppl-client {__version__}\n", ""),
        ("SERVER TEXT --output new.json", 0, f"{PERPLEXITY:.4f} ±", "new.json new.safetensors"),
        (f"SERVER --text {'~' * 600} --output new.json", 0, "inf", "new.json new.safetensors"),
        ("SERVER TEXT --calibration same.txt", 0, "same.txt, 8 tokens: 0 of 20 windows share more than 30%", ""),
        ("record SERVER --reference new TEXT --max-tokens 30", 0, "21 scored, 30 in the text", ""),
        ("kld SERVER --reference base", 0, f"Mean    KLD: {MEAN_KLD:10.6f} ±", ""),
        ("kld SERVER --reference base --routes", 0, "== Expert routes ======\nMean    KLD       : ", ""),
        ("kld SERVER --reference base --most-divergent 0", 0, " % PPL [", ""),
        ("compare near.json far.json", 0, "far is worse than near by mean KL divergence.", ""),
        ("compare near.json far.json --card", 0, "| quant | ΔPPL % \\[ ] | mean KLD ± | 99.9 % KLD | same top % |", ""),
        ("compare near.json far.json --card full", 0, "| quant | PPL ± | ΔPPL % \\[ ] |", ""),
        (
            "compare --card near.json far.json",
            2,
            "--card: must be full or nothing, and runs come before it, got near.json",
            "",
        ),
        (
            "compare near.json --fail-if differs --max-kld 1 --max-ppl-increase 1000",
            0,
            ": within 1000 % PPL, within 1 KLD",
            "",
        ),
        ("compare far.json --fail-if worse --max-kld 0.001", 3, "--fail-if worse and --max-kld 0.001: bytes: +", ""),
        ("compare far.json near.json --max-ppl-increase 1", 3, "--max-ppl-increase 1: far: +", ""),
        ("compare plain.json --max-kld 1", 1, "bytes has no base, so no limit can be checked", ""),
        ("compare near.json far.json --base fat", 1, "--base: no run is called 'fat'; there are: bytes, near, far", ""),
        ("compare own.json --fail-if worse --max-kld 0", 0, "; 0 nats from the reference.", ""),
        ("compare --tasks a=x b=y --max-kld 0", 2, "--max-kld needs runs", ""),
        ("compare near.json --html missing/report.html", 2, "missing is not a folder", ""),
        ("compare near.json --write-card README", 2, "--write-card: README must end in .md", ""),
        ("compare --tasks a=x b=y --base a", 2, "--base needs runs", ""),
        ("compare near.json --write-card README.md", 0, "bytes", "README.md README-kl-divergence.svg"),
        ("corpus SERVER a.parquet --output out", 0, "documents   4\ntokens      40\n", "out/a.parquet"),
        ("corpus SERVER a.parquet b.parquet --output done --resume", 0, "1 of them finished before", "done/b.parquet"),
        ("URL TEXT --output new.json --resume", 0, "starting at the beginning", "new.json new.safetensors"),
        ("record URL TEXT --reference new", 0, "ppl ", ""),
        ("kld URL --reference base", 0, f"kld {MEAN_KLD:.6f}", ""),
    ],
)
def test_each_command_line(folder, references, command, status, message, new_files, capsys, monkeypatch):
    before = contents(folder)
    has_progress = "URL" in command
    if has_progress:
        # As on a terminal.
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    server = Server(references, noise=NOISE)
    with serve(server) as url:
        assert run(command, url) == status
    printed = capsys.readouterr()
    shown, other = (printed.err, printed.out) if status or has_progress else (printed.out, printed.err)
    assert message in shown
    # Exceeded limits are printed next to the tables.
    assert has_progress or status == LIMIT_EXCEEDED or not other
    if status in (1, 2):
        [line] = shown.splitlines()
        assert re.match("ppl-client( [a-z]+)?: error: ", line)
    after = contents(folder)
    assert after.keys() - before.keys() == set(new_files.split())
    assert before.items() <= after.items()
    assert bool(server.requests) == ("SERVER" in command or has_progress)


def arrays_of(output: Path) -> dict[str, tuple[str, list[float]]]:
    """Type and values of each array next to an output, which has that file's checksum."""
    path = output.with_suffix(".safetensors")
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    assert json.loads(output.read_text())["arrays"] == {"file": path.name, "sha256": checksum}
    return {name: (str(array.dtype), array.tolist()) for name, array in load_file(path).items()}


def test_the_output_has_the_settings_and_the_values_of_every_token(folder):
    server = Server()
    with serve(server) as url:
        assert run("SERVER TEXT --output run.json", url.replace("http://", "http://me:secret@")) == 0
        assert run("SERVER TEXT --api-key k --model m", url) == 0
    assert server.keys[-20:] == ["Bearer k"] * 20
    assert [body.get("model") for _, _, body in server.requests[-20:]] == ["m"] * 20
    assert [path for _, path, _ in server.requests].count("/v1/tokens") == 1, "for the output alone"
    record = json.loads((folder / "run.json").read_text())
    assert (record["kind"], record["version"], record["client_version"]) == ("perplexity", 1, __version__)
    assert (record["urls"], record["server"]["vllm_version"]) == ([url], "0.32.0"), "without the password"
    assert record["settings"] == {
        "method": "disjoint",
        "context_length": 8,
        "stride": 8,
        "max_tokens": None,
        "concurrency": 8,
        "add_special_tokens": True,
        "server_side": False,
    }
    assert record["corpus"] == {
        "name": "text",
        "source": f"the text {TEXT!r}",
        "sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
        "num_rows": 1,
        **dict.fromkeys(("config", "split", "preset", "max_windows", "by")),
    }
    assert [record[f"num_{name}"] for name in ("tokens", "scored", "bytes", "words")] == [165, 140, 164, 31]
    assert record["nll_sum"] == pytest.approx(-sum(LOGPROBS))
    assert record["perplexity"] == pytest.approx(PERPLEXITY)
    second = [-value for value in LOGPROBS[7:14]]
    assert record["windows"][1] == {"index": 1, "num_scored": 7, "nll_sum": sum(second), "nlls": second}
    assert record["statistics"]["nll_q"] == record["nll_mean"]
    assert record["token_texts"] == {str(token): token_text(token) for token in sorted(set(TOKENS) - {BOS})}
    assert arrays_of(folder / "run.json") == {
        "token_ids": ("int32", [token for window in WINDOWS for token in window[1:]]),
        "logprobs": ("float32", LOGPROBS),
        "ranks": ("int32", [rank(window, position) for window in WINDOWS for position in range(1, 8)]),
        "window_sizes": ("int32", [7] * 20),
        "window_contexts": ("int32", [1] * 20),
    }
    assert [body["return_ranks"] for body in server.score_requests] == [True] * 20 + [False] * 20


def test_a_journal_of_an_earlier_version_is_resumed_and_each_missing_window_scored_once(folder, capsys):
    """Seven of 20 windows, written before the first release."""
    shutil.copy(DATA / "earlier/perplexity.json.journal", folder / "run.json.journal")
    with serve(server := Server()) as url:
        assert run("SERVER TEXT --output run.json --resume", url) == 0
    assert f"{folder}/run.json.journal: it has 7 of 20 windows" in capsys.readouterr().err
    assert server.num_scored == 13
    record = json.loads((folder / "run.json").read_text())
    assert record["perplexity"] == pytest.approx(PERPLEXITY, rel=1e-12)


def test_a_comparison_of_an_earlier_version_is_resumed_by_its_own_command_alone(folder, references, capsys):
    """Seven of 20 windows, written before the first release."""
    shutil.copy(DATA / "earlier/kld.json.journal", folder / "run.json.journal")
    with serve(server := Server(references, noise=NOISE)) as url:
        assert run("SERVER TEXT --output run.json --resume", url) == 1
        assert "kind is 'kld' instead of 'perplexity'" in capsys.readouterr().err
        assert run("kld SERVER --reference base --output run.json --resume", url) == 0
    assert sorted(server.compared) == list(range(7, 20))
    arrays, record = arrays_of(folder / "run.json"), json.loads((folder / "run.json").read_text())
    assert np.shape(arrays["top_tokens.token_ids"][1]) == (140, 2, 5)
    for name, dtype in POSITION_DTYPES.items():
        assert arrays[name] == (np.dtype(dtype).name, getattr(POSITIONS, name).tolist())
    assert (record["kind"], record["server"]["fingerprint"]) == ("kld", "noise 0.5")
    assert record["statistics"]["kld"]["mean"] == pytest.approx(MEAN_KLD, rel=1e-12)


@pytest.mark.parametrize("command", ["SERVER TEXT", "kld SERVER --reference base"])
def test_a_calibration_text_does_not_need_the_server_that_was_lost(folder, references, command, capsys):
    first, last = Server(references), Server(references)

    def dying(request: httpx.Request) -> httpx.Response | None:
        return first(request) if first.num_scored + len(first.compared) < 3 else None

    with serve(dying) as lost, serve(last) as url:
        assert run(f"{command} --url {url} --calibration same.txt --retry-for 0 --concurrency 1", lost) == 0
    assert "same.txt, 8 tokens: 0 of 20 windows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("has_answered", "options", "seconds"), [(False, "", 120), (False, "--retry-for 90", 90), (True, "", 600)]
)
def test_a_server_that_never_answered_is_waited_for_half_a_minute(has_answered, options, seconds, waits, clock):
    with serve(Server(allowed=0) if has_answered else lambda request: None) as url:
        assert run(f"SERVER TEXT --concurrency 1 {options}", url) == 1
    assert sum(waits) == pytest.approx(seconds)


@pytest.mark.parametrize("option", ["--model", "--api-key"])
def test_text_that_is_not_unicode_is_named_in_one_line(folder, capsys, option):
    with serve(Server()) as url:
        assert main(["--url", url, "--text", "abc", "--quiet", option, "a name or a key \ud800"]) == 1
    message = "ppl-client: error: a text, name or path has \\ud800, not valid Unicode\n"
    assert capsys.readouterr().err == message


def test_ctrl_c_is_status_130_and_one_line(folder, capsys):
    server, over = Server(), threading.Event()

    def slow(request: httpx.Request) -> httpx.Response | None:
        if request.method == "POST" and request.url.path == "/v1/score" and server.num_scored == 2:
            os.kill(os.getpid(), signal.SIGINT)
            over.wait(60)
        return server(request)

    # A test run in the background ignores the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with serve(slow) as url:
        try:
            assert run("SERVER TEXT --concurrency 1 --output new.json", url) == 130
        finally:
            over.set()
            signal.signal(signal.SIGINT, handler)
    kept = f"{folder}/new.json.journal has 2 of 20 windows: the same command with --resume resumes it"
    assert capsys.readouterr().err == f"ppl-client: interrupted; {kept}\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("arch", "compare near.json far.json", "report"),
        ("jinja2", "compare near.json far.json --html report.html", "report"),
        ("matplotlib", "compare near.json far.json --plots plots", "report"),
        ("pyarrow", "corpus a.parquet --output out --quiet", "corpora"),
        ("datasets", "--dataset wikitext --quiet", "datasets"),
        ("lm_eval", "", "lm-eval"),
    ],
)
def test_commands_name_the_missing_extra_that_they_need(folder, missing, command, extra):
    module = "scoremode.lm_eval" if missing == "lm_eval" else "scoremode.cli"
    code = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_module({module!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, *shlex.split(command)], capture_output=True, text=True)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f": {missing} is missing: it comes with an extra, scoremode[{extra}], for" in line


@pytest.mark.processes
def test_quick_names_all_missing_extras_at_once(tmp_path):
    missing = "sys.modules |= dict.fromkeys(('arch', 'datasets', 'jinja2', 'vllm'))"
    code = f"import sys; {missing}; from scoremode.cli.main import main; sys.exit(main(['quick', 'a', 'b']))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "ppl-client: error: missing: arch, jinja2, vllm, datasets. Install "
        "scoremode[report,cuda,datasets] (cpu in place of cuda without an NVIDIA GPU) for the Python at "
    )


def test_the_extras_that_are_looked_for_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    imported = {"adjusttext": "adjustText", "pyyaml": "yaml"}
    for name, packages in errors._EXTRAS.items():
        wanted = {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in extras[name]}
        assert set(packages) <= {imported.get(each, each) for each in wanted}
    assert len(errors._EXTRAS["report"]) == len(extras["report"])


HEAVY = {"arch", "huggingface_hub", "matplotlib", "pandas", "pyarrow", "scipy", "statsmodels", "torch", "vllm"}


@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        *(["compare", "nope.json"], ["compare", "x.safetensors"], ["compare", "--help"]),
        *(["sweep", "nope.yaml"], ["quick", "m", "m", "--dataset", "pydoc"]),
    ],
)
def test_what_is_told_without_a_comparison_imports_nothing_of_one(tmp_path, command):
    code = f"try: main.main({command})\nexcept SystemExit: pass\nprint('imported', {HEAVY} & {{*sys.modules}})"
    command = [sys.executable, "-c", f"import sys; from scoremode.cli import main\n{code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported set()"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_fits_a_page(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(f"{command} --help") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ppl-client ")]
    assert len(lines) <= 66
    assert max(map(len, lines)) <= 80
    options = {option.name: option for group in COMMANDS[command].groups for option in group.options}
    listed = {line.split()[0] for line in lines if line.startswith("  -")}
    rare = {name for name, option in options.items() if option.is_rare}
    gone = {name for name, option in options.items() if option.settings.get("help") == argparse.SUPPRESS}
    assert {name for name in options if name.startswith("-")} - listed == rare | gone
    if rare:
        run(f"{command} --help-all")
        listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  -")}
        assert rare <= listed


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "completions"),
    [("ppl-client qu", ["quick"]), ("ppl-client kld --lane ver", ["verify"]), ("ppl-client record --see", ["--seed"])],
)
def test_a_shell_completes_commands_options_and_their_values(tmp_path, line, completions):
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    environment = {**os.environ, **asked, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash"}
    subprocess.run([sys.executable, "-m", "scoremode.cli"], env=environment, check=True)
    assert (tmp_path / "answer").read_text().split() == completions
