"""Sweeps over processes that stand in for servers: what is measured, what is kept, and what a failure costs."""

import asyncio
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_server
import httpx
import pytest
from fake_server import ALLOWED, BOS, VOCAB_SIZE, FakeServer, StandIn, StoredReference, logprob, serve
from safetensors.numpy import load_file

from scoremode import OutputError
from scoremode.cli.main import main
from scoremode.comparison import card, compare, load_run, load_runs
from scoremode.errors import RunError
from scoremode.runs import open_locked
from scoremode.sweep import SweepPlan
from scoremode.sweep.processes import ProcessError, _resolved, _tied
from scoremode.sweep.sweep import SweepResult, compare_runs, run_sweep
from scoremode.wire.base_file import BaseFile

pytestmark = pytest.mark.processes

TEXT = "The quick brown fox jumps over the lazy dog. Sphinx of black quartz, judge my vow!"
NUM_WINDOWS = 10
BASE, NEAR, FAR = (
    {"name": name, "model": f"noise={noise}"} for name, noise in [("base", 0), ("near", 0.2), ("far", 1)]
)


PLAN = {
    "output": "runs",
    "text": {"text": TEXT},
    "windows": {"method": "disjoint", "context_length": 8},
    "command": [sys.executable, fake_server.__file__],
}


async def sweep(folder: Path, *models: dict[str, Any], at_once: int | None = None, **changes: Any) -> SweepResult:
    plan = SweepPlan.model_validate({**PLAN, "models": list(models), **changes})
    return await run_sweep(plan, folder, at_once=at_once)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in is ready much sooner than a server."""
    monkeypatch.setattr("scoremode.sweep.processes._POLL_SECONDS", 0.05)


@pytest.fixture(scope="module")
def swept_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swept")
    asyncio.run(sweep(folder, BASE, NEAR))
    return folder


@pytest.fixture
def swept(swept_once: Path, tmp_path: Path) -> Path:
    """A folder after a sweep over BASE and NEAR."""
    return Path(shutil.copytree(swept_once, tmp_path / "swept"))


def record(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / f"{name}.json").read_text())


def kinds(folder: Path) -> dict[str, str]:
    return {path.stem: record(folder, path.stem)["kind"] for path in (folder / "runs").glob("*.json")}


async def test_each_later_model_gets_its_divergence_from_the_first(tmp_path: Path):
    """Flags and variables may hold keys, which no run keeps. The last model's server is running already."""
    with_keys = {**BASE, "serve": ["--flag", "a-secret"], "env": {"KEY": "a-secret"}}
    with serve(StandIn("noise=1", tmp_path / "runs" / "references")) as url:
        result = await sweep(tmp_path, with_keys, NEAR, {"name": "far", "url": url}, floor=True)
    assert "a-secret" not in (tmp_path / "runs" / "base.json").read_text()
    assert result.failures == {}
    assert result.measured == list(result.runs) == ["base", "near", "far"]
    assert kinds(tmp_path) == {"base": "perplexity", "near": "kld", "far": "kld"}
    base, near, far = (record(tmp_path, name) for name in result.runs)
    windows = [[BOS, *TEXT.encode()][start : start + 8] for start in range(0, 80, 8)]
    nlls = [-logprob(window, position) for window in windows for position in range(1, 8)]
    assert base["statistics"]["nll_q"] == pytest.approx(sum(nlls) / len(nlls))
    assert 0 < near["statistics"]["kld"]["mean"] < far["statistics"]["kld"]["mean"]
    assert near["reference"]["noise_floor"]["mean"] == 0


async def test_measured_runs_are_kept_until_the_first_model_is_another(swept: Path):
    files = {path: path.stat().st_mtime_ns for path in (swept / "runs").glob("*.*")}
    result = await sweep(swept, BASE, NEAR, FAR)
    assert (result.measured, list(result.runs)) == (["far"], ["base", "near", "far"])
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert (await sweep(swept, {**BASE, "serve": ["--flag", "1"]}, NEAR)).measured == ["base", "near"]


def started_after(condition: str) -> list[str]:
    """The command of a server that waits until a shell's condition holds."""
    return ["sh", "-c", f'until {condition}; do sleep 0.05; done; exec "$0" "$@"', *PLAN["command"]]


