"""The types of a score on its way from a route to vLLM's engine and back. Read this module first.

A route makes a `TokenSequence` and gives it the `ScoreSettings` of its HTTP request. An `EnginePass` is one call of
vLLM's `generate` for the sequence. Later stages set the fields that have no value yet.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils import random_uuid

from scoremode_server.engine.admission import RequestQueue
from scoremode_server.rows import Columns, Rows, missing_row
from scoremode_server.worker.row_spec import RowSpec, ScoringParams

_SCORE_MODE = SamplingParams(
    max_tokens=1,
    temperature=0.0,
    detokenize=False,
    # The number of top tokens is in `RowSpec`, because vLLM would check a number given here against --max-logprobs.
    prompt_logprobs=0,
    output_kind=RequestOutputKind.FINAL_ONLY,
    skip_clone=True,
)
"""Parameters of passes that discard the one token that vLLM samples."""


def engine_id(request_id: str) -> str:
    """Make an id for the engine, unique even if clients use equal request ids, so that an abort ends one request
    only."""
    return f"{request_id}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSettings:
    """Settings that all sequences of an HTTP request share."""

    request_id: str
    queue: RequestQueue
    top_logprobs: int = 0
    temperature: float = 1.0
    use_cache: bool = True
    cache_salt: str | None = None
    owner: str = ""
    """Identifies the client by its API key; empty without keys. Different owners share no rows and no KV cache."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `generate`, such as `lora_request`."""
    chunk: int = 0
    """How many of a sequence's tokens the engine computes per step: 1 in the decode lane, a draft's tokens and one more
    in the verify lane; 0 in the prefill lane, which has no limit."""
    context: int | None = None
    """Limit on tokens prefilled before the first chunk, even if more come before the first target; None for no such
    limit."""
    prefills_first_target: bool = False
    """Whether the first target comes from the step that prefills, as in generation."""

    def num_prefilled(self, first: int) -> int:
        """How many tokens at the start are prefilled, in lanes with chunks. The rows of the tokens from position
        `first` on then come from steps of at most one chunk, except the first row if `prefills_first_target`."""
        most = first if self.prefills_first_target else first - 1
        return max(1, most if self.context is None else min(self.context, most))


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class TokenSequence:
    """A sequence of n tokens to score. The tokens from position `first` on are its targets: they get logprobs."""

    context: list[int]
    """The tokens before the targets. If `continuation` is None, the targets follow; else any further tokens are
    ignored. Sequences may share this list: it is not copied until the engine needs it."""
    first: int = 0
    """Position of the first target: `logprobs_from`, or where a continuation, a turn or a window's targets start."""
    continuation: list[int] | None = None
    """The targets; None if they are the rest of `context`."""
    candidates: np.ndarray | None = None
    """More tokens to score at each position, int32: [m] for all positions, or [n - first, m]."""
    sinks: Mapping[str, Any] = field(default_factory=dict)
    """Data for sinks, by name. A sink computes more figures of each row in the workers."""
    sink_columns: Columns = ()
    may_be_cached: bool = True
    """False if a sink's figures depend on more than the tokens, the model and the sink's data."""
    prompt_index: int = 0
    """Index of its prompt or conversation in the request."""
    continuation_index: int | None = None
    """Index of its continuation among those of its prompt, or of its turn among those of its conversation; None for a
    prompt."""
    column: int = 0
    """Where the logprob of the sequence's last token is in the pass's last row of logprobs: 0 for the pass's own
    sequence, else the index of a candidate. Sequences that share a pass differ in this token alone."""
    settings: ScoreSettings = field(init=False)

    @property
    def num_tokens(self) -> int:
        return len(self.context) if self.continuation is None else self.first + len(self.continuation)

    @property
    def num_targets(self) -> int:
        return self.num_tokens - self.first

    @property
    def num_candidates(self) -> int:
        return 0 if self.candidates is None else int(self.candidates.shape[-1])

    @property
    def targets(self) -> list[int]:
        if self.continuation is not None:
            return self.continuation
        return self.context[self.first :] if self.first else self.context

    @property
    def token_ids(self) -> list[int]:
        """All n tokens: the list `context` itself if `continuation` is None, else a new list."""
        return self.context if self.continuation is None else self.context[: self.first] + self.continuation

    @property
    def last_token(self) -> int:
        return (self.continuation or self.context)[-1]

    @property
    def uses_cache(self) -> bool:
        """Whether it may share keys, values and rows with other sequences; lanes other than prefill never do."""
        return self.settings.use_cache and not self.settings.chunk and self.may_be_cached

    @property
    def name(self) -> str:
        """The sequence's place in the request, for error messages."""
        if self.continuation_index is None:
            return f"prompt[{self.prompt_index}]"
        return f"continuations[{self.continuation_index}] after prompt[{self.prompt_index}]"


