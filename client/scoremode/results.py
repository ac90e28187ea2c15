"""Reads answers of `/v1/score` and `/v1/kld` into arrays, and defines the form in which journals store windows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    model_validator,
)

from scoremode.errors import ResponseError
from scoremode.kld import POSITION_DTYPES, KldPositions
from scoremode.wire import (
    LOWEST_LOGPROB,
    ROUNDING,
    Int32,
    KldStatistics,
    Many,
    Rank,
    TopLogprobs,
    check_logprobs,
    decode_array,
    decode_arrays,
    decode_column,
    decode_top_logprobs,
    encode_array,
    encode_top_logprobs,
    wrong_value,
)
from scoremode.wire.calls import EventReader


def _logprobs(sent: object) -> NDArray[np.float32]:
    """Decode an answer's logprobs; minus infinity becomes `LOWEST_LOGPROB`, as in JSON and in `sum_logprob`."""
    logprobs: NDArray[np.float32] = np.maximum(decode_array("logprobs", sent, "<f4"), np.float32(LOWEST_LOGPROB))
    check_logprobs("logprobs", logprobs)
    return logprobs


def _candidate_logprobs(sent: object) -> NDArray[np.float32]:
    [logprobs] = decode_arrays("candidate_logprobs", sent, logprobs="<f4")
    check_logprobs("candidate_logprobs", logprobs)
    return logprobs


def _columns(sent: object) -> dict[str, NDArray[Any]]:
    if not isinstance(sent, dict):
        raise ResponseError("the server's columns are not an object")
    return {name: decode_column(name, column) for name, column in sent.items()}


_Top = Annotated[
    TopLogprobs,
    PlainValidator(decode_top_logprobs),
    PlainSerializer(lambda top: encode_top_logprobs(top.token_ids, top.logprobs)),
]


@dataclass(frozen=True, eq=False)
class Score:
    """One scored text, or one continuation. Lists and arrays run over `token_ids`; log-probabilities are in nats."""

    index: int
    """Index among all results of the request."""
    prompt_index: int
    continuation_index: int | None
    """None if the prompt itself was scored."""
    token_ids: Many[Int32]
    logprob_array: Annotated[NDArray[np.float32], Field(alias="logprobs"), PlainValidator(_logprobs)]
    """[n]; NaN for the first token of a text, which has no context."""
    sum_logprob: Annotated[float, Field(allow_inf_nan=False)]
    """Sum over the scored tokens, in float64."""
    num_scored: int
    ranks: Many[Rank | None] | None = None
    """Rank of each token in the vocabulary, 1 for the most likely; with `return_ranks`."""
    is_greedy: bool | None = None
    """Whether every scored token was the most likely one; with `return_ranks` or continuations."""
    tokens: Many[str] | None = None
    """Each token as text; with `return_tokens`."""
    top_logprobs: _Top | None = None
    """The most likely tokens at each position; None if not requested."""
    candidate_logprobs: Annotated[NDArray[np.float32] | None, PlainValidator(_candidate_logprobs)] = None
    """[n, m], the logprobs of the request's m candidate tokens at each position; NaN for a text's first token, which
    has no context. None if not requested."""
    columns: Annotated[dict[str, NDArray[Any]], PlainValidator(_columns)] = field(default_factory=dict)
    """The figures that `statistics` and `sinks` requested, by name: [n] or [n, width]. A position without context has
    NaN in a float32 array, -1 in an int32 array."""
    mean_batch: float | None = None
    """Mean number of decode-lane and verify-lane sequences in the engine during the request; None for prefill."""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        names = ("logprob_array", "ranks", "tokens", "top_logprobs", "candidate_logprobs")
        for name, values in ({name: getattr(self, name) for name in names} | self.columns).items():
            if values is not None and len(values) != num_tokens:
                field_name = name.removesuffix("_array")
                raise ResponseError(f"the server gave {len(values)} {field_name} for {num_tokens} tokens")
        if self.sum_logprob > ROUNDING * num_tokens:
            raise ResponseError(f"the server gave a sum_logprob of {self.sum_logprob}, which is above 0")

    @cached_property
    def logprobs(self) -> list[float | None]:
        """`logprob_array` as a list, with None in place of NaN."""
        return [None if math.isnan(logprob) else logprob for logprob in self.logprob_array.tolist()]

    @property
    def nlls(self) -> list[float]:
        """NLLs of the scored tokens, in nats."""
        nlls: list[float] = (-self.logprob_array[~np.isnan(self.logprob_array)]).tolist()
        return nlls


class _Scores(BaseModel):
    data: Many[Score]
    mean_batch: float | None = None


