"""The wire types of references, of KL divergences from them, and of their statistics. `wire.protocol`
says how requests are validated."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, StringConstraints
from typing_extensions import TypedDict

from scoremode.wire.protocol import (
    ColumnArray,
    Figure,
    Int32,
    Lane,
    LaneFields,
    Many,
    Nats,
    PerplexityRequest,
    ServedModel,
    ServerInfo,
    Statistic,
    TextInWindows,
    TopLogprob,
    TopLogprobArrays,
    TopLogprobsCount,
    Usage,
)

REFERENCE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Pattern of a reference's name, which is also its folder's name in `--reference-dir`. No name leads out of there."""

ReferenceName = Annotated[str, StringConstraints(pattern=f"^{REFERENCE_NAME}$")]
_LEAST_NOISE_FLOOR = {"float16": 1e-9, "bfloat16": 1e-7}
"""Mean KL divergence in nats, by dtype. A smaller floor means that the batches did not round differently."""
_IN_LAYER = re.compile(r"[^ ]*?\.(\d+)\.([^. ]+)")
"""The beginning of a block's name: the number of its layer, and the name of a module in it."""
_Word = Annotated[str, StringConstraints(max_length=1024)]


class CorpusInfo(BaseModel):
    """The source of a text, according to the client."""

    model_config = ConfigDict(frozen=True)

    name: _Word
    config: _Word | None = None
    """The dataset's configuration; `config` and `split` are None for other texts, and from an older client."""
    split: _Word | None = None
    num_rows: int | None = None
    """Dataset rows that the text was joined from."""
    sha256: Annotated[str, StringConstraints(max_length=64)]
    """Hash of the text in UTF-8."""
    preset: _Word | None = None
    """The tool whose rules join the text and cut it into windows (`ppl-client --preset`)."""
    max_windows: PositiveInt | None = None
    """How many of the first windows were measured; None for all."""
    by: _Word | None = None
    """The column that has the labels (`ppl-client --by`)."""

    @property
    def in_words(self) -> str:
        """The dataset, its rows and the beginning of the hash, as a phrase."""
        rows = None if self.num_rows in (None, 1) else f"{self.num_rows:,} rows"
        dataset = " ".join(filter(None, (self.name, self.config, self.split)))
        return ", ".join(filter(None, (dataset, rows, f"sha256 {self.sha256[:12]}")))


class Answer(BaseModel):
    """A prompt and the recorded model's answer to it."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    prompt_token_ids: Many[Int32] = Field(min_length=1)
    token_ids: Many[Int32]
    """Tokens of the answer, including the token that ends it; may be empty."""
    text: str


class AnswerSettings(BaseModel):
    """The sampling settings with which the recorded model generated its answers."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    max_new_tokens: PositiveInt
    """The most tokens that an answer could have."""
    temperature: Literal[0, 1] = 0
    """0 for greedy answers, 1 for sampled ones."""
    seed: NonNegativeInt | None = None
    """Seed of the first answer; each later answer's seed is 1 larger. None for greedy answers."""

    @property
    def are_greedy(self) -> bool:
        return self.temperature == 0


class Answers(AnswerSettings):
    """Answers as token ids, and the settings that generated them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    data: Many[Answer] = Field(min_length=1)


class ReferenceAnswers(AnswerSettings):
    """How many answers a reference has, and how they were generated."""

    num_answers: PositiveInt
    """All answers, including empty ones, which have no window."""

    @property
    def in_words(self) -> str:
        """The number of answers and their settings, as a phrase."""
        how = "greedy" if self.are_greedy else f"sampled at temperature 1 with seed {self.seed}"
        return f"{self.num_answers:,}, {how}, at most {self.max_new_tokens:,} tokens each"


class ReferenceRequest(PerplexityRequest):
    """Body of `POST /v1/references`: a text as in `/v1/perplexity`, and the name of the new reference."""

    body_factor: ClassVar[int] = 4

    name: ReferenceName
    """Name of the reference: at most 128 letters, digits, '.', '_' and '-'."""
    answers: Answers | None = None
    """Prompts and answers as token ids, in place of a text. Only the answers' tokens are scored."""
    corpus: CorpusInfo | None = None
    """The source of the text, stored with the reference."""
    labels: Many[_Word] | None = None
    """One label per text or conversation, such as its language, stored with the reference."""
    return_ranks: bool = False
    """Send the logprobs and ranks of its targets with each window; needs `stream`."""
    layers: bool = False
    """Record the residual stream at each boundary of the decoder layers, from which `/v1/kld` can resume. The server
    must run with `--enforce-eager`."""
    routes: bool = False
    """Record which experts each mixture-of-experts layer chooses for every token, for `routes` of `/v1/kld`. The server
    must run with `--enforce-eager`."""


