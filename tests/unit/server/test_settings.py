"""Settings by flag and by environment, what an engine gets by them, and which plugins vLLM may load."""

import importlib.metadata
import os
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest

from scoremode_server.app import engine_size
from scoremode_server.engine.admission import EngineSize
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


@pytest.mark.parametrize(
    ("num_in_flight", "num_engines", "expected"),
    [
        # A CPU, a GPU, eight replicas on GPUs.
        (1, 1, EngineSize(tokens=2 * 2048, sequences=2 * 8, max_scoring_tokens=2**24, reserved_tokens=256)),
        (2, 1, EngineSize(tokens=3 * 2048, sequences=2 * 8, max_scoring_tokens=2**24, reserved_tokens=256)),
        (2, 8, EngineSize(tokens=24 * 2048, sequences=16 * 8, max_scoring_tokens=2**24, reserved_tokens=2048)),
    ],
)
def test_an_engine_gets_one_step_more_than_is_in_flight(num_in_flight, num_engines, expected):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=8),
        parallel_config=SimpleNamespace(data_parallel_size=num_engines),
        max_concurrent_batches=num_in_flight,
    )
    assert engine_size(config, server_settings(Namespace())) == expected
    given = server_settings(Namespace(max_scoring_tokens=100, request_timeout=3))
    assert engine_size(config, given) == replace(expected, max_scoring_tokens=100, request_timeout=3)
