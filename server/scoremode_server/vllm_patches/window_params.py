"""Sampling parameters of marked requests, which no client can send, and what API servers ask of engine workers."""

from typing import Any

from scoremode_server.vllm_patches.output_processor import ScoringParams
from scoremode_server.vllm_patches.reference_windows import MARK, WindowMark
from scoremode_server.vllm_patches.scored_windows import SCORED_MARK, ScoredMark


class WindowParams(ScoringParams):
    """Their type is what allows the mark: it stays in this process, and `guard_marks` looks at it."""

    @classmethod
    def mark(cls, params: ScoringParams, mark: WindowMark | ScoredMark) -> "WindowParams":
        """The parameters of a scoring request, marked."""
        marked = cls.of(params)
        # The row of the last target comes with those of the prompt.
        marked.logprobs = None
        marked.extra_args = mark.as_extra_args()
        return marked


def guard_marks(engine: Any) -> None:
    """Let an engine client refuse the marks in any other request: clients may set `extra_args` (`vllm_xargs`)."""
    add_request = engine.add_request

    async def add_unforged(request_id: str, prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
        forged = {MARK, SCORED_MARK} & set(getattr(params, "extra_args", None) or ())
        if forged and not isinstance(params, WindowParams):
            raise ValueError(f"vllm_xargs: {', '.join(sorted(forged))} cannot be set")
        return await add_request(request_id, prompt, params, *args, **options)

    engine.add_request = add_unforged


async def call_engines(client: Any, method: str, *args: Any) -> list[list[Any]]:
    """What a method of `ReferenceWorker` returns on each worker, engine by engine."""
    # Not by the client's own `collective_rpc`: with several engines it returns what the first one's workers do, and it
    # is wrapped to drop the cached rows, since weights may change by it. They do not change by these methods.
    of_engines: list[list[Any]] = await client.engine_core.call_utility_all_async(
        "collective_rpc", method, None, args, {}
    )
    return of_engines


async def call_workers(client: Any, method: str, *args: Any) -> list[Any]:
    """What a method of `ReferenceWorker` returns on each worker of each engine."""
    return [result for results in await call_engines(client, method, *args) for result in results]