def parse_scores(body: object, sequences: Sequence[str | list[int]], first: int | Sequence[int] = 0) -> list[Score]:
    """Parse the scores in an answer.

    Args:
        body: The answer.
        sequences: The texts or token ids in the request.
        first: The requested first position: one for all sequences, or one per sequence.

    Raises:
        ResponseError: the scores do not fit the request, or are invalid.
    """
    scores = _Scores.model_validate(body)
    if len(scores.data) != len(sequences):
        raise ResponseError(
            f"the server did not score what it was sent: it gave {len(scores.data)} scores for {len(sequences)} texts"
        )
    starts = [first] * len(sequences) if isinstance(first, int) else first
    for index, (score, sequence, start) in enumerate(zip(scores.data, sequences, starts, strict=False)):
        if score.index != index or not (isinstance(sequence, str) or score.token_ids == list(sequence[start:])):
            raise ResponseError("the server did not score the tokens that it was sent")
    return [replace(score, mean_batch=scores.mean_batch) for score in scores.data]


NUM_TOP = 5
"""How many top tokens commands store for each of the most divergent positions."""
MAX_TOP_POSITIONS = 20_000
TOP_DTYPES = {"positions": "<i4", "token_ids": "<i4", "logprobs": "<f4"}


class JournalLine(BaseModel):
    """One window's result, as a journal stores it in a line of JSON."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    index: NonNegativeInt
    """The window's index in the run."""

    def to_line(self) -> dict[str, object]:
        """Return the fields for JSON, with numbers exact to the last bit."""
        return self.model_dump()


def decode_positions(fields: Mapping[str, Any]) -> KldPositions:
    """Decode the fields of `KldPositions` from base64."""
    arrays = {name: decode_array(name, fields.get(name), dtype) for name, dtype in POSITION_DTYPES.items()}
    for name, array in arrays.items():
        if wrong := wrong_value(name, array):
            raise ResponseError(f"{wrong} in the server's {name}")
    try:
        return KldPositions(**arrays)
    except ValueError as error:
        raise ResponseError(f"the server's answer has {error}") from error


def encode_positions(positions: KldPositions) -> dict[str, str]:
    """Encode the arrays in base64 for `decode_positions`."""
    return {name: encode_array(getattr(positions, name), dtype) for name, dtype in POSITION_DTYPES.items()}


class RouteCounts(BaseModel):
    """The choices of experts in a window of `num_scored` targets: see `RouteAgreement` in `wire.references`."""

    model_config = ConfigDict(frozen=True)

    same_set: Many[NonNegativeInt]
    """[layers]; likewise `same_first` and `shared`."""
    same_first: Many[NonNegativeInt]
    shared: Many[NonNegativeInt]
    differing_layers: Annotated[
        NDArray[np.int32],
        PlainValidator(partial(decode_array, "differing_layers", dtype="<i4")),
        PlainSerializer(lambda counts: encode_array(counts, "<i4")),
    ]
    """[num_scored]"""


class KldWindowValues(JournalLine):
    """One window of a reference, compared with the served model."""

    num_scored: int
    positions: Annotated[KldPositions, PlainValidator(decode_positions), PlainSerializer(encode_positions)]
    tops: list[_Top] = Field([], max_length=2)
    """The served model's top tokens and the reference's; empty if not requested."""
    columns: Annotated[dict[str, NDArray[Any]], PlainValidator(_columns), Field(exclude=True)] = {}
    """The figures that `statistics` requested, by name: [num_scored] float32, in nats. The reference's have
    "reference_" before the name. Journals do not store columns."""
    routes: RouteCounts | None = None
    """The choices of experts; None if not requested."""
    forced: "KldWindowValues | None" = None
    """The same window computed with the reference's experts; only in runs that compare experts."""
    mean_batch: float | None = None
    """As in `Score`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.positions) != self.num_scored:
            raise ResponseError(
                f"the server gave {len(self.positions)} positions for the {self.num_scored} of window {self.index}"
            )
        if any(len(column) != self.num_scored for column in self.columns.values()):
            raise ResponseError(f"the server's columns do not fit the {self.num_scored} of window {self.index}")
        if self.routes is not None and len(self.routes.differing_layers) != self.num_scored:
            raise ResponseError(f"the server's routes do not fit the {self.num_scored} of window {self.index}")
        if any(len(top) != self.num_scored for top in self.tops):
            raise ResponseError(f"the server's top_logprobs do not fit the {self.num_scored} of window {self.index}")
        return self

    @property
    def top_logprobs(self) -> TopLogprobs | None:
        """The served model's top tokens; None if not requested."""
        return self.tops[0] if self.tops else None

    @property
    def reference_top_logprobs(self) -> TopLogprobs | None:
        return self.tops[1] if len(self.tops) > 1 else None


def _window(event: Any) -> KldWindowValues:
    # The order in `tops` tells the two models apart. If only one is missing, its place has None, which is refused.
    tops = [event.get(name) for name in ("top_logprobs", "reference_top_logprobs")]
    names = {"index", "num_scored", "columns", "routes"} & event.keys()
    values = {name: event[name] for name in names}
    return KldWindowValues.model_validate({**values, "positions": event, "tops": [] if tops == [None, None] else tops})