async def test_servers_that_start_at_once_give_the_same_figures(swept_once: Path, tmp_path: Path):
    """The server of `far` is up first, then that of `base`, and `near` starts once `base` is measured."""
    broken = {"name": "broken", "model": "broken"}
    base = {**BASE, "command": started_after("grep -q 'GET /health' runs/logs/far.log")}
    near = {**NEAR, "command": started_after("test -e runs/base.json")}
    result = await sweep(tmp_path, base, near, broken, FAR, at_once=4)
    assert result.measured == ["base", "far", "near"], "each as it comes up, the first model first"
    assert list(result.runs) == ["base", "near", "far"]
    assert [*result.failures] == ["broken"]
    assert result.failures["broken"].endswith("out of memory, as always")
    assert kinds(tmp_path) == {"base": "perplexity", "near": "kld", "far": "kld"}
    for name in ("base", "near"):
        alone, at_once = (record(folder, name) for folder in (swept_once, tmp_path))
        assert alone["statistics"] == at_once["statistics"]
        arrays = [(folder / "runs" / f"{name}.safetensors").read_bytes() for folder in (swept_once, tmp_path)]
        assert arrays[0] == arrays[1]
    speeds = [record(tmp_path, "base")["tokens_per_second"], record(tmp_path, "near")["positions_per_second"]]
    assert (speeds, record(swept_once, "near")["positions_per_second"] > 0) == ([None, None], True)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*.*")}
    result = await sweep(tmp_path, base, near, FAR, at_once=4)
    assert (result.measured, list(result.runs)) == ([], ["base", "near", "far"])
    assert {path: path.stat().st_mtime_ns for path in files} == files


async def test_if_the_first_model_fails_next_to_others_their_earlier_runs_are_kept(swept: Path):
    before = record(swept, "near")
    broken = {**BASE, "model": "broken", "command": started_after("grep -q 'GET /health' runs/logs/near.log")}
    result = await sweep(swept, broken, NEAR, FAR, at_once=3)
    assert (list(result.runs), list(result.failures)) == (["near", "far"], ["base"])
    assert (record(swept, "near"), record(swept, "far")["kind"]) == (before, "perplexity")


async def test_servers_that_fit_the_gpu_together_get_their_memory(tmp_path: Path, monkeypatch):
    """A program stands in for `scoremode`, and says that a GPU has 100 GiB."""
    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program, total = tmp_path / "scoremode", 100 * 1024**3
    program.write_text(
        f"""#!/bin/sh
echo "$*" >> {tmp_path}/calls
[ "$1" = serve ] || exec echo '{{"free": {total}, "total": {total}}}'
shift; exec {shlex.join(PLAN["command"])} "$@"
"""
    )
    program.chmod(0o755)
    elsewhere = {"name": "elsewhere", "model": "noise=0.3", "env": {"CUDA_VISIBLE_DEVICES": 1}}
    other = {"name": "other", "model": "noise=0.4", "command": [str(program), "serve"]}
    for model in (BASE, NEAR, elsewhere, other):
        (tmp_path / model["model"]).mkdir()
        (tmp_path / model["model"] / "model.safetensors").write_bytes(bytes(1000))
        sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size"), 1)
        (tmp_path / model["model"] / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 64}))
    near = {**NEAR, "serve": "--gpu-memory-utilization 0.5"}
    result = await sweep(tmp_path, BASE, near, elsewhere, other, FAR, command=[str(program), "serve"])
    assert (result.failures, list(result.runs)) == ({}, ["base", "near", "elsewhere", "other", "far"])
    memory, *calls = (tmp_path / "calls").read_text().splitlines()
    flags = {call.split()[1]: call.partition("references")[2] for call in calls}
    assert memory == "memory"
    # 92 GiB are for servers, and half of them is left for `base`: 6 GiB to work in, a little cache, and the rest.
    assert re.fullmatch(r" --gpu-memory-utilization 0.4200 --kv-cache-memory-bytes (\d+)", flags["noise=0"])
    assert re.fullmatch(r" --gpu-memory-utilization 0.5000 --kv-cache-memory-bytes (\d+)", flags["noise=0.2"])
    assert [flags["noise=0.3"], flags["noise=0.4"]] == [""] * 2, "another GPU, and perhaps another engine: alone"
    assert flags["noise=1"] == "", "its size is not known, so it runs alone"


async def test_two_sweeps_in_one_folder_are_refused(swept: Path):
    with open_locked(swept / "runs" / ".lock"), pytest.raises(OutputError, match="another ppl-client writes"):
        await sweep(swept, BASE, NEAR)


async def test_an_incomplete_reference_is_recorded(swept: Path):
    (kept,) = (swept / "runs" / "references").iterdir()
    (kept / "manifest.json").write_text('{"result": null}')
    assert (await sweep(swept, BASE, NEAR)).measured == [], "no model needs it"
    assert (await sweep(swept, BASE, NEAR, FAR)).measured == ["base", "far"]
    assert record(swept, "far")["kind"] == "kld"
    assert kept.is_dir()


