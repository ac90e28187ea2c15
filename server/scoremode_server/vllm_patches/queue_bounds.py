"""vLLM's `--max-num-queued-reqs` and `--max-num-queued-tokens` without scoring requests, which have their own queue.

vLLM checks these bounds for each sequence, so a score of nine prompts would never pass a bound of eight.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_exempt = ContextVar("scoremode_exempt", default=False)


@contextmanager
def exempt_from_queue_bounds() -> Iterator[None]:
    """What this task sends to the engine inside is not refused by the bounds."""
    token = _exempt.set(True)
    try:
        yield
    finally:
        _exempt.reset(token)


def bound_generation_alone(engine: Any, num_scoring: Callable[[], int], num_scoring_tokens: Callable[[], int]) -> None:
    """Let an engine client's bounds count neither scoring sequences in the engine nor their tokens."""
    check_admission, get_num_queued_tokens = engine.check_admission, engine.get_num_queued_tokens

    def check_generation(n: int = 1, request_id: str | None = None) -> None:
        if not _exempt.get():
            check_admission(n - num_scoring(), request_id)

    engine.check_admission = check_generation
    engine.get_num_queued_tokens = lambda: max(0, get_num_queued_tokens() - num_scoring_tokens())