class NoiseFloor(BaseModel):
    """KL divergence of a model from itself, in nats: the effect of other batches and kernels on the same weights."""

    mean: Nats
    p99: Nats
    max: Nats
    num_scored: int
    created: int
    agreement_lengths: list[NonNegativeInt] | None = None
    """Only for greedy answers: the number of each answer's tokens before the first that is not the top token."""


BlockKind = Literal["attention", "linear_attention", "mamba", "mlp", "moe", "layer"]
"""The kind of a block: a token mixer, an MLP or experts, or a whole layer that cannot be cut."""


class LayerBlock(BaseModel):
    """A part of a decoder layer between two boundaries of the residual stream."""

    model_config = ConfigDict(frozen=True)

    modules: list[str]
    """The quantizable modules that the block calls, by their names in vLLM."""
    kind: BlockKind

    @property
    def name(self) -> str:
        return " + ".join(self.modules) or self.kind


class ReferenceLayers(BaseModel):
    """A model's decoder layers, cut into blocks. There is one boundary before each block, and one after the last."""

    model_config = ConfigDict(frozen=True)

    layer_class: str
    """Name of vLLM's class for the layers."""
    hidden_size: PositiveInt
    blocks: list[LayerBlock]
    floor: list[Nats] | None = None
    """Mean KL divergence of the recorded model from itself on the first window, in nats, resumed from each boundary;
    None until it is measured."""

    @property
    def num_boundaries(self) -> int:
        return len(self.blocks) + 1

    @property
    def in_words(self) -> str:
        return f"{len(self.blocks)} blocks with a hidden size of {self.hidden_size}"

    def token_bytes(self, dtype: str, num_more: int = 0) -> int:
        """The bytes of one token's residual stream at all boundaries, and of `num_more` hidden states."""
        return (self.num_boundaries + num_more) * self.hidden_size * (2 if "16" in dtype else 4)

    def shared_with(self, served: "ReferenceLayers") -> dict[int, int]:
        """Map the boundaries that a served model has too to that model's boundaries: those before the same layer, or
        before the module of the same name in the same layer. Empty if it has another number or size of layers."""
        own, other = self.places(), served.places()
        if own[-1] != other[-1] or self.hidden_size != served.hidden_size:
            return {}
        return {boundary: other.index(place) for boundary, place in enumerate(own) if place in other}

    def merged(self, boundaries: Sequence[int]) -> "ReferenceLayers":
        """Cut these layers at some of their boundaries only, the first and the last among them."""
        blocks = []
        for start, end in pairwise(boundaries):
            modules = [module for block in self.blocks[start:end] for module in block.modules]
            kind: BlockKind = self.blocks[start].kind if end == start + 1 else "layer"
            blocks.append(LayerBlock(modules=modules, kind=kind))
        floor = self.floor and [self.floor[boundary] for boundary in boundaries]
        return self.model_copy(update={"blocks": blocks, "floor": floor})

    def places(self) -> list[tuple[int, str]]:
        """The place of each boundary: the number of the layer, and the name of the module that follows within it. The
        name is empty before the first module of a layer."""
        places, layer = list[tuple[int, str]](), -1
        for index, block in enumerate(self.blocks):
            match = _IN_LAYER.match(block.name)
            number, name = (int(match[1]), match[2]) if match else (-1, str(index))
            places.append((number, name if number == layer else ""))
            layer = number
        return [*places, (layer + 1, "")]


class ReferenceRoutes(BaseModel):
    """A model's mixture-of-experts layers, each of which chooses `top_k` of `num_experts` experts for every token."""

    model_config = ConfigDict(frozen=True)

    layers: list[str]
    """The layers' names in vLLM, in the order of the model."""
    num_experts: PositiveInt
    top_k: PositiveInt

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers that must be equal for choices to be compared."""
        return len(self.layers), self.num_experts, self.top_k

    @property
    def in_words(self) -> str:
        return f"{len(self.layers)} layers with {self.top_k} of {self.num_experts} experts"


class ServedLayers(ReferenceLayers):
    """Response of `GET /v1/layers`."""

    object: Literal["layers"] = "layers"
    free_bytes: NonNegativeInt
    """Free space on the disk that has the server's references."""


