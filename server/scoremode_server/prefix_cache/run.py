"""Score mode: the requests that vLLM's engine gets, and one pass of each through the engine.

To score the tokens t[0..n) the engine is fed t[:-1]. Prompt logprobs give every target but the last; the sampled token
is forced to be t[-1], and its raw logprob is the last target's. So a sequence as long as the model's context fits.
"""

import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.engine.protocol import EngineClient
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from scoremode_server.errors import EngineOutputError, UnfinishedError, engine_has_died, stopping
from scoremode_server.prefix_cache.admission import Gate, RequestQueue
from scoremode_server.rows import Rows, check_finished, missing_row, read_rows
from scoremode_server.vllm_patches.output_processor import ScoringParams
from scoremode_server.vllm_patches.queue_bounds import exempt_from_queue_bounds
from scoremode_server.vllm_patches.scored_windows import ScoredMark
from scoremode_server.vllm_patches.window_params import WindowParams


def engine_id(request_id: str) -> str:
    """An id for the engine, unique even if two clients use the same request id: an abort must not end both."""
    return f"{request_id}-{secrets.token_hex(4)}"


def is_moved(params: SamplingParams) -> bool:
    """Whether a request is moved to or from another engine."""
    return "kv_transfer_params" in (params.extra_args or {})


def score_params(token_ids: Sequence[int], top_logprobs: int = 0) -> ScoringParams:
    """The `SamplingParams` that score `token_ids` when `token_ids[:-1]` is the prompt, with the top k tokens at every
    position in addition to the actual token.

    Raises:
        ValueError: there are fewer than two tokens, so no token has a context.
    """
    if len(token_ids) < 2:
        raise ValueError(f"scoring needs at least 2 tokens, got {len(token_ids)}")
    return ScoringParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        prompt_logprobs=top_logprobs,
        logprobs=top_logprobs,
        flat_logprobs=True,
        allowed_token_ids=[token_ids[-1]],
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """A sequence of n tokens whose rows are wanted."""

    request_id: str
    token_ids: Sequence[int] | np.ndarray
    """[n]: the prompt, and the token that the sampled one is forced to be, if any."""
    num_fed: int
    """n, or n - 1 if there is a forced token."""
    prompt: Mapping[str, Any]
    """vLLM's engine input."""
    params: ScoringParams
    """Their number of prompt logprobs decides the columns of the rows."""
    first: int = 1
    """The position from which rows are needed; the first token has none."""
    use_cache: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `generate`, such as `lora_request`."""
    may_evict: bool = True
    """Whether other rows may be evicted to store its rows."""
    owner: str = ""
    """Owners share no rows, keys and values."""
    queue: RequestQueue | None = None
    """Of the HTTP request; without one, this enters the engine at once."""
    mark: ScoredMark | None = None
    """The mark of its parameters, if any."""
    gate: Gate | None = None
    """The gate in its queue where it waits, if any."""

    @classmethod
    def score(
        cls,
        token_ids: Sequence[int],
        *,
        request_id: str,
        top_logprobs: int = 0,
        cache_salt: str | None = None,
        mark: ScoredMark | None = None,
        **fields: Any,
    ) -> "RowsRequest":
        """A request in score mode, of at least two tokens, with further fields. A mark replaces `top_logprobs`."""
        params = score_params(token_ids, 0 if mark else top_logprobs)
        return cls(
            request_id,
            token_ids,
            len(token_ids) - 1,
            tokens_input(list(token_ids[:-1]), cache_salt=cache_salt),
            WindowParams.mark(params, mark) if mark else params,
            mark=mark,
            **fields,
        )

    @classmethod
    def sample(
        cls,
        token_ids: Sequence[int],
        *,
        request_id: str,
        prompt: Mapping[str, Any],
        params: ScoringParams,
        owner: str,
        options: Mapping[str, Any],
    ) -> "RowsRequest":
        """A request whose prompt is scored, and that samples as its parameters say."""
        # An engine that it is moved to or from must find its keys and values.
        moved = is_moved(params)
        return cls(
            request_id,
            token_ids,
            len(token_ids),
            prompt,
            params,
            use_cache=params.n == 1 and prompt["type"] == "token" and not moved,
            options=options,
            owner="" if moved else owner,
        )

    @property
    def num_columns(self) -> int:
        return self.mark.num_columns if self.mark else int(self.params.prompt_logprobs) + 1

    @property
    def first_row(self) -> int:
        return self.first - 1


@dataclass(slots=True)
class EnginePass:
    """What the engine computed for a sequence of n tokens."""

    output: RequestOutput
    rows: Rows
    """Of the tokens after the first, [n - 1]; rows before `first` are unset."""
    first: int
    """How many of the first rows the engine did not compute."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the engine took from its prefix cache."""
        return self.output.num_cached_tokens or 0

    def check(self, first_row: int) -> None:
        """Check that no row from `first_row` on is missing."""
        if self.first > first_row:
            raise missing_row(self.first)


async def run_engine(
    engine: EngineClient,
    request: RowsRequest,
    *,
    reads_prefix_cache: bool = False,
    num_known: int = 0,
    suffix: str = "",
) -> EnginePass:
    """Compute the rows of a request. If the caller is cancelled, the engine's request, whose id ends in `suffix`, is
    aborted. Of its tokens, `num_known` are probably in the prefix cache.

    Raises:
        UnavailableError: the engine has died, or the server stops.
    """
    output = await in_engine(engine, request, reads_prefix_cache=reads_prefix_cache, num_known=num_known, suffix=suffix)
    first_row = None if request.mark is None else request.mark.first - 1
    return EnginePass(output, *read_rows(request.token_ids, request.num_fed, request.num_columns, output, first_row))


async def in_engine(
    engine: EngineClient,
    request: RowsRequest,
    *,
    reads_prefix_cache: bool = False,
    num_known: int = 0,
    suffix: str = "",
) -> RequestOutput:
    """The engine's finished output for a request; else as `run_engine`."""
    params = copy(request.params)
    params.skip_reading_prefix_cache = not reads_prefix_cache
    request_id = request.request_id + suffix
    queue, output = request.queue, None
    if queue is not None:
        await queue.enter(request_id, request.num_fed, num_known, request.gate)
    try:
        with exempt_from_queue_bounds():
            async for part in engine.generate(request.prompt, params, request_id, **request.options):
                output = part
        if output is None:
            raise EngineOutputError("the engine ended a request without an output")
        check_finished(output)
        return output
    except EngineDeadError:
        raise engine_has_died() from None
    except UnfinishedError:
        if queue is not None and queue.is_stopped:
            raise stopping() from None
        raise
    finally:
        if queue is not None:
            queue.leave(request_id, request.num_fed, num_known, request.gate)
