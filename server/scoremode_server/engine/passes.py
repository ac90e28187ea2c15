"""Runs passes: a pass is one call of vLLM's `generate` for a sequence. The server's scoring requests call it only
here."""

from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.engine.sequence import EnginePass
from scoremode_server.errors import EngineOutputError, engine_dead_error
from scoremode_server.rows import check_finished, complete_rows, received_rows
from scoremode_server.vllm_compat.engine_client import exempt_from_queue_bounds


async def run_engine(engine: EngineClient, engine_pass: EnginePass, **how: Any) -> None:
    """Run a pass with `in_engine`, and set its output and rows."""
    output = engine_pass.output = await in_engine(engine, engine_pass, **how)
    spec, engine_pass.num_cached_tokens = engine_pass.spec, output.num_cached_tokens or 0
    # The pass keeps the output, but needs no second copy of the rows.
    computed, output.prompt_logprobs = received_rows(output, spec.columns), None
    first = max(engine_pass.num_cached_tokens, spec.first - 1)
    engine_pass.rows, engine_pass.num_missing = complete_rows(engine_pass.token_ids, computed, first)


async def in_engine(
    engine: EngineClient,
    engine_pass: EnginePass,
    *,
    reads_prefix_cache: bool = False,
    num_known: int = 0,
    suffix: str = "",
) -> RequestOutput:
    """Run a pass in the engine and return the finished output. The engine's request has an id that ends in `suffix`; it
    is aborted if the caller is cancelled. The first `num_known` tokens are probably in the prefix cache, so admission
    does not count them. UnavailableError if the engine has died."""
    spec, settings, output = engine_pass.spec, engine_pass.sequence.settings, None
    request_id, queue = engine_pass.request_id + suffix, settings.queue
    engine_pass.params.skip_reading_prefix_cache = not reads_prefix_cache
    num_fed = len(engine_pass.token_ids) - (spec.last_token is not None)
    # In lanes with chunks, only one chunk counts, because the engine computes one per step.
    num_tokens = spec.chunk or num_fed - num_known
    try:
        async with queue.admission.slot(queue, request_id, num_tokens, decodes=bool(spec.chunk)):
            with engine_pass.inside(), exempt_from_queue_bounds():
                async for part in engine.generate(
                    engine_pass.prompt, engine_pass.params, request_id, **settings.options
                ):
                    output = part
        if output is None:
            raise EngineOutputError("the engine ended a request without an output")
        check_finished(output)
        return output
    except EngineDeadError:
        raise engine_dead_error() from None