class KeptWithReference(BaseModel):
    """Data that a server stores and returns with a reference, in addition to its model and text."""

    created: Annotated[int, Field(ge=0, lt=2**36)]
    corpus: CorpusInfo | None = None
    """The source of the text; None if the recording client did not give it."""
    noise_floor: NoiseFloor | None = None
    lane_noise_floors: dict[Lane, NoiseFloor] = {}
    """Noise floors of the decode and verify lanes: the recorded model in that lane, compared with its recording."""
    layers: ReferenceLayers | None = None
    """The model's layers; None if the residual stream at their boundaries is not recorded."""
    routes: ReferenceRoutes | None = None
    """The model's mixture-of-experts layers; None if their choices are not recorded."""
    answers: ReferenceAnswers | None = None
    """How the answers were generated; None if the text is not the model's own answers to prompts."""


class Reference(KeptWithReference, ServedModel, TextInWindows):
    """A reference: a model's distributions over the tokens of a text, stored as hidden states."""

    object: Literal["reference"] = "reference"
    name: str
    complete: bool
    """Whether every window is recorded."""
    vocab_size: PositiveInt
    fingerprint: str
    """Hash of the model's config, weights, dtype and quantization."""
    text_fingerprint: str
    """Hash of the token ids, the method and the windows."""
    num_recorded: NonNegativeInt
    """Windows that are on disk."""
    disk_bytes: int
    perplexity: Figure | None
    """Perplexity of all windows, as in `/v1/perplexity`; None until all are recorded."""
    perplexity_stderr: float | None
    nll_mean: float | None
    """Nats per token."""

    def is_of(self, server: ServerInfo) -> bool:
        """Whether the server has the recorded model, so that it can diverge from the recording only by rounding."""
        return self.fingerprint == server.fingerprint

    def other_stops(self, server: ServedModel) -> tuple[list[int], list[int]]:
        """The tokens after which only the recorded model stops, and those after which only the served model does. Both
        lists are empty if the stop tokens of either model are not available."""
        if self.stop_token_ids is None or server.stop_token_ids is None:
            return [], []
        own, other = {*self.stop_token_ids}, {*server.stop_token_ids}
        return sorted(own - other), sorted(other - own)

    def noise_floor_of(self, lane: Lane) -> NoiseFloor | None:
        """The noise floor in that lane; None if it was not measured or is not usable."""
        return self._stored_floor(lane) if self.unused_floor(lane) is None else None

    def unused_floor(self, lane: Lane) -> str | None:
        """Explain why that lane's stored noise floor is not used; None if it is used or does not exist."""
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
    """The source of each window's targets: one entry per window, in order."""

    num_context: Many[Int32]
    """Tokens before the first target."""
    documents: Many[Int32]
    """The index of the text or conversation."""
    labels: Many[str] | None
    """The label of the text or conversation; None if it was recorded without labels."""
    roles: Many[str] | None
    """The role of the scored turn; None for a text."""
    prompts: list[Many[Int32]] | None = None
    """The tokens between a conversation's previous scored turn and the window's turn, which are not scored."""


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
    """Body of `POST /v1/kld`, which compares the served model with a reference on the reference's windows."""

    reference: ReferenceName
    """Name of a complete reference."""
    windows: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """The range [first, end) of windows, from 0; all when left out."""
    top_logprobs: TopLogprobsCount = 0
    """How many of each model's most likely tokens to return at every position."""
    statistics: list[Statistic] = Field([])
    """Figures of both whole distributions at every position, as in a `ScoreRequest`. The cross-entropy with the
    reference is the KL divergence plus the reference's entropy."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64`: arrays as little-endian float32 and int32."""
    as_noise_floor: bool = False
    """Store the result with the reference as its noise floor in this lane. Allowed only for all windows, on
    a server of the recorded model."""
    from_boundary: int | None = Field(None, ge=0)
    """Replace the served model's residual stream with the reference's at this boundary of its decoder layers: 0 is
    before the first layer. The reference must be recorded with `layers`."""
    routes: Literal["own", "forced"] | None = None
    """`own`: compare the experts that the served model chooses for every token with the reference's. `forced`: compute
    every token with the reference's experts, weighted by the served model's router; its own choice is compared too. The
    reference must be recorded with `routes`."""
    stream: bool = False
    """Send server-sent events: one per window, then the result."""


class RouteAgreement(TypedDict):
    """How often a window's targets are predicted with the reference's experts. `same_set`, `same_first` and `shared`
    have an entry per layer of `ReferenceRoutes`, `differing_layers` one per target."""

    same_set: list[int]
    """Targets for which both models chose the same experts."""
    same_first: list[int]
    """Targets for which the same expert has the largest weight."""
    shared: list[int]
    """The number of experts that both models chose, summed over the targets: at most `top_k` each."""
    differing_layers: list[int] | str
    """The number of layers in which the models chose different experts."""