async def test_without_the_first_model_the_others_get_perplexity(tmp_path: Path):
    result = await sweep(tmp_path, {**BASE, "model": "broken"}, NEAR)
    assert (list(result.runs), list(result.failures)) == (["near"], ["base"])
    assert kinds(tmp_path) == {"near": "perplexity"}
    assert (await sweep(tmp_path, BASE, NEAR)).measured == ["base", "near"]
    assert record(tmp_path, "near")["kind"] == "kld"


async def test_a_run_with_divergence_is_not_replaced_by_perplexity(tmp_path: Path):
    base = FakeServer()
    with serve(base) as base_url, serve(FakeServer(base.references, noise=0.2)) as near_url:
        first, near = {"name": "base", "url": base_url}, {"name": "near", "url": near_url}
        await sweep(tmp_path, first, near)
        before = record(tmp_path, "near")
        base.references.clear()
        await sweep(tmp_path, first, near)
    assert before["kind"] == "kld"
    assert record(tmp_path, "near") == before


async def test_the_next_sweep_resumes_the_same_model_after_a_death(tmp_path: Path):
    allowed = tmp_path / "allowed"
    allowed.write_text("4")
    near = {**NEAR, "env": {ALLOWED: str(allowed)}}
    assert "the server ended with status 7" in (await sweep(tmp_path, BASE, near)).failures["near"]
    assert len((tmp_path / "runs" / "near.json.journal").read_text().splitlines()) == 1 + 4, "a header and windows"
    allowed.unlink()
    assert (await sweep(tmp_path, BASE, near)).measured == ["near"]
    # A server writes the requests that it gets to its log.
    assert (tmp_path / "runs" / "logs" / "near.log").read_text().count("POST /v1/kld") == NUM_WINDOWS - 4
    assert record(tmp_path, "near")["statistics"]["num_windows"] == NUM_WINDOWS
    assert not list((tmp_path / "runs").glob("*.begun")), "nor a journal"


async def test_answers_are_measured_next_to_the_text_and_alone_where_prompts_are_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    allowed, runs, prompts = tmp_path / "allowed", tmp_path / "runs", tmp_path / "prompts.jsonl"
    near = {**NEAR, "env": {ALLOWED: str(allowed)}}
    prompts.write_text('{"prompt": "ab"}\n{"prompt": "cde"}\n')
    # The server dies after the text.
    allowed.write_text(str(NUM_WINDOWS))
    assert list((await sweep(tmp_path, BASE, near, prompts="prompts.jsonl", max_new_tokens=6)).runs) == ["base", "near"]
    allowed.unlink()
    for rows, num_asked in ((prompts.read_text(), 2), ('{"prompt": "xyz"}', 1)):
        prompts.write_text(rows)
        result = await sweep(tmp_path, BASE, near, prompts="prompts.jsonl", max_new_tokens=6)
        base_log, near_log = ((runs / "logs" / f"{name}.log").read_text() for name in ("base", "near"))
        assert near_log.count("POST /v1/kld") == base_log.count("POST /v1/completions") == num_asked
    comparison = compare_runs(SweepPlan.model_validate({**PLAN, "models": [BASE]}), tmp_path, result)
    assert [*result.runs, len(comparison.runs)] == ["base", "near", "near (answers)", 2]
    alone = compare([load_run(runs / "near-answers.json")]).runs[-1]
    assert comparison.runs[1].agreement_median == alone.agreement_median is not None
    monkeypatch.chdir(runs)
    assert main(shlex.split(comparison.command("--card"))[1:]) == 0
    assert capsys.readouterr().out == (published := card(comparison))
    assert "- Answers: 1, greedy, at most 6 tokens each; the prompts are prompts.jsonl, sha256 " in published
    with pytest.raises(RunError, match="no run on a text has its model"):
        load_runs([runs / "base.json", runs / "near-answers.json"])


async def test_both_lanes_of_each_model_are_measured_and_kept(tmp_path: Path):
    result = await sweep(tmp_path, BASE, NEAR, lane="both", floor=True)
    labels = ["base", "base (decode)", "near", "near (decode)"]
    assert (result.failures, list(result.runs)) == ({}, labels)
    assert kinds(tmp_path) == {"base": "perplexity", "base-decode": "kld", "near": "kld", "near-decode": "kld"}
    assert [record(tmp_path, name)["settings"].get("lane") for name in ("near", "near-decode")] == [None, "decode"]
    again = await sweep(tmp_path, BASE, NEAR, lane="both", floor=True)
    assert (again.measured, list(again.runs)) == ([], labels)
    result = await sweep(tmp_path, BASE, FAR, lane="decode")
    assert list(result.runs) == ["base", "base (decode)", "far (decode)"]


