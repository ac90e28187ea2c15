"""Settings by flag and by environment, and which plugins vLLM may load."""

import importlib.metadata
import os
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

import pytest

from scoremode_server.settings import (
    LOGPROB_VARIABLE,
    MAX_REQUEST_BYTES,
    PLUGINS_VARIABLE,
    SCORE_CACHE_VARIABLE,
    add_arguments,
    allow_plugin,
    logprob_bytes,
    server_settings,
)

MIB = 1024**2


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SCORE_CACHE_VARIABLE, raising=False)
    monkeypatch.delenv(LOGPROB_VARIABLE, raising=False)


def parsed(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_without_flags_and_variables_there_are_defaults():
    # Stock `vllm serve` has no such flags.
    for given in map(server_settings, (parsed(), Namespace())):
        assert (given.score_cache_bytes, given.max_request_bytes) == (512 * MIB, MAX_REQUEST_BYTES)
    assert logprob_bytes() == 256 * MIB


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("1000", 1000), ("3K", 3072), ("16m", 16 * MIB), ("2G", 2**31)])
def test_a_flag_comes_before_a_variable_of_the_same_sizes(monkeypatch, text, size):
    assert server_settings(parsed("--max-request-bytes", text)).max_request_bytes == size
    monkeypatch.setenv(SCORE_CACHE_VARIABLE, text)
    assert server_settings(parsed()).score_cache_bytes == size
    assert server_settings(parsed("--score-cache-bytes", "7")).score_cache_bytes == 7


@pytest.mark.parametrize("text", ["", "-1", "12X"])
def test_an_error_names_the_flag_or_variable_of_an_invalid_size(monkeypatch, capsys, text):
    with pytest.raises(SystemExit):
        parsed(f"--score-cache-bytes={text}")
    assert "--score-cache-bytes" in capsys.readouterr().err
    # Prompt logprobs need some memory.
    for variable, read, given in (
        (SCORE_CACHE_VARIABLE, lambda: server_settings(parsed()), text),
        (LOGPROB_VARIABLE, logprob_bytes, "0"),
    ):
        monkeypatch.setenv(variable, given)
        with pytest.raises(ValueError, match=variable):
            read()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(("lora,stats", "lora,stats,scoremode"), ("scoremode,lora", "scoremode,lora"), ("", "scoremode")),
        (None, "lora,scoremode,tpu"),
    ],
)
def test_scoremode_is_added_to_the_plugins_that_load_already(monkeypatch, given, expected):
    names = {"vllm.general_plugins": ["lora", "scoremode"], "vllm.platform_plugins": ["tpu"]}
    points = {group: [SimpleNamespace(name=name) for name in each] for group, each in names.items()}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points.get(group, []))
    monkeypatch.setenv(PLUGINS_VARIABLE, given or "")
    if given is None:
        del os.environ[PLUGINS_VARIABLE]
    allow_plugin()
    assert os.environ[PLUGINS_VARIABLE] == expected
