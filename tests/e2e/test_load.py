"""A server that is asked for more than it can do at once."""

import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.metrics import metric

IN_ENGINE = r"(?:vllm:num_requests_(?:running|waiting)\{.*\}|scoremode_(?:running|waiting)_sequences)"


def gauges(server: str) -> list[float]:
    """Waiting and running sequences of scoring requests."""
    return [metric(server, f"scoremode_{name}_sequences") for name in ("waiting", "running")]


def sequences(count: int, length: int) -> list[list[int]]:
    return [[random.randrange(1_000) for _ in range(length)] for _ in range(count)]


def score(server: str, prompts: list[list[int]], **options: Any) -> httpx.Response:
    return httpx.post(f"{server}/v1/score", json={"prompt": prompts}, timeout=options.pop("timeout", 300), **options)


def healths_during(server: str, request: "Future[httpx.Response]") -> int:
    """How often the server reports that it is healthy until a request is done."""
    count = 0
    # One client for all: to make one takes longer than a response.
    with httpx.Client(timeout=60) as http:
        while not request.done():
            assert http.get(f"{server}/health").status_code == 200
            count += 1
            time.sleep(0.05)
    return count


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_small_request_does_not_wait_for_a_large_one(smollm2_server):
    with ThreadPoolExecutor() as pool:
        large = pool.submit(score, smollm2_server, sequences(100, 32))
        wait_until(lambda: gauges(smollm2_server)[0] > 50)
        waiting, running = gauges(smollm2_server)
        assert 0 < running <= 15
        assert waiting + running <= 100
        for _ in range(3):
            assert score(smollm2_server, sequences(1, 32)).status_code == 200
            assert not large.done()
        assert healths_during(smollm2_server, large) > 3
        assert large.result().status_code == 200
    assert len(large.result().json()["data"]) == 100
    assert gauges(smollm2_server) == [0, 0]


def test_a_large_request_whose_client_disconnects_ends(smollm2_server):
    with ThreadPoolExecutor() as pool:
        large = pool.submit(score, smollm2_server, [[5, 6]] * 60_000, timeout=5)
        assert healths_during(smollm2_server, large) > 3
    with pytest.raises(httpx.TimeoutException):
        large.result()
    assert score(smollm2_server, sequences(1, 32)).status_code == 200
    # vLLM's gauges are those after its last step: they read 0 while what comes next has not reached it.
    wait_until(lambda: metric(smollm2_server, IN_ENGINE) == 0)