class ResumedKld(JournalLine):
    """The sum of KL divergences in a window: of the whole model, or with its residual stream replaced at a boundary of
    its decoder layers. `index` counts, for each window, the whole model and then each boundary."""

    num_scored: int
    kld_sum: float


class GeneratedAnswer(JournalLine):
    """The answer of a served model to one of several prompts."""

    token_ids: Many[Int32]
    text: str

    @property
    def num_scored(self) -> int:
        """The number of tokens; all are targets."""
        return len(self.token_ids)


class ScoredRollout(JournalLine):
    """The logprobs of a training job's sequence in one lane, which journals store in base64."""

    logprobs: Annotated[
        NDArray[np.float32],
        PlainValidator(lambda sent: sent if isinstance(sent, np.ndarray) else _logprobs(sent)),
        PlainSerializer(lambda logprobs: encode_array(logprobs, "<f4")),
    ]

    @property
    def num_scored(self) -> int:
        return len(self.logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class KldResult:
    """Some windows of a reference, compared with the served model."""

    model: str
    reference: str
    fingerprint: str
    """The served model's fingerprint, as in a reference."""
    windows: tuple[Int32, Int32]
    """The range [first, end) of compared windows."""
    num_scored: int
    statistics: KldStatistics
    """Statistics over the positions of these windows, from the server; `scoremode.kld.statistics` gives the same."""
    data: list[InstanceOf[KldWindowValues]] = field(default_factory=list)
    """The windows, in order."""
    mean_batch: float | None = None
    """As in `Score`."""


_RESULT = TypeAdapter(KldResult)


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The k top tokens of the served model and of the reference at m of the `num_scored` positions.

    `positions` is [m], ascending; `token_ids` and `logprobs` (nats) are [m, 2, k], the served model first.
    """

    positions: NDArray[Any]
    token_ids: NDArray[Any]
    logprobs: NDArray[Any]
    num_scored: int

    def __post_init__(self) -> None:
        shape = (*self.positions.shape[:1], 2, *self.token_ids.shape[-1:])
        for name, dtype in TOP_DTYPES.items():
            array, expected = getattr(self, name), shape[:1] if name == "positions" else shape
            if array.shape != expected or array.dtype.kind != np.dtype(dtype).kind or np.isnan(array).any():
                raise ValueError(f"{name} are of type {array.dtype} and shape {array.shape}, or NaN")
        if (np.diff(self.positions, prepend=-1, append=self.num_scored) <= 0).any():
            raise ValueError(f"positions are not ascending numbers from 0 to {self.num_scored - 1}")

    def at(self, positions: NDArray[np.intp]) -> "TopTokens":
        is_wanted = np.isin(self.positions, positions)
        return TopTokens(
            self.positions[is_wanted], self.token_ids[is_wanted], self.logprobs[is_wanted], self.num_scored
        )


def most_divergent(windows: Sequence[KldWindowValues], kld: NDArray[Any]) -> TopTokens:
    """Select the top tokens at the `MAX_TOP_POSITIONS` positions of all windows that have the largest `kld` [n].
    ValueError if a window has no top tokens."""
    ids = np.concatenate([np.stack([top.token_ids for top in window.tops], axis=1) for window in windows])
    logprobs = np.concatenate([np.stack([top.logprobs for top in window.tops], axis=1) for window in windows])
    largest = np.argsort(-kld, kind="stable")[:MAX_TOP_POSITIONS]
    return TopTokens(np.arange(len(kld)), ids, logprobs, len(kld)).at(largest)


def kld_reader(
    on_window: Callable[[KldWindowValues], object] | None, requested: Sequence[int] | None = None
) -> EventReader[KldWindowValues, KldResult]:
    """Make a reader of a stream of compared windows that puts the windows into the result. The reader raises
    ResponseError if they are not the windows of the range `requested`, or, if that is None, of the result's range."""
    windows: list[KldWindowValues] = []

    def collect(window: KldWindowValues) -> None:
        windows.append(window)
        if on_window is not None:
            on_window(window)

    def read_result(event: object) -> KldResult:
        result = _RESULT.validate_python(event)
        first, last = result.windows if requested is None else requested
        data = [
            window.model_copy(update={"mean_batch": result.mean_batch})
            for window in sorted(windows, key=attrgetter("index"))
        ]
        indices = [window.index for window in data]
        if result.windows != (first, last) or len(indices) != last - first or indices != list(range(first, last)):
            raise ResponseError("the server did not compare the windows that it was asked for")
        return replace(result, data=data)

    return EventReader(("kld.window", "kld"), _window, read_result, collect, repeatable=on_window is None)