LOG = Path(__file__).parents[3] / "data" / "llama_perplexity_kld.txt"
CONTEXT, CHUNKS = 8, 6


class Exporting(FakeServer):
    """Has a base file for llama.cpp, of zeros but for what is read of it, with three targets in each chunk."""

    def __call__(self, request: httpx.Request) -> httpx.Response | None:
        if not request.url.path.endswith("/llama.cpp"):
            return super().__call__(request)
        layout = BaseFile(CONTEXT, CHUNKS, 3 * CHUNKS, VOCAB_SIZE)
        return httpx.Response(200, content=(b"_logits_" + bytes([CONTEXT])).ljust(layout.size, b"\0"))


async def test_gguf_files_are_measured_against_the_first_model_once(tmp_path: Path):
    """A program stands in for llama.cpp's; bench/llama_cpp.sh runs the real one."""
    program, runs = tmp_path / "llama-perplexity", tmp_path / "runs"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncase $2 in *q4*) echo no memory; exit 1;; esac\ncat {LOG}\n'
    )
    program.chmod(0o755)
    for name in ("q8", "q4"):
        (tmp_path / f"{name}.gguf").write_text(name)
    server = Exporting()
    plan = {"models": [], "windows": {"preset": "llama.cpp", "context_length": CONTEXT, "max_windows": CHUNKS}}
    plan["gguf"] = {"llama_perplexity": str(program), "files": ["q8.gguf", "q4.gguf", "none.gguf"]}
    with serve(server) as url:
        for calls in (["q8", "q4"], ["q8", "q4", "q4"]):
            result = await sweep(tmp_path, **{**plan, "models": [{"name": "base", "url": url}]})
            assert [line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()] == [
                f"{tmp_path}/{name}.gguf" for name in calls
            ]
            assert list(result.logs) == ["q8"]
            assert re.fullmatch(rf".*ended with status 1 \(log {runs}/gguf/q4-.*\): no memory", result.failures["q4"])
            assert result.failures["none"] == f"there is no {tmp_path}/none.gguf"
    [base] = (runs / "gguf").glob("*.base")
    call = (tmp_path / "calls").read_text().splitlines()[0]
    assert call.endswith(f"--kl-divergence-base {base} --kl-divergence -c {CONTEXT} -lv 4")
    # It has other windows, so it is a failure instead of a row, and the comparison is there.
    comparison = compare_runs(SweepPlan.model_validate({**PLAN, **plan, "models": [BASE]}), tmp_path, result)
    assert (len(comparison.runs), len(comparison.logs)) == (1, 0)
    assert "has 8 chunks of 512 tokens" in result.failures["q8"]
    program.unlink()
    base.unlink()
    with serve(server) as url:
        plan["gguf"]["files"] = ["q4.gguf"]
        result = await sweep(tmp_path, **{**plan, "models": [{"name": "base", "url": url}]})
    assert base.exists(), "it is exported again"
    assert result.failures["q4"] == f"{program} is not a program; give its path as llama_perplexity"


# Its writes into a pipe show how long it runs.
SILENT = "import sys, time; pipe = open(sys.argv[1], 'wb', 0); pipe.write(b'up'); time.sleep(120); pipe.write(b'left')"
TRACEBACK = (
    "print('(EngineCore pid=7) ERROR ValueError: no \\x1b[31m memory for the cache');"
    "raise RuntimeError('Engine core initialization failed. See root cause above.')"
)


def write_plan(folder: Path, *models: dict[str, Any], **changes: Any) -> str:
    (folder / "plan.yaml").write_text(json.dumps({**PLAN, "models": models, **changes}))
    return str(folder / "plan.yaml")


