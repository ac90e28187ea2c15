"""The wire types of references, of KL divergences from them, and of their statistics: see `wire.protocol`."""

from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, StringConstraints
from typing_extensions import TypedDict

from scoremode.wire.protocol import (
    Figure,
    Int32,
    Lane,
    LaneFields,
    Many,
    Nats,
    PerplexityRequest,
    ServedModel,
    ServerInfo,
    TextInWindows,
    TopLogprob,
    TopLogprobArrays,
    TopLogprobsCount,
    Usage,
)

REFERENCE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Names of references: they are folders below `--reference-dir`, so none is a path out of it."""

ReferenceName = Annotated[str, StringConstraints(pattern=f"^{REFERENCE_NAME}$")]
_LEAST_NOISE_FLOOR = {"float16": 1e-9, "bfloat16": 1e-7}
"""Nats, in the mean, by dtype: batches that round differently differ by more."""
_Word = Annotated[str, StringConstraints(max_length=1024)]


class CorpusInfo(BaseModel):
    """Where a text is from, according to the client."""

    model_config = ConfigDict(frozen=True)

    name: _Word
    config: _Word | None = None
    """Configuration of a dataset; this and the next are None for other texts, and from an older client."""
    split: _Word | None = None
    num_rows: int | None = None
    """That the text was joined from."""
    sha256: Annotated[str, StringConstraints(max_length=64)]
    """Of the text in UTF-8."""
    preset: _Word | None = None
    """The tool by whose rules the text was joined and is cut into windows (`ppl-client --preset`)."""
    max_windows: PositiveInt | None = None
    """The number of its first windows that were measured, if not all."""
    by: _Word | None = None
    """The column that its labels are from (`ppl-client --by`)."""

    @property
    def in_words(self) -> str:
        """The dataset and the beginning of the hash."""
        rows = None if self.num_rows in (None, 1) else f"{self.num_rows:,} rows"
        dataset = " ".join(filter(None, (self.name, self.config, self.split)))
        return ", ".join(filter(None, (dataset, rows, f"sha256 {self.sha256[:12]}")))


class Answer(BaseModel):
    """A prompt and what the model that is recorded answered to it."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    prompt_token_ids: Many[Int32] = Field(min_length=1)
    token_ids: Many[Int32]
    """The answer's, with the token that ends it; empty for an answer without a token."""
    text: str


class AnswerSettings(BaseModel):
    """How the model that is recorded was asked for answers."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    max_new_tokens: PositiveInt
    """The most tokens that an answer could have."""
    temperature: Literal[0, 1] = 0
    """0 for greedy answers, 1 for sampled ones."""
    seed: NonNegativeInt | None = None
    """The first answer's; each has one more than the answer before. None for greedy answers."""

    @property
    def are_greedy(self) -> bool:
        return self.temperature == 0


class Answers(AnswerSettings):
    """Answers as token ids, with how they were generated."""

    model_config = ConfigDict(extra="forbid", strict=True)

    data: Many[Answer] = Field(min_length=1)


class ReferenceAnswers(AnswerSettings):
    """How the answers of a reference were generated, and their number."""

    num_answers: PositiveInt
    """With those that have no token, and so no window."""

    @property
    def in_words(self) -> str:
        """Their number, and how they were generated."""
        how = "greedy" if self.are_greedy else f"sampled at temperature 1 with seed {self.seed}"
        return f"{self.num_answers:,}, {how}, at most {self.max_new_tokens:,} tokens each"


class ReferenceRequest(PerplexityRequest):
    """Body of `POST /v1/references`: a text as in `/v1/perplexity`, and the name to record the served model under."""

    body_factor: ClassVar[int] = 4

    name: ReferenceName
    """Of the reference: letters, digits, '.', '_' and '-', at most 128."""
    answers: Answers | None = None
    """In place of a text: prompts and answers as token ids, of which the answers' tokens are scored."""
    corpus: CorpusInfo | None = None
    """Where the text is from, kept with the reference."""
    labels: Many[_Word] | None = None
    """Of each text or conversation, such as its language, kept with the reference."""
    return_ranks: bool = False
    """With `stream`, each window's event has the logprobs and ranks of its targets."""
    layers: bool = False
    """Record the residual stream at each boundary of the decoder layers, from which `/v1/kld` can resume. The server
    must run with `--enforce-eager`."""


