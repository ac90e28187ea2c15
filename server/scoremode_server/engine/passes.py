"""Score mode: the requests that vLLM's engine gets, and one pass of each through the engine.

To score the tokens t[0..n) the engine is fed t[:-1], and the workers know t[-1] from the request's `RowSpec`. So a
sequence as long as the model's context fits. The token that vLLM samples is not used.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.engine.protocol import EngineClient
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.engine.admission import RequestQueue
from scoremode_server.errors import EngineOutputError, engine_dead_error
from scoremode_server.rows import Rows, check_finished, complete_rows, missing_row, received_rows
from scoremode_server.vllm_compat.engine_client import exempt_from_queue_bounds
from scoremode_server.worker.row_spec import RowSpec, ScoringParams


def engine_id(request_id: str) -> str:
    """An id for the engine, unique even if two clients use the same request id: an abort must not end both."""
    return f"{request_id}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """A sequence of n tokens whose rows are wanted."""

    request_id: str
    token_ids: Sequence[int] | np.ndarray
    """[n]: the prompt, and the last target if it is not fed."""
    spec: RowSpec
    prompt: Mapping[str, Any]
    """vLLM's engine input."""
    params: ScoringParams
    first: int = 1
    """The position from which rows are needed."""
    use_cache: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `generate`, such as `lora_request`."""
    owner: str = ""
    """Owners share no rows, keys or values."""
    queue: RequestQueue | None = None
    """Of the HTTP request; without one, this enters the engine at once."""
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context for the time in the engine. An error on entering it keeps the sequence out."""

    @classmethod
    def score(
        cls, token_ids: Sequence[int], spec: RowSpec, *, request_id: str, cache_salt: str | None = None, **fields: Any
    ) -> "RowsRequest":
        """A request in score mode, of at least two tokens, the last of which is not fed, with further fields."""
        spec = replace(spec, last_token=token_ids[-1])
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            # `spec` has the number of top tokens; vLLM would check one given here against --max-logprobs.
            prompt_logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        prompt = tokens_input(list(token_ids[:-1]), cache_salt=cache_salt)
        return cls(request_id, token_ids, spec, prompt, ScoringParams.of(params, spec), **fields)

    @property
    def first_row(self) -> int:
        return self.first - 1


@dataclass(slots=True)
class EnginePass:
    """The rows that one pass through the engine computed for a sequence of n tokens."""

    output: RequestOutput
    num_cached_tokens: int
    """Tokens that the engine took from its prefix cache."""
    rows: Rows
    """Of the tokens after the first, [n - 1]; those before `first` are unset until they are found elsewhere."""
    first: int
    """How many of the first rows the engine left out, or returned as NaN or of another token."""

    def check(self, first_row: int) -> None:
        """Check that no row from `first_row` on is missing."""
        if self.first > first_row:
            raise missing_row(self.first)


async def run_engine(engine: EngineClient, request: RowsRequest, **how: Any) -> EnginePass:
    """Compute the rows of a request, as `in_engine` says."""
    output = await in_engine(engine, request, **how)
    num_cached = output.num_cached_tokens or 0
    computed = received_rows(output, request.spec.columns)
    # The rows are copied, and an answer keeps the output.
    output.prompt_logprobs = None
    first = max(num_cached, request.spec.first - 1)
    return EnginePass(output, num_cached, *complete_rows(request.token_ids, computed, first))


async def in_engine(
    engine: EngineClient,
    request: RowsRequest,
    *,
    reads_prefix_cache: bool = False,
    num_known: int = 0,
    suffix: str = "",
) -> RequestOutput:
    """The engine's finished output for a request. If the caller is cancelled, the engine's request, whose id ends in
    `suffix`, is aborted. Of its tokens, `num_known` are probably in the prefix cache. UnavailableError if the engine
    has died."""
    params = copy(request.params)
    params.skip_reading_prefix_cache = not reads_prefix_cache
    request_id, queue, output = request.request_id + suffix, request.queue, None
    num_fed = len(request.token_ids) - (request.spec.last_token is not None)
    # With a chunk, the tokens of one step: the engine computes a chunk in each.
    num_tokens = request.spec.chunk or num_fed - num_known
    slot: Any = nullcontext()
    if queue is not None:
        slot = queue.admission.slot(queue, request_id, num_tokens, decodes=bool(request.spec.chunk))
    try:
        async with slot:
            with request.inside(), exempt_from_queue_bounds():
                async for part in engine.generate(request.prompt, params, request_id, **request.options):
                    output = part
        if output is None:
            raise EngineOutputError("the engine ended a request without an output")
        check_finished(output)
        return output
    except EngineDeadError:
        raise engine_dead_error() from None
