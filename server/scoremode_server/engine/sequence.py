"""The types that a score passes through, from its route to vLLM's engine and back: read them first.

A route makes a `TokenSequence`, with the `ScoreSettings` of its HTTP request. An `EnginePass` is a call of vLLM's
`generate` for it. Stages on the way set the fields that have no value yet.
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
    # `RowSpec` has the number of top tokens; vLLM would check one given here against --max-logprobs.
    prompt_logprobs=0,
    output_kind=RequestOutputKind.FINAL_ONLY,
    skip_clone=True,
)
"""Parameters of passes whose sampled token is not used."""


def engine_id(request_id: str) -> str:
    """An id for the engine, unique even if two clients use the same request id: an abort must not end both."""
    return f"{request_id}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSettings:
    """Settings of all sequences of an HTTP request."""

    request_id: str
    queue: RequestQueue
    top_logprobs: int = 0
    temperature: float = 1.0
    use_cache: bool = True
    cache_salt: str | None = None
    owner: str = ""
    """Owners share no rows, keys or values."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `generate`, such as `lora_request`."""
    chunk: int = 0
    """Tokens per step in a lane other than prefill; 0 in the prefill lane."""
    context: int | None = None
    """Tokens that are prefilled before the first chunk, at most; if None, all before the first wanted row."""
    is_answer: bool = False
    """Whether the wanted rows are of a generated answer, whose first token comes from the step that prefills."""

    def num_prefilled(self, first: int) -> int:
        """How many tokens need not come in chunks, in lanes that have chunks. No row from position `first` on then
        comes from a step with more than a chunk of tokens, except an answer's first."""
        most = first if self.is_answer else first - 1
        return max(1, most if self.context is None else min(self.context, most))


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class TokenSequence:
    """A sequence of n tokens, and what is wanted of them: the logprobs of its targets, the tokens from `first` on."""

    context: list[int]
    """It begins with the tokens before the targets. Sequences may share it: it is not copied until the engine needs
    it."""
    first: int = 0
    """Position of the first target: `logprobs_from`, or where a continuation, a turn or a window's targets start."""
    continuation: list[int] | None = None
    """The targets; None if they are the rest of `context`."""
    candidates: np.ndarray | None = None
    """More tokens to score, int32: [m] at all positions, or [n - first, m]."""
    sinks: Mapping[str, Any] = field(default_factory=dict)
    """What further figures are computed from the logits: see `RowSpec`."""
    sink_columns: Columns = ()
    may_be_cached: bool = True
    """False if a sink's figures depend on more than tokens."""
    prompt_index: int = 0
    """The place of its prompt or conversation in the request."""
    continuation_index: int | None = None
    """The place of its continuation, or of its turn in the conversation."""
    column: int = 0
    """The column of its last token in the last row of its pass; 0 if it is the pass's own last token."""
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
        """All tokens: a new list, unless `context` has them."""
        return self.context if self.continuation is None else self.context[: self.first] + self.continuation

    @property
    def last_token(self) -> int:
        return (self.continuation or self.context)[-1]

    @property
    def uses_cache(self) -> bool:
        """Whether its keys, values and rows may be shared. In lanes other than prefill they are not."""
        return self.settings.use_cache and not self.settings.chunk and self.may_be_cached

    @property
    def name(self) -> str:
        """Its place in the request, for error messages."""
        if self.continuation_index is None:
            return f"prompt[{self.prompt_index}]"
        return f"continuations[{self.continuation_index}] after prompt[{self.prompt_index}]"


@dataclass(slots=True, eq=False, repr=False)
class EnginePass:
    """A pass through the engine, which scores a sequence and others that differ from it in their last token alone.

    To score the tokens t[0..n) the engine is fed t[:-1], and the workers know t[-1] from `spec`. So a sequence as long
    as the model's context fits. Completions feed all tokens.
    """

    sequence: TokenSequence
    columns: dict[int, int] = field(default_factory=dict)
    """The column of the last row with each last token, the sequence's own first; empty without other sequences."""
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context for the time in the engine. An error on entering it keeps the pass out."""

    request_id: str = field(init=False)
    token_ids: Sequence[int] | np.ndarray = field(init=False)
    """[n]: the prompt, and the last target if it is not fed."""
    spec: RowSpec = field(init=False)
    prompt: Mapping[str, Any] = field(init=False)
    """vLLM's engine input."""
    params: ScoringParams = field(init=False)

    output: RequestOutput = field(init=False)
    """vLLM's output, without prompt logprobs."""
    rows: Rows = field(init=False)
    """Rows of the tokens after the first, [n - 1], of which the first `num_missing` are unset until they are found
    elsewhere; in an answer, those of the sequence's targets."""
    num_missing: int = field(init=False)
    """How many of the first rows the engine left out, or returned as NaN or of another token."""
    num_cached_tokens: int = field(init=False)
    """Tokens that were not computed for this sequence."""
    block_hashes: Sequence[bytes] = ()
    """Hashes of the sequence's whole blocks; none if its rows may not be stored."""
    num_cached_blocks: int = 0
    """How many of the first blocks the engine did not compute."""

    @property
    def num_candidates(self) -> int:
        """Tokens in each row next to the sequence's own."""
        return self.sequence.num_candidates + max(0, len(self.columns) - 1)

    @property
    def first_row(self) -> int:
        """The first row that is needed: the first token has none."""
        return max(0, self.sequence.first - 1)

    def check(self) -> None:
        """Check that no needed row is missing."""
        if self.num_missing > self.first_row:
            raise missing_row(self.num_missing)

    def begin(self, settings: ScoreSettings, request_id: str, block_size: int = 1) -> Self:
        """Prepare what the engine gets in score mode."""
        self.sequence.settings, token_ids = settings, self.sequence.token_ids
        # Keys and values that no other request may read have a salt of their own.
        cache_salt = settings.cache_salt if self.sequence.uses_cache else random_uuid()
        prompt = tokens_input(token_ids[:-1], cache_salt=cache_salt)
        return self.prepare(request_id, token_ids, self._spec(block_size), prompt, _SCORE_MODE)

    def prepare(
        self, request_id: str, token_ids: list[int], spec: RowSpec, prompt: Mapping[str, Any], params: SamplingParams
    ) -> Self:
        """Set what the engine gets. VLLMValidationError if a client has set in `params` what rows it wants."""
        self.request_id, self.token_ids, self.spec, self.prompt = request_id, token_ids, spec, prompt
        self.params = ScoringParams.of(params, spec)
        return self

    def _spec(self, block_size: int) -> RowSpec:
        """The rows that the engine's workers compute. Rows before `first` are left out, except those in the same block
        as `first`, if that block can be stored."""
        sequence, settings = self.sequence, self.sequence.settings
        first, num_top, candidates = max(1, sequence.first), settings.top_logprobs, sequence.candidates
        if len(self.columns) > 1:
            own: Any = [] if candidates is None else candidates
            candidates = np.array([*own, *list(self.columns)[1:]], np.int32)
            # The two top tokens tell which token is the most likely one, and alone.
            num_top = max(num_top, 2)
        if candidates is not None and candidates.ndim > 1:
            candidates = candidates[first - sequence.first :]
        elif sequence.uses_cache and (block := (first - 1) // block_size) < (sequence.num_tokens - 1) // block_size:
            # A block is stored whole or not at all. Another request may have it in common, and vLLM then leaves it out.
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
