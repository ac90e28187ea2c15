"""Settings of an API server process that are made once."""

import gc
from collections.abc import Iterator

import pytest
from vllm import envs

from scoremode_server.app import GC_THRESHOLD, prepare_process


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    envs.disable_envs_cache()


def test_garbage_is_looked_for_less_often_and_still_found():
    _, *older = gc.get_threshold()
    prepare_process()
    assert gc.isenabled()
    assert gc.get_threshold() == (GC_THRESHOLD, *older)


def test_vllms_environment_is_read_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "3")
    prepare_process()
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "4")
    assert envs.VLLM_LOG_STATS_INTERVAL == 3
    prepare_process()
    assert envs.VLLM_LOG_STATS_INTERVAL == 3
