"""A server that is asked for more than it can do at once."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.metrics import metric

IN_ENGINE = r"(?:vllm:num_requests_(?:running|waiting)\{.*\}|scoremode_(?:running|waiting)_sequences)"


def gauges(server: str) -> list[float]:
    """Waiting and running sequences of scoring requests."""
    return [metric(server, f"scoremode_{name}_sequences") for name in ("waiting", "running")]


def sequences(count: int, length: int) -> list[list[int]]:
    return [[random.randrange(1_000) for _ in range(length)] for _ in range(count)]


def score(server: str, prompts: list[list[int]], timeout: int = 300) -> httpx.Response:
    return httpx.post(f"{server}/v1/score", json={"prompt": prompts}, timeout=timeout)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_large_request_holds_up_no_small_one_and_ends_when_its_client_disconnects(smollm2_server):
    with ThreadPoolExecutor() as pool:
        large = pool.submit(score, smollm2_server, sequences(60_000, 2), 10)
        wait_until(lambda: gauges(smollm2_server)[0] > 50)
        waiting, running = gauges(smollm2_server)
        assert 0 < running <= 15
        assert waiting + running <= 60_000
        for _ in range(3):
            assert score(smollm2_server, sequences(1, 32)).status_code == 200
            assert not large.done()
        # One client for all: to make one takes longer than a response.
        with httpx.Client(timeout=60) as http:
            healths = []
            while not large.done():
                healths.append(http.get(f"{smollm2_server}/health").status_code)
                time.sleep(0.05)
    with pytest.raises(httpx.TimeoutException):
        large.result()
    assert set(healths) == {200}
    assert len(healths) > 3
    assert score(smollm2_server, sequences(1, 32)).status_code == 200
    # vLLM's gauges are those after its last step: they read 0 while what comes next has not reached it.
    wait_until(lambda: metric(smollm2_server, IN_ENGINE) == 0)
