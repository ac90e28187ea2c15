"""Memory for cached logprobs and for computing them, by flag and by environment; and which plugins vLLM may load."""

import importlib.metadata
from argparse import ArgumentParser, Namespace

import pytest

from scoremode_server.settings import (
    LOGPROB_VARIABLE,
    MAX_REQUEST_BYTES,
    SCORE_CACHE_VARIABLE,
    add_arguments,
    allowed_plugins,
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


def test_512_mib_unless_something_else_is_said():
    assert server_settings(parsed()).score_cache_bytes == 512 * MIB
    # Stock `vllm serve` has no such flag.
    assert server_settings(Namespace()).score_cache_bytes == 512 * MIB


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1000", 1000), ("3K", 3072), ("16M", 16 * MIB), ("16m", 16 * MIB), ("2G", 2048 * MIB)]
)
def test_flag_and_environment_take_the_same_sizes(monkeypatch: pytest.MonkeyPatch, text: str, size: int):
    assert server_settings(parsed("--score-cache-bytes", text)).score_cache_bytes == size
    monkeypatch.setenv(SCORE_CACHE_VARIABLE, text)
    assert server_settings(parsed()).score_cache_bytes == size


def test_the_flag_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SCORE_CACHE_VARIABLE, "1G")
    assert server_settings(parsed("--score-cache-bytes", "0")).score_cache_bytes == 0


@pytest.mark.parametrize("text", ["", "M", "-1", "1.5G", "12X", "1 G"])
def test_what_is_no_size_is_an_error_that_names_where_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
):
    with pytest.raises(SystemExit):
        parsed(f"--score-cache-bytes={text}")
    assert "--score-cache-bytes" in capsys.readouterr().err
    monkeypatch.setenv(SCORE_CACHE_VARIABLE, text)
    with pytest.raises(ValueError, match=SCORE_CACHE_VARIABLE):
        server_settings(parsed())


def test_the_longest_body_of_a_request_has_a_flag_only():
    assert server_settings(parsed("--max-request-bytes", "3K")).max_request_bytes == 3072
    assert server_settings(parsed()).max_request_bytes == MAX_REQUEST_BYTES
    # Stock `vllm serve` has no such flag.
    assert server_settings(Namespace()).max_request_bytes == MAX_REQUEST_BYTES


def test_working_memory_for_prompt_logprobs_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert logprob_bytes() == 256 * MIB
    monkeypatch.setenv(LOGPROB_VARIABLE, "1048576")
    assert logprob_bytes() == MIB
    monkeypatch.setenv(LOGPROB_VARIABLE, "64M")
    assert logprob_bytes() == 64 * MIB


@pytest.mark.parametrize("setting", ["many", "-1", "", "0"])
def test_working_memory_that_is_no_number_of_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, setting: str):
    monkeypatch.setenv(LOGPROB_VARIABLE, setting)
    with pytest.raises(ValueError, match=LOGPROB_VARIABLE):
        logprob_bytes()


class Point:
    def __init__(self, name: str) -> None:
        self.name = name


def test_scoremode_is_added_to_the_plugins_that_were_named():
    assert allowed_plugins("lora,stats") == "lora,stats,scoremode"
    assert allowed_plugins("scoremode,lora") == "scoremode,lora"
    assert allowed_plugins("") == "scoremode"


def test_plugins_that_load_by_default_still_do(monkeypatch: pytest.MonkeyPatch):
    installed = {"vllm.general_plugins": [Point("lora"), Point("scoremode")], "vllm.platform_plugins": [Point("tpu")]}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: installed.get(group, []))
    assert allowed_plugins(None) == "lora,scoremode,tpu"