class NoiseFloor(BaseModel):
    """KL divergence of a model from itself, in nats: what other batches and other kernels make of the same weights."""

    mean: Nats
    p99: Nats
    max: Nats
    num_scored: int
    created: int
    agreement_lengths: list[NonNegativeInt] | None = None
    """For greedy answers, the tokens of each before the first that is not the model's top token."""


BlockKind = Literal["attention", "linear_attention", "mamba", "mlp", "moe", "layer"]
"""What a block computes: a mixer of tokens, an MLP or experts, or a whole layer that cannot be cut."""


class LayerBlock(BaseModel):
    """A part of a decoder layer between two boundaries of the residual stream."""

    model_config = ConfigDict(frozen=True)

    modules: list[str]
    """Those that it calls and that can be quantized, as vLLM names them."""
    kind: BlockKind

    @property
    def name(self) -> str:
        return " + ".join(self.modules) or self.kind


class ReferenceLayers(BaseModel):
    """A model's decoder layers, as they are cut into blocks: there is one boundary more than blocks."""

    model_config = ConfigDict(frozen=True)

    layer_class: str
    """In vLLM."""
    hidden_size: PositiveInt
    blocks: list[LayerBlock]
    floor: list[Nats] | None = None
    """The recorded model's mean KL divergence from itself when it is resumed from each boundary, on the first window;
    None until it is measured."""

    @property
    def num_boundaries(self) -> int:
        return len(self.blocks) + 1

    def token_bytes(self, dtype: str, num_more: int = 0) -> int:
        """The bytes that the residual stream of one token takes at all boundaries, and as many more hidden states."""
        return (self.num_boundaries + num_more) * self.hidden_size * (4 if dtype == "float32" else 2)


class ServedLayers(ReferenceLayers):
    """Response of `GET /v1/layers`."""

    object: Literal["layers"] = "layers"
    free_bytes: NonNegativeInt
    """On the disk of the server's references."""


class KeptWithReference(BaseModel):
    """A server keeps this with a reference, in addition to its model and its text, and tells of it."""

    created: Annotated[int, Field(ge=0, lt=2**36)]
    corpus: CorpusInfo | None = None
    """Where the text is from; None where the client that recorded it did not say."""
    noise_floor: NoiseFloor | None = None
    lane_noise_floors: dict[Lane, NoiseFloor] = {}
    """Of the other lanes: the reference's model in one of them, compared with what it recorded."""
    layers: ReferenceLayers | None = None
    """Of the model, if the residual stream at the boundaries of its layers is recorded."""
    answers: ReferenceAnswers | None = None
    """How its text was generated, if that is the model's own answers to prompts."""