class KldWindow(TypedDict):
    """One window, in `data` or as a streamed event. Arrays have one value per target; logprobs and divergences are in
    nats. `p` is the reference's distribution, `q` the served model's."""

    object: Literal["kld.window"]
    index: int
    num_scored: int
    token_ids: list[int] | str
    kld: list[float | None] | str
    """KL(p || q); null (base64: infinity) where q gives a token probability 0 and p does not."""
    reverse_kld: list[float | None] | str
    """KL(q || p)."""
    acceptance: list[float] | str
    """The sum of min(p, q): the rate at which speculative decoding accepts one model's drafts for the other."""
    logprobs: list[float] | str
    """ln q(token)."""
    reference_logprobs: list[float] | str
    """ln p(token)."""
    ranks: list[int] | str
    """Rank of the token in q, 1 for the top token."""
    reference_ranks: list[int] | str
    top_token_ids: list[int] | str
    """The top token of q."""
    reference_top_token_ids: list[int] | str
    reference_confidence: list[float] | str
    """p of the top token of p."""
    top_logprobs: NotRequired[list[list[TopLogprob]] | TopLogprobArrays]
    """The k most likely tokens of q."""
    reference_top_logprobs: NotRequired[list[list[TopLogprob]] | TopLogprobArrays]
    columns: NotRequired[dict[str, list[float] | ColumnArray]]
    """The figures of `statistics` by name; those of p have "reference_" before the name."""
    routes: NotRequired[RouteAgreement]


class KldFigures(TypedDict):
    """Mean and quantiles of KL(p || q) over the positions, in nats."""

    mean: float | None
    stderr: float | None
    """Standard error of the mean, if positions are independent; None for one position."""
    stderr_clustered: float | None
    """Standard error of the mean, if windows are independent; None for one window."""
    median: float | None
    max: float | None
    min: float | None
    p999: float | None
    """The 99.9 % quantile. The other names follow this pattern, except p01: the 0.1 % quantile."""
    p99: float | None
    p95: float | None
    p90: float | None
    p10: float | None
    p5: float | None
    p1: float | None
    p01: float | None


class DeltaPFigures(KldFigures):
    """Mean and quantiles over the positions of q(token) - p(token), a difference of probabilities."""

    p75: float | None
    p25: float | None
    rms: float | None
    """Root of the mean square."""
    rms_stderr: float | None


class ConfidenceBucket(TypedDict):
    """The positions where the probability of p's top token is in [lower, upper); the last bucket includes `upper`."""

    lower: float
    upper: float
    count: int
    share: float
    """Share of all positions."""
    mean_kld: float | None
    same_top_p: float | None


class DivergentPosition(TypedDict):
    """One of the positions with the largest KL(p || q)."""

    index: int
    """Index among the positions of all windows, in order, from 0."""
    window: int
    """Index of its window in the reference."""
    kld: float | None


class KldStatistics(TypedDict):
    """Statistics over the positions of the compared windows; an infinite or undefined figure is null.

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
    """Positions where q gives a token probability 0 and p does not; a single one makes the mean infinite."""
    top_1_percent_share: float | None
    """Share of the sum of KL(p || q) that comes from the 1 % of positions with the largest values."""
    reverse_kld_mean: float | None
    """Mean of KL(q || p), in nats."""
    num_infinite_reverse_kld: int
    acceptance_mean: float | None
    delta_p: DeltaPFigures
    same_top_p: float
    """Share of the positions at which both models have the same top token."""
    same_top_p_stderr: float | None
    same_top_p_stderr_clustered: float | None
    confidence_buckets: list[ConfidenceBucket]
    most_divergent: list[DivergentPosition]
    """At most twenty positions with a KL(p || q) above 0, the largest first."""


class KldResponse(TypedDict):
    """Response of `POST /v1/kld`, and the last event of a stream, which has no `data`."""

    id: str
    object: Literal["kld"]
    created: int
    model: str
    reference: str
    fingerprint: str
    """The served model's fingerprint, as in a reference."""
    windows: list[int]
    """The range [first, end) of compared windows."""
    num_scored: int
    statistics: KldStatistics
    """Statistics over the positions of these windows."""
    data: NotRequired[list[KldWindow]]
    usage: Usage
    lane: NotRequired[Lane]
    mean_batch: NotRequired[float | None]
    """As in a `ScoreResponse`."""
