"""What `ppl-client` says of commands, servers, outputs and plans that are not what was meant."""

import json
import re
import sys
from pathlib import Path

import pytest
from fake_server import FakeServer, StoredReference, serve
from safetensors.numpy import load_file

from scoremode.cli import main

TEXT = ["--text", "The quick brown fox jumps over the lazy dog", "--method", "disjoint", "--context-length", "8"]
TRACEBACK = (
    "print('(EngineCore pid=7) ERROR ValueError: no \\x1b[31m memory for the cache');"
    "raise RuntimeError('Engine core initialization failed. See root cause above.')"
)


@pytest.mark.parametrize(
    ("command", "message"), [("kdl --reference r", "no command kdl; did you mean kld?\n"), ("xyz", "no command xyz\n")]
)
def test_an_unknown_command_is_answered_with_the_nearest(command, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("usage: ppl-client [perplexity | record | kld | compare | sweep | corpus] [options]\n")
    assert printed.endswith(message)


def test_a_text_that_is_too_short_names_the_option_and_shows_no_empty_bar(capsys):
    with serve(FakeServer()) as url:
        assert main(["perplexity", "--url", url, *TEXT[2:], "--text", "a"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert (
        "2 tokens make no window of 8 with method 'disjoint'; give a smaller context_length (--context-length)" in line
    )


@pytest.mark.parametrize(
    ("has_answered", "options", "seconds"), [(False, [], 30), (False, ["--retry-for", "90"], 90), (True, [], 600)]
)
def test_a_server_that_never_answered_is_waited_for_half_a_minute(has_answered, options, seconds, waits, clock, capsys):
    with serve(FakeServer(allowed=0) if has_answered else lambda request: None) as url:
        assert main(["--url", url, *TEXT, "--concurrency", "1", "--quiet", *options]) == 1
    assert sum(waits) == pytest.approx(seconds)
    is_first_contact = "--retry-for waits longer" in capsys.readouterr().err
    assert is_first_contact == (seconds == 30)


@pytest.mark.parametrize("name", ["run.json", "run.safetensors"])
def test_a_finished_output_is_replaced_by_force_alone(tmp_path, name, capsys):
    (tmp_path / name).write_text("finished")
    server, command = FakeServer(), [*TEXT, "--quiet", "--output", str(tmp_path / "run.json")]
    with serve(server) as url:
        for more in ([], ["--resume"]):
            assert main(["--url", url, *command, *more]) == 1
            assert f"{tmp_path / name} is there already: --force replaces it" in capsys.readouterr().err
        assert (server.requests, (tmp_path / name).read_text()) == ([], "finished")
        assert main(["--url", url, *command, "--force"]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["kind"] == "perplexity"


def write_plan(folder: Path, *models: dict[str, object]) -> str:
    windows, compare = {"method": "disjoint", "context_length": 8}, {"html": None, "plots": None}
    plan = {"output": "runs", "text": {"text": TEXT[1]}, "windows": windows, "models": models, "compare": compare}
    (folder / "plan.yaml").write_text(json.dumps(plan))
    return str(folder / "plan.yaml")


def test_local_models_are_looked_for_before_any_is_served(tmp_path, capsys):
    (tmp_path / "checkpoints" / "int8").mkdir(parents=True)
    models = [{"name": each, "model": f"./checkpoints/{each}", "command": ["false"]} for each in ("int8", "int4")]
    assert main(["sweep", write_plan(tmp_path, *models)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"int4: there is no {tmp_path}/checkpoints/int4")
    assert not (tmp_path / "runs").exists()


@pytest.mark.processes
def test_a_sweep_says_where_it_is_and_why_a_server_failed(tmp_path, capsys):
    base = FakeServer()
    with serve(base) as base_url, serve(FakeServer(base.references, noise=0.2)) as near_url:
        running = [{"name": "base", "url": base_url}, {"name": "near", "url": near_url}]
        broken = {"name": "broken", "model": "m", "command": [sys.executable, "-c", TRACEBACK]}
        assert main(["sweep", write_plan(tmp_path, *running, broken), "--quiet"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert f"ppl-client: model 1 of 3, base: served at {base_url}" in lines
    assert any(
        re.fullmatch(rf"ppl-client: model 2 of 3, near: served at {near_url}, about \d+ s left", each) for each in lines
    )
    assert any(line.startswith("ppl-client: model 3 of 3, broken: loading `") for line in lines)
    log = tmp_path / "runs" / "logs" / "broken.log"
    reason = f"the server ended with status 1 (log {log}): ValueError: no \\x1b[31m memory for the cache"
    assert lines[-1] == f"ppl-client: broken failed: {reason}"


def test_a_sweep_scores_the_text_of_its_first_model_once(tmp_path, monkeypatch):
    event = StoredReference.event

    def with_ranks(self, index):
        logprobs = [-each for each in self.nlls([index])]
        return {**event(self, index), "logprobs": logprobs, "ranks": [7 + index] * len(logprobs)}

    monkeypatch.setattr(StoredReference, "event", with_ranks)
    server = FakeServer()
    with serve(server) as url:
        assert main(["sweep", write_plan(tmp_path, {"name": "base", "url": url}), "--quiet"]) == 0
    assert server.score_requests == []
    [stored] = server.references.values()
    arrays, nlls = load_file(tmp_path / "runs" / "base.safetensors"), stored.nlls(range(len(stored.windows)))
    assert (-arrays["logprobs"]).tolist() == nlls
    assert arrays["ranks"].tolist() == [7 + index for index in range(len(stored.windows)) for _ in range(7)]
    record = json.loads((tmp_path / "runs" / "base.json").read_text())
    assert record["statistics"]["nll_q"] == pytest.approx(sum(nlls) / len(nlls))