def test_a_sweep_ends_with_a_comparison_and_the_log_of_each_failure(tmp_path: Path, capsys):
    base, runs = FakeServer(), tmp_path / "runs"
    near_server = FakeServer(base.references, noise=0.2)
    broken = {"name": "broken", "model": "m", "command": [sys.executable, "-c", TRACEBACK]}
    with serve(base) as base_url, serve(near_server) as near_url:
        models = [{"name": "base", "url": base_url}, {"name": "near", "url": near_url}]
        assert main(["sweep", write_plan(tmp_path, *models, broken), "--quiet"]) == 1
        printed = capsys.readouterr()
        assert [name in printed.out for name in ("base", "near", "broken")] == [True, True, True]
        *lines, last = printed.err.splitlines()
        assert f"ppl-client: model 1 of 3, base: served at {base_url}" in lines
        reason = f"status 1 (log {runs}/logs/broken.log): ValueError: no \\x1b[31m memory for the cache"
        assert last == f"ppl-client: broken failed: the server ended with {reason}"
        assert list((runs / "plots").glob("*.svg"))
        written = (runs / "report.html").stat().st_mtime_ns
        near_server.info["fingerprint"] = "another"
        assert main(["sweep", write_plan(tmp_path, *models, compare={"html": None, "plots": None}), "--quiet"]) == 0
    assert capsys.readouterr().err.count("measured before") == 1, "servers are asked what they serve"
    assert (runs / "report.html").stat().st_mtime_ns == written


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_a_sweep_that_is_stopped_leaves_no_server(tmp_path: Path, signal_number: signal.Signals):
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    silent = {"model": "m", "command": [sys.executable, "-c", SILENT, str(tmp_path / "pipe")]}
    plan = write_plan(tmp_path, {"name": "one", **silent}, {"name": "two", **silent})
    # A script that runs it in the background has it ignore SIGINT, and not SIGTERM.
    ignores = "--ignore-signal" if signal_number == signal.SIGTERM else "--default-signal"
    client = ["env", f"{ignores}=INT", sys.executable, "-m", "scoremode.cli", "sweep", plan, "--at-once", "2"]
    with subprocess.Popen(client, stderr=subprocess.PIPE, text=True) as sweep:
        written = b""
        while written != b"upup":
            assert select.select([pipe], [], [], 60)[0]
            written += os.read(pipe, 9)
        sweep.send_signal(signal_number)
        _, messages = sweep.communicate(timeout=60)
    is_killed = signal_number == signal.SIGKILL
    assert sweep.returncode == (-signal.SIGKILL if is_killed else 130)
    assert is_killed or messages.endswith("interrupted, servers are stopped: the same command resumes it\n")
    assert select.select([pipe], [], [], 60)[0]
    assert os.read(pipe, 9) == b"", "the end: nobody writes any more"
    os.close(pipe)


def test_llama_perplexity_ends_with_a_sweep_that_is_killed(tmp_path: Path):
    """Also if the sweep is gone before the kernel watches it."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "base").write_bytes(bytes(20))
    program = tmp_path / "llama-perplexity"
    program.write_text(f"#!{sys.executable}\nimport sys; sys.argv[1:] = [{str(tmp_path / 'pipe')!r}]\n{SILENT}")
    program.chmod(0o755)
    start = """import asyncio, sys; from pathlib import Path; from scoremode.sweep.processes import measure_file
program, *files = sys.argv[1:]; asyncio.run(measure_file(program, *map(Path, files)))"""
    arguments = [str(tmp_path / name) for name in ("llama-perplexity", "base", "base", "log")]
    with subprocess.Popen([sys.executable, "-c", start, *arguments]) as sweep:
        assert select.select([pipe], [], [], 60)[0]
        assert os.read(pipe, 9) == b"up"
        sweep.kill()
    assert select.select([pipe], [], [], 60)[0]
    assert os.read(pipe, 9) == b"", "the end: nobody writes any more"
    os.close(pipe)
    *launcher, _, command = _tied([sys.executable])
    late = [*launcher, "1" if os.getpid() != 1 else "2", command, "-c", "print('ran')"]
    assert subprocess.run(late, capture_output=True, check=True).stdout == b""


async def test_a_sweep_scores_the_text_of_its_first_model_once(tmp_path: Path, monkeypatch):
    event = StoredReference.event

    def with_ranks(self, index):
        logprobs = [-each for each in self.nlls([index])]
        return {**event(self, index), "logprobs": logprobs, "ranks": [7 + index] * len(logprobs)}

    monkeypatch.setattr(StoredReference, "event", with_ranks)
    server = FakeServer()
    with serve(server) as url:
        await sweep(tmp_path, {"name": "base", "url": url})
    assert server.score_requests == []
    [stored] = server.references.values()
    arrays = load_file(tmp_path / "runs" / "base.safetensors")
    assert (-arrays["logprobs"]).tolist() == stored.nlls(range(NUM_WINDOWS))
    assert arrays["ranks"].tolist()[::7] == [7 + index for index in range(len(arrays["ranks"][::7]))]


def test_a_command_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ProcessError, match=r"^command 'no-such-server' not found: it comes with an extra, scoremode"):
        _resolved(["no-such-server"], tmp_path)