class Reference(KeptWithReference, ServedModel, TextInWindows):
    """A reference: a model's distributions over the tokens of a text, kept as hidden states."""

    object: Literal["reference"] = "reference"
    name: str
    complete: bool
    """Whether every window is recorded."""
    vocab_size: PositiveInt
    fingerprint: str
    """Of the contents of the model's config and weights, dtype and quantization."""
    text_fingerprint: str
    """Of the token ids, the method and the windows."""
    num_recorded: NonNegativeInt
    """Windows that are on disk."""
    disk_bytes: int
    perplexity: Figure | None
    """Of all windows, as `/v1/perplexity` has it; None until they are recorded."""
    perplexity_stderr: float | None
    nll_mean: float | None
    """Nats per token."""

    def is_of(self, server: ServerInfo) -> bool:
        """Whether the server has the model that was recorded: it diverges from this by rounding alone."""
        return self.fingerprint == server.fingerprint

    def other_stops(self, server: ServedModel) -> tuple[list[int], list[int]]:
        """The tokens after which this model stops and a served one does not, and the other way around; none where one
        of them does not say after which it stops."""
        if self.stop_token_ids is None or server.stop_token_ids is None:
            return [], []
        own, other = {*self.stop_token_ids}, {*server.stop_token_ids}
        return sorted(own - other), sorted(other - own)

    def noise_floor_of(self, lane: Lane) -> NoiseFloor | None:
        """The noise floor in that lane; None where it was not measured, or says nothing about rounding."""
        return self._stored_floor(lane) if self.unused_floor(lane) is None else None

    def unused_floor(self, lane: Lane) -> str | None:
        """Say why the stored noise floor of that lane is not used, if it is not."""
        floor = self._stored_floor(lane)
        if floor is None:
            return None
        if floor.mean < _LEAST_NOISE_FLOOR.get(self.dtype, 0) and not self.is_batch_invariant:
            difference = "almost no difference" if floor.mean else "no difference"
            return f"the noise floor of {self.name} is {floor.mean:.1g} and not informative: batches made {difference}"
        if floor.mean <= self.most_noise_floor:
            return None
        return (
            f"the stored noise floor of {self.name}, {floor.mean:.3g} nats, is not used: rounding in {self.dtype} "
            f"gives at most {self.most_noise_floor:g}"
        )

    def _stored_floor(self, lane: Lane) -> NoiseFloor | None:
        return self.noise_floor if lane == "prefill" else self.lane_noise_floors.get(lane)


class WindowOrigins(BaseModel):
    """Where each window's targets are from, by index."""

    num_context: Many[Int32]
    """Tokens before the first target."""
    documents: Many[Int32]
    """The index of the text or conversation."""
    labels: Many[str] | None
    """Of the text or conversation, where it was recorded with labels."""
    roles: Many[str] | None
    """Of the turn, for conversations."""
    prompts: list[Many[Int32]] | None = None
    """The tokens between the last turn of a conversation and this one, which are not scored."""


class ReferenceWindows(WindowOrigins):
    """Response of `GET /v1/references/{name}/windows`."""

    object: Literal["reference.windows"] = "reference.windows"
    name: str
    text_fingerprint: str


class ReferenceList(BaseModel):
    """Response of `GET /v1/references`."""

    object: Literal["list"] = "list"
    data: list[Reference]


class ReferenceDeleted(BaseModel):
    """Response of `DELETE /v1/references/{name}`."""

    object: Literal["reference.deleted"] = "reference.deleted"
    name: str
    deleted: Literal[True] = True


class KldRequest(LaneFields):
    """Body of `POST /v1/kld`: the windows of a reference through the served model."""

    reference: ReferenceName
    """Name of a complete reference."""
    windows: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """The first window and the one after the last, from 0; all when left out."""
    top_logprobs: TopLogprobsCount = 0
    """The k most likely tokens of both models at every position."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64`: arrays as little-endian float32 and int32."""
    as_noise_floor: bool = False
    """Keep the result with the reference as its noise floor in this lane; all windows, and the reference's own
    model."""
    from_boundary: int | None = Field(None, ge=0)
    """Replace the served model's residual stream by the reference's at this boundary of its decoder layers: 0 is before
    the first layer. The reference must be recorded with `layers`."""
    stream: bool = False
    """Send server-sent events: one per window, then the result."""


class KldWindow(TypedDict):
    """One window: arrays over its targets, in nats where they are logprobs or divergences; `p` is the reference's
    distribution, `q` the served model's. An entry of `data`, and a streamed event."""

    object: Literal["kld.window"]
    index: int
    num_scored: int
    token_ids: list[int] | str
    kld: list[float | None] | str
    """KL(p || q); null (base64: infinity) where q gives no probability to a token that p has."""
    reverse_kld: list[float | None] | str
    """KL(q || p)."""
    acceptance: list[float] | str
    """The sum of min(p, q): how often speculative decoding accepts what one drafts for the other."""
    logprobs: list[float] | str
    """ln q(token)."""
    reference_logprobs: list[float] | str
    """ln p(token)."""
    ranks: list[int] | str
    """Of the token in q, 1 for the most likely."""
    reference_ranks: list[int] | str
    top_token_ids: list[int] | str
    """The top token of q."""
    reference_top_token_ids: list[int] | str
    reference_confidence: list[float] | str
    """p of the top token of p."""
    top_logprobs: NotRequired[list[list[TopLogprob]] | TopLogprobArrays]
    """The k most likely tokens of q."""
    reference_top_logprobs: NotRequired[list[list[TopLogprob]] | TopLogprobArrays]


