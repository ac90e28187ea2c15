"""vLLM's `--max-num-queued-reqs` and `--max-num-queued-tokens` without scoring requests, which have their own queue.

vLLM checks these bounds for each sequence, so a score of nine prompts would never pass a bound of eight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from scoremode_server.vllm_patches.output_processor import is_scoring

_exempt = ContextVar("scoremode_exempt", default=False)


@contextmanager
def exempt_from_queue_bounds() -> Iterator[None]:
    """What this task sends to the engine inside is not refused by the bounds."""
    token = _exempt.set(True)
    try:
        yield
    finally:
        _exempt.reset(token)


def bound_generation_alone(engine: Any) -> None:
    """Let an engine client's bounds count neither scoring requests nor their tokens.

    The bound of requests is one for all API servers: each makes its own number known to the others whenever it changes.
    So scoring requests are left out where each counts.
    """
    check_admission, processor = engine.check_admission, engine.output_processor

    def check_generation(n: int = 1, request_id: str | None = None) -> None:
        if not _exempt.get():
            check_admission(n, request_id)

    def generating() -> list[Any]:
        return [state for state in processor.request_states.values() if not is_scoring(state)]

    engine.check_admission = check_generation
    engine.get_num_queued_tokens = lambda: sum(state.prompt_len for state in generating() if state.is_prefilling)
    processor.get_num_unfinished_requests = lambda: len(generating())