@dataclass(slots=True, eq=False, repr=False)
class EnginePass:
    """One call of vLLM's `generate`. It scores a sequence, and other sequences that differ from it only in their last
    token.

    To score tokens t[0..n), the engine is fed t[:-1], and `spec` tells the workers t[-1]. So a sequence may be as long
    as the model's context. Completions that score feed t[-1] as well.
    """

    sequence: TokenSequence
    columns: dict[int, int] = field(default_factory=dict)
    """Maps last tokens to their columns in the last row, the sequence's own first. May be empty if no other sequence
    shares the pass."""
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context manager for the time in the engine. If entering it raises an error, the engine is not called."""

    request_id: str = field(init=False)
    token_ids: Sequence[int] | np.ndarray = field(init=False)
    """[n]: the tokens that the engine is fed, and the last target if that is not fed."""
    spec: RowSpec = field(init=False)
    prompt: Mapping[str, Any] = field(init=False)
    """vLLM's engine input."""
    params: ScoringParams = field(init=False)

    output: RequestOutput = field(init=False)
    """vLLM's output, without prompt logprobs."""
    rows: Rows = field(init=False)
    """[n - 1]: the rows of all tokens after the first. The first `num_missing` are unset until they are found
    elsewhere. `ScoringEngine.rows` drops all but the targets' rows."""
    num_missing: int = field(init=False)
    """How many rows at the start are not valid. A row is valid if the engine returned it, and neither it nor any later
    row has a NaN or a wrong token."""
    num_cached_tokens: int = field(init=False)
    """Tokens at the start whose keys and values were cached, not computed for this pass."""
    block_hashes: Sequence[bytes] = ()
    """Hashes of the sequence's whole blocks; empty if its rows may not be stored."""
    num_cached_blocks: int = 0
    """How many blocks at the start were cached, not computed for this pass."""

    @property
    def num_candidates(self) -> int:
        """Candidates in each row: those of the request, and the last tokens of the other sequences."""
        return self.sequence.num_candidates + max(0, len(self.columns) - 1)

    @property
    def first_row(self) -> int:
        """Index of the first row that is needed. Row i is that of token i + 1, because the first token has no row."""
        return max(0, self.sequence.first - 1)

    def check(self) -> None:
        """Raise EngineOutputError if a needed row is missing."""
        if self.num_missing > self.first_row:
            raise missing_row(self.num_missing)

    def begin(self, settings: ScoreSettings, request_id: str, block_size: int = 1) -> Self:
        """Prepare the engine's input: all tokens except the last."""
        self.sequence.settings, token_ids = settings, self.sequence.token_ids
        # A random salt keeps other requests from reading keys and values that may not be shared.
        cache_salt = settings.cache_salt if self.sequence.uses_cache else random_uuid()
        prompt = tokens_input(token_ids[:-1], cache_salt=cache_salt)
        return self.prepare(request_id, token_ids, self._spec(block_size), prompt, _SCORE_MODE)

    def prepare(
        self, request_id: str, token_ids: list[int], spec: RowSpec, prompt: Mapping[str, Any], params: SamplingParams
    ) -> Self:
        """Set the engine's input. VLLMValidationError if a client has put a `RowSpec` into `params`."""
        self.request_id, self.token_ids, self.spec, self.prompt = request_id, token_ids, spec, prompt
        self.params = ScoringParams.of(params, spec)
        return self

    def _spec(self, block_size: int) -> RowSpec:
        """Specify the rows that workers compute: those of the targets, and earlier rows in the first target's block if
        the block can be stored."""
        sequence, settings = self.sequence, self.sequence.settings
        first, num_top, candidates = max(1, sequence.first), settings.top_logprobs, sequence.candidates
        if len(self.columns) > 1:
            own: Any = [] if candidates is None else candidates
            candidates = np.array([*own, *list(self.columns)[1:]], np.int32)
            # Two top tokens show which token is the most likely, and whether another token ties with it.
            num_top = max(num_top, 2)
        if candidates is not None and candidates.ndim > 1:
            candidates = candidates[first - sequence.first :]
        elif sequence.uses_cache and (block := (first - 1) // block_size) < (sequence.num_tokens - 1) // block_size:
            # Blocks are stored whole or not at all. vLLM computes no rows for tokens in its prefix cache, so a later
            # request can get this block's rows only from the store.
            first = block * block_size + 1
        return RowSpec(
            first=first,
            last_token=sequence.last_token,
            num_top=num_top,
            temperature=settings.temperature,
            num_candidates=self.num_candidates,
            candidates=b"" if candidates is None else candidates.tobytes(),
            sinks=sequence.sinks,
            sink_columns=sequence.sink_columns,
            chunk=settings.chunk,
            context=settings.num_prefilled(first),
        )
