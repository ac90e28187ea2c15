"""The command `scoremode`: the model that it serves, and what it sets for the processes of a server."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from vllm.config import ModelConfig
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config

from scoremode_server.cli import (
    MMAP_THRESHOLD,
    MMAP_THRESHOLD_VARIABLE,
    keep_tensors_off_the_heap,
    main,
    parse,
    paths,
    serve,
    tokenizer_threads,
)


@pytest.mark.parametrize(
    ("is_cpu", "given", "expected"),
    [(True, None, str(MMAP_THRESHOLD)), (True, "4194304", "4194304"), (False, None, None)],
)
def test_tensors_of_a_cpu_engine_stay_off_the_heap(monkeypatch, is_cpu, given, expected):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: is_cpu)
    # Set first, so that it is restored.
    monkeypatch.setenv(MMAP_THRESHOLD_VARIABLE, given or "")
    if given is None:
        del os.environ[MMAP_THRESHOLD_VARIABLE]
    keep_tensors_off_the_heap()
    assert os.environ.get(MMAP_THRESHOLD_VARIABLE) == expected


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (4, 1), (8, 2), (16, 4), (128, 4)])
def test_one_core_in_four_encodes_texts(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert tokenizer_threads() == threads


@pytest.mark.parametrize(("arguments", "config", "model"), [("m --port 1", "", "m"), ("", "model: n", "n")])
def test_a_model_is_named_by_arguments_or_a_config(tmp_path, arguments, config, model):
    (tmp_path / "config.yaml").write_text(f"port: 2\n{config}")
    assert parse(ServeSubcommand(), [*arguments.split(), "--config", str(tmp_path / "config.yaml")]).model == model


@pytest.mark.parametrize("arguments", ["", "--port 1", "--config CONFIG", "--config=CONFIG", "--config missing.yaml"])
def test_without_a_model_the_usage_is_shown(tmp_path, arguments, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("port: 2\n")
    given = arguments.replace("CONFIG", str(tmp_path / "config.yaml")).split()
    monkeypatch.setattr("sys.argv", ["scoremode", "serve", *given])
    with pytest.raises(SystemExit) as ended:
        parse(ServeSubcommand(), given) if given else main()
    assert ended.value.code == 2
    assert "usage: scoremode serve MODEL [any option of vllm serve]" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["/no/such/folder", "./folder"])
def test_a_folder_that_is_not_there_is_one_line(model):
    with pytest.raises(SystemExit, match=f"^scoremode: there is no {model}: give a checkpoint's folder"):
        parse(ServeSubcommand(), [model])


@pytest.mark.parametrize("missing", ["tokenizer*", "tokenizer.json"])
def test_a_copy_without_a_tokenizer_is_one_line_that_says_what_to_do(models, tmp_path, monkeypatch, missing):
    """vLLM's own start up to the tokenizer, which it loads before it starts an engine."""
    original, copy = models.random_llama(tmp_path / "model"), tmp_path / "copy"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns(missing))
    monkeypatch.setattr(
        ServeSubcommand,
        "cmd",
        staticmethod(lambda namespace: cached_tokenizer_from_config(ModelConfig(namespace.model))),
    )
    expected = (
        rf"^scoremode: no tokenizer can be loaded from {copy}: copy the original's tokenizer files into it, or name "
        r"the original with --tokenizer \(.*\)\Z"
    )
    with pytest.raises(SystemExit, match=expected):
        serve([str(copy)])


def test_what_vllm_refuses_in_its_configuration_is_one_line(models, tmp_path, monkeypatch):
    start = staticmethod(lambda namespace: ModelConfig(namespace.model, max_model_len=namespace.max_model_len))
    monkeypatch.setattr(ServeSubcommand, "cmd", start)
    with pytest.raises(SystemExit, match=r"^scoremode: .*max_model_len \(20000\) is greater than the derived"):
        serve([str(models.random_llama(tmp_path)), "--max-model-len", "20000"])


def test_other_failures_of_a_start_are_vllms_own(monkeypatch, tmp_path):
    def fail(namespace: object) -> None:
        raise ValueError("no memory for the tokenizer's cache")

    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(fail))
    with pytest.raises(ValueError, match="no memory"):
        serve([str(tmp_path)])


@pytest.mark.parametrize("memory", [None, (3, 80)])
def test_the_memory_of_the_gpu_is_json(monkeypatch, capsys, memory):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: memory is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory)
    monkeypatch.setattr("sys.argv", ["scoremode", "memory"])
    main()
    assert json.loads(capsys.readouterr().out) == (memory and {"free": 3, "total": 80})


@pytest.mark.parametrize(
    ("arguments", "ended_with"),
    [
        (["/no/such/folder"], "^scoremode: there is no /no/such/folder: "),
        (["MODEL", "--no-such-flag"], "^2$"),
        (["MODEL", "--max-model-len", "20000"], r"^scoremode: .*max_model_len \(20000\) is greater than the derived"),
    ],
)
def test_paths_end_as_a_server_does(random_model, capfd, arguments, ended_with):
    with pytest.raises(SystemExit, match=ended_with):
        paths([str(random_model) if argument == "MODEL" else argument for argument in arguments])
    # vLLM's log may go to the standard output that it found when it was imported.
    assert '"flags"' not in capfd.readouterr().out


@pytest.mark.processes
def test_a_missing_folder_is_told_before_vllm_is_imported():
    program = (
        "import sys; from scoremode_server import cli; sys.argv = ['scoremode', 'serve', '/no/such/folder']\n"
        "try: cli.main()\nexcept SystemExit as error: print(error, {'torch', 'vllm', 'transformers'} & {*sys.modules})"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert printed == (
        "scoremode: there is no /no/such/folder: give a checkpoint's folder, or its name on the hub set()\n"
    )


@pytest.mark.processes
def test_paths_are_json_logs_are_elsewhere_and_a_taken_port_is_one_line(random_model, tmp_path):
    """Both commands run in one process, which takes ten seconds to import vLLM. The folder of `serve` holds no model,
    which would be another error: the port is tried before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        of_paths = ["paths", str(random_model), "--dtype", "float32", "--kv-cache-dtype", "auto"]
        of_serve = ["serve", str(tmp_path), "--host", "127.0.0.1", "--port", str(port)]
        program = (
            f"import sys; from scoremode_server import cli; sys.argv[1:] = {of_paths}; cli.main()\n"
            f"print('The next command', file=sys.stderr); sys.argv[1:] = {of_serve}; cli.main()"
        )
        ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    log_of_paths, log_of_serve = ended.stderr.split("The next command")
    assert ended.stdout == '[{"flags": ["--enforce-eager"], "env": {}}]\n'
    assert "Resolved architecture: LlamaForCausalLM" in log_of_paths
    assert (ended.returncode, "Traceback" in log_of_serve) == (1, False)
    assert log_of_serve.splitlines()[-1] == (
        f"scoremode: port {port} is taken: stop the server that has it, or choose another with --port"
    )