class KldFigures(TypedDict):
    """How KL(p || q), in nats, is distributed over the positions."""

    mean: float | None
    stderr: float | None
    """Standard error of the mean, with positions as independent; None for one position."""
    stderr_clustered: float | None
    """Standard error of the mean, with windows as independent; None for one window."""
    median: float | None
    max: float | None
    min: float | None
    p999: float | None
    """The 99.9 % quantile; the others likewise, p01 being that of 0.1 %."""
    p99: float | None
    p95: float | None
    p90: float | None
    p10: float | None
    p5: float | None
    p1: float | None
    p01: float | None


class DeltaPFigures(KldFigures):
    """How q(token) - p(token), a difference of probabilities, is distributed over the positions."""

    p75: float | None
    p25: float | None
    rms: float | None
    """Root of the mean square."""
    rms_stderr: float | None


class ConfidenceBucket(TypedDict):
    """The positions where p of p's top token is in [lower, upper); the last bucket has its upper end."""

    lower: float
    upper: float
    count: int
    share: float
    """Of all positions."""
    mean_kld: float | None
    same_top_p: float | None


class DivergentPosition(TypedDict):
    """One of the positions with the largest KL(p || q)."""

    index: int
    """Among the positions of all windows, in order, from 0."""
    window: int
    """Index of its window in the reference."""
    kld: float | None


class KldStatistics(TypedDict):
    """Statistics of the positions of some windows: null where a figure is infinite or undefined.

    `q` is the served model, `base` the reference. docs/kld.md has the formulas.
    """

    num_scored: int
    num_windows: int
    nll_q: float | None
    """Mean, in nats."""
    nll_q_stderr: float | None
    nll_base: float | None
    nll_base_stderr: float | None
    ppl_q: float | None
    ppl_q_stderr: float | None
    ppl_base: float | None
    ppl_base_stderr: float | None
    ln_ppl_correlation: float | None
    ln_ppl_ratio: float | None
    ln_ppl_ratio_stderr: float | None
    ln_ppl_ratio_stderr_clustered: float | None
    ppl_ratio: float | None
    ppl_ratio_stderr: float | None
    ppl_difference: float | None
    ppl_difference_stderr: float | None
    kld: KldFigures
    num_infinite_kld: int
    """Positions where q gives no probability to a token that p has; one makes the mean infinite."""
    top_1_percent_share: float | None
    """Of the sum of all KL(p || q), what the largest hundredth makes."""
    reverse_kld_mean: float | None
    """Of KL(q || p), in nats."""
    num_infinite_reverse_kld: int
    acceptance_mean: float | None
    delta_p: DeltaPFigures
    same_top_p: float
    """Share of the positions where both have the same top token."""
    same_top_p_stderr: float | None
    same_top_p_stderr_clustered: float | None
    confidence_buckets: list[ConfidenceBucket]
    most_divergent: list[DivergentPosition]
    """At most twenty that are more than 0, the largest first."""


class KldResponse(TypedDict):
    """Response of `POST /v1/kld`, and the last event of a stream, which has no `data`."""

    id: str
    object: Literal["kld"]
    created: int
    model: str
    reference: str
    fingerprint: str
    """Of the served model, as a reference has it."""
    windows: list[int]
    """[first, last)."""
    num_scored: int
    statistics: KldStatistics
    """Of the positions of these windows."""
    data: NotRequired[list[KldWindow]]
    usage: Usage
    lane: NotRequired[Lane]
    mean_batch: NotRequired[float | None]
    """As in a `ScoreResponse`."""
