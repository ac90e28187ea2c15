"""Changes vLLM's engine client for scoring requests: changed weights drop cached rows, limits on queued requests do not
count scoring requests, and shutdown waits for scoring requests. vLLM does not report a change of weights, so the
methods that change them are wrapped."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, cast

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient

from scoremode_server.threads import drop_canceled
from scoremode_server.vllm_compat.output_processor import is_scoring

CHANGES = (
    *("reset_prefix_cache", "sleep", "wake_up", "release_kv_cache_memory", "add_lora", "remove_lora"),
    *("start_weight_update", "update_weights", "finish_weight_update", "update_weight_version", "collective_rpc"),
)
"""The engine client's methods after which cached rows may be wrong, or are not needed any more.

`sleep` may discard weights, and `wake_up` comes before they are loaded again. `add_lora` may load other weights under
the name and path of an adapter. `collective_rpc` calls anything in the workers, such as a method that reloads weights.
`reset_prefix_cache` and `release_kv_cache_memory` drop the keys and values that rows belong to.
"""


def within_changes(
    engine: EngineClient, change: Callable[[], AbstractContextManager[None]], after: Callable[[], None]
) -> None:
    """Wrap the engine client's methods in `CHANGES`: each runs inside a context of `change`, and then calls `after`.
    RuntimeError if the client does not have one of these methods, because changes might then go unnoticed."""

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        async def changed(*arguments: Any, **settings: Any) -> Any:
            try:
                with change():
                    return await method(*arguments, **settings)
            finally:
                after()

        return changed

    for name in CHANGES:
        method = getattr(engine, name, None)
        if not inspect.iscoroutinefunction(method):
            raise RuntimeError(f"vLLM's engine has no method {name}, after which cached logprobs must be dropped")
        setattr(engine, name, wrapped(method))


def may_go_unnoticed(config: VllmConfig) -> bool:
    """Whether another API server process may change weights without this one noticing. The routes that change them
    belong to vLLM's development mode, except for loading adapters, which vLLM refuses if there are several
    processes."""
    return bool(envs.VLLM_SERVER_DEV_MODE and config.parallel_config._api_process_count > 1)


_exempt = ContextVar("scoremode_exempt", default=False)


@contextmanager
def exempt_from_queue_bounds() -> Iterator[None]:
    """Exempt requests that this task sends to the engine inside this context from vLLM's limits."""
    token = _exempt.set(True)
    try:
        yield
    finally:
        _exempt.reset(token)


def bound_generation_alone(engine: Any) -> None:
    """Let an engine client's limits count neither scoring requests nor their tokens. API servers add up their counts,
    so the counts themselves must leave out scoring requests."""
    check_admission, processor = engine.check_admission, engine.output_processor

    def check_generation(n: int = 1, request_id: str | None = None) -> None:
        if not _exempt.get():
            check_admission(n, request_id)

    def generating() -> list[Any]:
        return [state for state in processor.request_states.values() if not is_scoring(state)]

    engine.check_admission = check_generation
    engine.get_num_queued_tokens = lambda: sum(state.prompt_len for state in generating() if state.is_prefilling)
    processor.get_num_unfinished_requests = lambda: len(generating())


def drop_canceled_texts(engine: Any) -> None:
    """Have an engine client's renderer drop the texts of an ended request at once, not when a thread is free to
    tokenize them."""
    drop_canceled(engine.renderer._executor)


engine_died = threading.Event()
"""Set if an engine of this process was dead already when it was shut down."""


def drain_before_shutdown(engine: Any, drain: Callable[[float], Coroutine[Any, Any, None]]) -> None:
    """Let an engine client's `shutdown` run `drain(seconds)` first, on the current event loop.

    On SIGTERM vLLM shuts its engine down while requests are still in it. `--shutdown-timeout` lets the engine finish,
    but the API server stops reading what it computes. vLLM calls `shutdown` from a thread, which waits for scoring
    requests here while the event loop still answers them.
    """
    loop, thread, shutdown = asyncio.get_running_loop(), threading.get_ident(), engine.shutdown

    def drain_and_shut_down(timeout: float | None = None) -> None:
        # vLLM calls `shutdown` twice, but only the first call drains.
        engine.shutdown = shutdown
        begun = time.monotonic()
        if engine.errored:
            engine_died.set()
        # After the engine's death vLLM calls this on the event loop itself, which cannot wait for itself.
        elif threading.get_ident() != thread and loop.is_running():
            asyncio.run_coroutine_threadsafe(drain(timeout or 0), loop).result()
        shutdown(timeout=None if timeout is None else max(0, timeout - (time.monotonic() - begun)))

    engine.shutdown = drain_and_shut_down


async def call_engines(client: Any, method: str, *args: Any) -> list[list[Any]]:
    """Call a method of all workers. Returns their results, engine by engine."""
    # The client's own `collective_rpc` is not used: with several engines it returns only the first one's results, and
    # it is wrapped to drop cached rows, since it may change weights. The methods called here do not.
    results = await client.engine_core.call_utility_all_async("collective_rpc", method, None, args, {})
    return cast(list[list[Any]], results)


async def call_workers(client: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of all workers. Returns the results of all engines in one list."""
    return [result for results in await call_engines(client, method, *args) for result in results]
