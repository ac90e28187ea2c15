"""Changes to vLLM's engine client for scoring requests: changes of weights drop cached rows, bounds of queued requests
do not count them, and the end waits for them. vLLM has no event for a change, so the methods that change weights are
wrapped."""

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
"""The engine client's methods after which rows may be wrong, or are not wanted any more.

`sleep` may discard weights, and `wake_up` comes before they are loaded again. `add_lora` may load other weights under
the name and path of an adapter. `collective_rpc` calls anything in the workers, reloading weights for one.
`reset_prefix_cache` and `release_kv_cache_memory` drop the keys and values that rows belong to.
"""


def within_changes(
    engine: EngineClient, change: Callable[[], AbstractContextManager[None]], after: Callable[[], None]
) -> None:
    """Run every one of `CHANGES` on this client inside a context of `change`, and call `after` when it is over.
    RuntimeError if the engine has no such method, so that changes may go unnoticed."""

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
    """Whether a change may reach another API server process than this one. The routes for it are of vLLM's development
    mode, except for loading adapters, which vLLM refuses where there are several processes."""
    return bool(envs.VLLM_SERVER_DEV_MODE and config.parallel_config._api_process_count > 1)


_exempt = ContextVar("scoremode_exempt", default=False)


@contextmanager
def exempt_from_queue_bounds() -> Iterator[None]:
    """Exempt from the bounds what this task sends to the engine inside."""
    token = _exempt.set(True)
    try:
        yield
    finally:
        _exempt.reset(token)


def bound_generation_alone(engine: Any) -> None:
    """Let an engine client's bounds count neither scoring requests nor their tokens. API servers add up what each of
    them counts, so scoring requests are left out there."""
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
    """Let an engine client's renderer keep no text of a request that has ended until a thread would tokenize it."""
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
        # vLLM calls it twice.
        engine.shutdown = shutdown
        begun = time.monotonic()
        if engine.errored:
            engine_died.set()
        # After the engine's death vLLM calls it on the event loop itself, where nothing could wait for the loop.
        elif threading.get_ident() != thread and loop.is_running():
            asyncio.run_coroutine_threadsafe(drain(timeout or 0), loop).result()
        shutdown(timeout=None if timeout is None else max(0, timeout - (time.monotonic() - begun)))

    engine.shutdown = drain_and_shut_down


async def call_engines(client: Any, method: str, *args: Any) -> list[list[Any]]:
    """Call a method of all workers. Returns their results, engine by engine."""
    # Not by the client's own `collective_rpc`: with several engines it returns what the first one's workers do, and it
    # is wrapped to drop the cached rows, since weights may change by it. They do not change by these methods.
    results = await client.engine_core.call_utility_all_async("collective_rpc", method, None, args, {})
    return cast(list[list[Any]], results)


async def call_workers(client: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of all workers. Returns the results of all engines in one list."""
    return [result for results in await call_engines(client, method, *args) for result in results]
