"""Waits for several coroutines at once, or for a thread."""

import asyncio
from asyncio import TaskGroup
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

Result = TypeVar("Result")
Item = TypeVar("Item")
Parameters = ParamSpec("Parameters")


async def results_of(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines at once and return their results in order. If a coroutine fails, the others are cancelled, and
    the failure's exception is raised without an ExceptionGroup."""
    try:
        async with TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def results_for_each(
    items: Iterable[Item], function: Callable[[Item], Coroutine[Any, Any, Result]], *, at_once: int
) -> list[Result]:
    """Call an async function for each item, at most `at_once` at the same time, and return the results in order."""
    slots = asyncio.Semaphore(at_once)

    async def result_for(item: Item) -> Result:
        async with slots:
            return await function(item)

    return await results_of(map(result_for, items))


async def in_thread(
    function: Callable[Parameters, Result], /, *arguments: Parameters.args, **fields: Parameters.kwargs
) -> Result:
    """Run a function in a thread, as `asyncio.to_thread` does. A cancelled call waits for the thread to end, so that
    the caller can then close files that the function uses."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **fields))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
