"""Tells engine workers which rows a scoring request wants, in `SamplingParams.extra_args`. Clients cannot send this."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import wraps
from hashlib import blake2b
from inspect import signature
from typing import Any, Self, cast

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from scoremode_server.rows import Columns, score_columns

ROWS = "scoremode_rows"
"""The key of a `RowSpec` in `SamplingParams.extra_args`."""


@dataclass(frozen=True, slots=True)
class RowSpec:
    """The rows that a request wants: one per target, with logprobs of the target, the candidates and the top tokens."""

    first: int = 1
    """Position of the first target."""
    last_token: int | None = None
    """The last target, if it is not fed; None if it is the prompt's last token."""
    num_top: int = 0
    """Top tokens per row; -1 for the whole vocabulary."""
    temperature: float = 1.0
    num_candidates: int = 0
    candidates: bytes = b""
    """More tokens to score, as bytes of int32: [m] for all rows, or [rows, m] from the first target on; m is
    `num_candidates`."""
    sinks: Mapping[str, Any] = field(default_factory=dict)
    """Data of the request's sinks, by name. Sinks compute more columns: see `worker/sinks.py`."""
    sink_columns: Columns = ()
    """The columns that sinks add to the scores."""
    is_packed: bool = True
    """Whether rows are returned as `Rows.table`, not as the three arrays of vLLM's own prompt logprobs."""
    chunk: int = 0
    """Limit on tokens per step after the context; 0 for no limit."""
    context: int = 1
    """Tokens at the start to which the limit `chunk` does not apply."""

    @classmethod
    def read(cls, params: Any) -> "RowSpec | None":
        """Read the specification from a request's sampling parameters, or make one for vLLM's own prompt logprobs. None
        if the request wants no rows."""
        marked = ((params and params.extra_args) or {}).get(ROWS)
        if marked is not None:
            return msgspec.convert(marked, cls)
        if params is None or params.prompt_logprobs is None:
            return None
        return cls(num_top=params.prompt_logprobs, is_packed=False)

    def as_extra_args(self) -> dict[str, Any]:
        """Write the specification as `SamplingParams.extra_args`."""
        return {ROWS: msgspec.to_builtins(self, builtin_types=(bytes,))}

    @property
    def width(self) -> int:
        """Tokens in each row: the target, m candidates and k top tokens."""
        return 1 + self.num_candidates + self.num_top

    @property
    def columns(self) -> Columns:
        """The columns of the rows that workers return."""
        return score_columns(self.width) + self.sink_columns

    @property
    def has_own_candidates(self) -> bool:
        """Whether each row has candidates of its own."""
        return len(self.candidates) > 4 * self.num_candidates

    @property
    def identity(self) -> tuple[Any, ...] | None:
        """Everything that determines the rows of given tokens, except the number of top tokens. None if the rows are
        those of plain prompt logprobs."""
        if self.temperature == 1.0 and not self.candidates and not self.sinks:
            return None
        digest = blake2b(self.candidates, digest_size=16).hexdigest()
        # Candidates for each row start at `first`: with another `first`, the same candidates belong to other rows.
        first = self.first if self.has_own_candidates else None
        return self.temperature, self.num_candidates, digest, first, repr(sorted(self.sinks.items()))


class ScoringParams(SamplingParams):
    """Sampling parameters of a scoring request. The type marks the request, because no client can send a type.

    The engine's processes receive plain `SamplingParams`: fields are sent, not the type.
    """

    @classmethod
    def of(cls, params: SamplingParams, spec: RowSpec) -> Self:
        """Copy parameters that vLLM has checked, and add `spec`. VLLMValidationError if a client has set a `RowSpec` in
        them."""
        _check(params)
        marked = copy(params)
        marked.__class__ = cls
        marked.extra_args = {**(params.extra_args or {}), **spec.as_extra_args()}
        return cast("Self", marked)


def guard_rows(engine: Any) -> None:
    """Make vLLM's engine client refuse requests in which an HTTP client has set a `RowSpec`: HTTP clients may set
    `extra_args` (as `vllm_xargs`).

    Most of vLLM's routes make parameters with `SamplingParams.from_optional`, and the others pass theirs to `generate`.
    Both refuse before an answer is streamed. `add_request` is guarded for all other callers.
    """

    def guarded(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        place = list(signature(method).parameters).index(name)

        @wraps(method)
        def unforged(*args: Any, **options: Any) -> Any:
            _check(args[place] if len(args) > place else options.get(name))
            return method(*args, **options)

        return unforged

    SamplingParams.from_optional = staticmethod(guarded(SamplingParams.from_optional, "extra_args"))
    engine.add_request = guarded(engine.add_request, "params")
    engine.generate = guarded(engine.generate, "sampling_params")


def _check(wanted: Any) -> None:
    """Refuse sampling parameters, or their extra arguments, in which a client has set a `RowSpec`."""
    extra_args = wanted if isinstance(wanted, dict) else getattr(wanted, "extra_args", None)
    if type(wanted) is not ScoringParams and ROWS in (extra_args or ()):
        raise VLLMValidationError(
            f"{ROWS} cannot be set in vllm_xargs or extra_args, because it is the server's own: leave it out",
            parameter=ROWS,
        )
