"""The command `scoremode`: the model that it serves, and what it sets for the processes of a server."""

import os

import pytest
from vllm.entrypoints.cli.serve import ServeSubcommand

from scoremode_server.cli import main, parse, tokenizer_threads


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (4, 1), (8, 2), (16, 4), (128, 4)])
def test_one_core_in_four_encodes_texts(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert tokenizer_threads() == threads


@pytest.mark.parametrize(("arguments", "config", "model"), [("m --port 1", "", "m"), ("", "model: n", "n")])
def test_a_model_is_named_by_arguments_or_a_config(tmp_path, arguments, config, model):
    (tmp_path / "config.yaml").write_text(f"port: 2\n{config}")
    given = [*arguments.split(), "--config", str(tmp_path / "config.yaml")]
    assert parse(ServeSubcommand(), given).model == model


@pytest.mark.parametrize("arguments", ["", "--port 1", "--config CONFIG", "--config=CONFIG", "--config missing.yaml"])
def test_without_a_model_the_usage_is_shown(tmp_path, arguments, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("port: 2\n")
    given = arguments.replace("CONFIG", str(tmp_path / "config.yaml")).split()
    monkeypatch.setattr("sys.argv", ["scoremode", "serve", *given])
    with pytest.raises(SystemExit) as ended:
        parse(ServeSubcommand(), given) if given else main()
    assert ended.value.code == 2
    assert "usage: scoremode serve MODEL [any option of vllm serve]" in capsys.readouterr().err
