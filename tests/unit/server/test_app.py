"""Settings of an API server process that are made once."""

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest

from scoremode_server.app import engine_size
from scoremode_server.prefix_cache.admission import EngineSize
from scoremode_server.settings import server_settings


@pytest.mark.parametrize(
    ("num_in_flight", "num_engines", "expected"),
    [
        # A CPU, a GPU, eight replicas on GPUs.
        (1, 1, EngineSize(tokens=2 * 2048, sequences=2 * 8, max_scoring_tokens=16 * 9000, reserved_tokens=256)),
        (2, 1, EngineSize(tokens=3 * 2048, sequences=2 * 8, max_scoring_tokens=16 * 9000, reserved_tokens=256)),
        (2, 8, EngineSize(tokens=24 * 2048, sequences=16 * 8, max_scoring_tokens=128 * 9000, reserved_tokens=2048)),
    ],
)
def test_an_engine_gets_one_step_more_than_is_in_flight(num_in_flight, num_engines, expected):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=8),
        parallel_config=SimpleNamespace(data_parallel_size=num_engines),
        cache_config=SimpleNamespace(kv_cache_size_tokens=9000),
        max_concurrent_batches=num_in_flight,
    )
    assert engine_size(config, server_settings(Namespace())) == expected
    given = server_settings(Namespace(max_scoring_tokens=100, request_timeout=3))
    assert engine_size(config, given) == replace(expected, max_scoring_tokens=100, request_timeout=3)
