"""The wire types of Scoremode's HTTP API, shared by client and server.

Log-probabilities are natural logarithms (nats). The requests are validated strictly: an unknown field or a value of
another type is an error, never a guess. The responses of `/v1/score` are typed dictionaries, because a model object
per token would cost more than the scoring.
"""

import math
import re
from collections.abc import Callable
from typing import Annotated, Literal, NotRequired

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from scoremode.windows import Method, adds_special_tokens

MAX_TOP_LOGPROBS = 256
"""Top tokens at a position; a server allows what its `--max-logprobs` says, and at most these."""

MAX_CANDIDATES = 256
"""Chosen tokens at a position."""

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; vLLM's OpenAI API does the same."""


def _one_message(message: str) -> WrapValidator:
    """Replace the errors of every branch of a union, one by one, by a single one that says what is accepted."""

    def validate(value: object, handler: Callable[[object], object]) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("shape", "{message}", {"message": message}) from None

    return WrapValidator(validate)


TokenIds = list[int]

Prompt = Annotated[
    str | list[str] | TokenIds | list[TokenIds],
    _one_message("must be a string, a list of strings, a list of token ids, or a list of lists of token ids"),
]
Continuations = Annotated[
    list[str] | list[TokenIds] | list[list[str]] | list[list[TokenIds]],
    _one_message("must be a list of strings or of lists of token ids, or such a list for each prompt"),
]
Candidates = Annotated[
    TokenIds | list[TokenIds] | list[list[TokenIds]],
    _one_message(
        "must be a list of token ids, or for a single prompt a list of token ids for each position, or for several "
        "prompts such lists for each"
    ),
]
Text = Annotated[str | TokenIds, _one_message("must be a string or a list of token ids")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="A served model or LoRA adapter; the served model when left out.")


CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")]
"""What vLLM takes: some of its connectors make file names of it."""


class ScoreRequest(_Request):
    """Body of `POST /v1/score`."""

    prompt: Prompt = Field(description="One text or several, as text or as token ids.")
    continuations: Continuations | None = Field(
        None,
        description="Score these instead, each after each prompt, or a list for each prompt. A text after a text is "
        "tokenized together with it.",
    )
    add_special_tokens: bool = Field(True, description="Let the tokenizer add its special tokens (BOS) to a text.")
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS, description="The k most likely tokens at every position.")
    candidate_token_ids: Candidates | None = Field(
        None,
        description="Score these tokens too: one list for all positions, or lists of one length, one per position.",
    )
    temperature: float = Field(1.0, ge=0.01, le=1000, description="Of the distribution: softmax(logits / T).")
    logprobs_from: int | list[int] = Field(
        0, description="Return only positions from this one on; one for all prompts, or one per prompt."
    )
    return_ranks: bool = Field(False, description="The rank of every token in the vocabulary, 1 for the most likely.")
    return_tokens: bool = Field(False, description="Every token as text.")
    encoding_format: Literal["float", "base64"] = Field(
        "float",
        description="`base64`: logprobs as little-endian float32, NaN where there is none, and ids as int32, -1 there.",
    )
    use_cache: bool = Field(True, description="Accept logprobs that were computed for an earlier request.")
    cache_salt: CacheSalt | None = Field(
        None, description="Share cached prefixes only with requests that have the same salt."
    )


class TokensRequest(_Request):
    """Body of `POST /v1/tokens`."""

    token_ids: TokenIds = Field(description="At most as many as the vocabulary has; ids may repeat.")


class TokensResponse(TypedDict):
    """Response of `POST /v1/tokens`."""

    object: Literal["tokens"]
    tokens: list[str]
    """The text of each token alone, as `return_tokens` of `/v1/score` has it."""


class TopLogprob(TypedDict):
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float
    token: NotRequired[str]


class TopLogprobArrays(TypedDict):
    """With `base64`: the k most likely tokens of n positions, in descending order."""

    shape: list[int]
    """[n, k]."""
    token_ids: str
    """int32."""
    logprobs: str
    """float32, nats."""


class CandidateLogprobArrays(TypedDict):
    """With `base64`: m chosen tokens of n positions, in the order in which they were given."""

    shape: list[int]
    """[n, m]."""
    logprobs: str
    """float32, nats."""


class ScoreResult(TypedDict):
    """One scored sequence, or one continuation. Lists run over `token_ids`; a text's first token has no logprob."""

    index: int
    prompt_index: int
    continuation_index: int | None
    token_ids: list[int]
    logprobs: list[float | None] | str
    sum_logprob: float
    num_scored: int
    ranks: NotRequired[list[int | None]]
    is_greedy: NotRequired[bool]
    tokens: NotRequired[list[str]]
    top_logprobs: NotRequired[list[list[TopLogprob] | None] | TopLogprobArrays]
    candidate_logprobs: NotRequired[list[list[float] | None] | CandidateLogprobArrays]


class Usage(TypedDict):
    """Tokens of all scored sequences, and how many of them were not computed anew."""

    prompt_tokens: int
    cached_tokens: int
    total_tokens: int


class ScoreResponse(TypedDict):
    """Response of `POST /v1/score`."""

    id: str
    object: Literal["score"]
    created: int
    model: str
    data: list[ScoreResult]
    usage: Usage


def is_old_fingerprint(fingerprint: object) -> bool:
    """Whether it is of a model's name and of its files' names and sizes, as servers made them before `v2-`."""
    return isinstance(fingerprint, str) and re.fullmatch(r"[0-9a-f]{32}", fingerprint) is not None


class ComputedBy(BaseModel):
    """The code and hardware that compute with the weights; a field is null if the server cannot know it."""

    model_config = ConfigDict(frozen=True)

    model_runner: Literal["v1", "v2"] | None = None
    attention_backends: list[str] | None = None
    """By vLLM's names; several for a model with more than one kind of attention."""
    kernels: list[str] | None = None
    """Each way in which a layer of the model is computed: the class of its quantization method, and the classes and
    functions of what vLLM chose for it."""
    kv_cache_dtype: str | None = None
    device: str | None = None
    """The GPU's model, or "cpu"; that of the first rank."""
    num_devices: int | None = None
    """Of all replicas together."""
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    expert_parallel: bool | None = None
    speculative_method: str | None = None
    """"none" without speculative decoding."""
    batch_invariant: bool | None = None


class ServerInfo(BaseModel):
    """Response of `GET /v1/score`: what a client needs to cut windows and to repeat a run."""

    object: Literal["score.info"] = "score.info"
    scoremode_version: str
    vllm_version: str
    model: str
    max_model_len: int
    vocab_size: int
    max_top_logprobs: int
    bos_token_id: int | None
    eos_token_id: int | None
    adds_bos: bool = Field(description="Whether the tokenizer puts BOS before a text by itself.")
    dtype: str
    quantization: str | None
    max_num_seqs: int | None = Field(
        default=None,
        description="Sequences that the engine runs at once (`--max-num-seqs`); "
        "None from a server older than this field.",
    )
    fingerprint: str | None = Field(
        default=None,
        description="Of the contents of config and weights, dtype and quantization, of an adapter too if `model` names "
        "one; begins with `v2-`, or `v2-dummy-` with dummy weights; None from an older server.",
    )
    revision: str | None = Field(
        default=None,
        description="The commit of a model from the hub; None of a folder, and from an older server.",
    )
    computed_by: ComputedBy | None = Field(
        default=None, description="Model runner, kernels, GPUs and parallelism; None from an older server."
    )
    weight_bytes: int | None = Field(
        default=None, description="Of the weight files that the server loads; None where it cannot know, or is older."
    )
    num_parameters: int | None = Field(
        default=None,
        description="Weights of the model before any quantization; None where the server cannot know, or is older.",
    )

    @property
    def devices(self) -> str | None:
        """GPUs of the server, or "cpu"; None where it does not say."""
        if self.computed_by is None or self.computed_by.device is None:
            return None
        number = self.computed_by.num_devices or 1
        return self.computed_by.device if number == 1 else f"{number} x {self.computed_by.device}"

    @property
    def prefix_token_id(self) -> int | None:
        """What `rolling` puts before a text: BOS, else EOS."""
        return self.eos_token_id if self.bos_token_id is None else self.bos_token_id

    @property
    def chunk_token_id(self) -> int | None:
        """What `llama.cpp` puts in the place of a chunk's first token: BOS, where the tokenizer adds one."""
        return self.bos_token_id if self.adds_bos else None


class PerplexityRequest(_Request):
    """Body of `POST /v1/perplexity`: `prompt`, one text, or `texts`, several that share no context."""

    prompt: Text | None = Field(None, description="One text, or its token ids.")
    texts: list[str] | None = Field(None, description="Several texts, each cut into windows separately.")
    method: Method = Field("sliding", description="How the text is cut into windows.")
    context_length: int | None = Field(
        None, ge=2, description="Tokens per window; by default 2,048, or the model's context if that is shorter."
    )
    stride: int | None = Field(
        None, ge=1, description="Tokens from one window to the next; by default a quarter of the context."
    )
    max_tokens: int | None = Field(None, ge=1, description="Take at most this many tokens of the text.")
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer add its special tokens; yes, except for `rolling`, as in lm-eval."
    )
    cache_salt: CacheSalt | None = Field(
        None, description="Share cached prefixes only with requests that have the same salt."
    )
    stream: bool = Field(False, description="Send server-sent events: one per window, then the result.")

    @property
    def adds_special_tokens(self) -> bool:
        """`add_special_tokens`, or the default of the method."""
        return adds_special_tokens(self.method) if self.add_special_tokens is None else self.add_special_tokens


Figure = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]
"""A float that may be infinite, for which JSON, lacking infinity, has null."""


class PerplexityWindow(BaseModel):
    """A streamed event: one window's NLL in nats, and the perplexity of all windows so far."""

    object: Literal["perplexity.window"] = "perplexity.window"
    index: int
    num_windows: int
    num_scored: int
    nll_sum: float
    total_scored: int
    perplexity: Figure
    logprobs: list[float] | None = None
    """Of the targets, in order, as are their ranks; of a recording with `return_ranks`."""
    ranks: list[int] | None = None


class PerplexityResponse(BaseModel):
    """Response of `POST /v1/perplexity`. NLLs in nats; docs/methods.md defines every figure."""

    id: str
    object: Literal["perplexity"] = "perplexity"
    created: int
    model: str
    method: Method
    context_length: int
    stride: int
    perplexity: Figure
    perplexity_stderr: float | None
    nll_sum: float
    nll_mean: float
    nll_stderr: float | None
    bits_per_byte: float | None
    word_perplexity: float | None
    num_tokens: int
    num_scored: int
    num_windows: int
    num_bytes: int | None
    num_words: int | None
    usage: Usage


REFERENCE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Names of references: they are folders below `--reference-dir`, so none is a path out of it."""

ReferenceName = Annotated[str, StringConstraints(pattern=f"^{REFERENCE_NAME}$")]


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

    @property
    def in_words(self) -> str:
        """The dataset and the beginning of the hash."""
        rows = None if self.num_rows in (None, 1) else f"{self.num_rows:,} rows"
        dataset = " ".join(filter(None, (self.name, self.config, self.split)))
        return ", ".join(filter(None, (dataset, rows, f"sha256 {self.sha256[:12]}")))


class ReferenceRequest(PerplexityRequest):
    """Body of `POST /v1/references`: a text as in `/v1/perplexity`, and the name to record the served model under."""

    name: ReferenceName = Field(description="Of the reference: letters, digits, '.', '_' and '-', at most 128.")
    corpus: CorpusInfo | None = Field(None, description="Where the text is from, kept with the reference.")
    return_ranks: bool = Field(
        False, description="With `stream`, each window's event has the logprobs and ranks of its targets."
    )


class NoiseFloor(BaseModel):
    """KL divergence of a model from itself, in nats: what other batches and other kernels make of the same weights."""

    mean: float
    p99: float
    max: float
    num_scored: int
    created: int


class Reference(BaseModel):
    """A reference: a model's distributions over the tokens of a text, kept as hidden states."""

    object: Literal["reference"] = "reference"
    name: str
    created: int
    complete: bool
    """Whether every window is recorded."""
    model: str
    revision: str | None
    dtype: str
    quantization: str | None
    scoremode_version: str
    vllm_version: str
    vocab_size: int
    fingerprint: str
    """Of the contents of the model's config and weights, dtype and quantization."""
    computed_by: ComputedBy | None = None
    """What recorded it; None of a reference that an older server began."""
    text_fingerprint: str
    """Of the token ids, the method and the windows."""
    corpus: CorpusInfo | None = None
    """Where the text is from; None where the client that recorded it did not say."""
    method: Method
    context_length: int
    stride: int
    num_tokens: int
    num_windows: int
    num_recorded: int
    """Windows that are on disk."""
    num_scored: int
    """Targets of all windows."""
    num_bytes: int | None
    """UTF-8 bytes of the text; None where token ids were given."""
    num_words: int | None
    disk_bytes: int
    perplexity: Figure | None
    """Of all windows, as `/v1/perplexity` has it; None until they are recorded."""
    perplexity_stderr: float | None
    nll_mean: float | None
    """Nats per token."""
    noise_floor: NoiseFloor | None = None


class ReferenceList(BaseModel):
    """Response of `GET /v1/references`."""

    object: Literal["list"] = "list"
    data: list[Reference]


class ReferenceDeleted(BaseModel):
    """Response of `DELETE /v1/references/{name}`."""

    object: Literal["reference.deleted"] = "reference.deleted"
    name: str
    deleted: Literal[True] = True


class KldRequest(_Request):
    """Body of `POST /v1/kld`: the windows of a reference through the served model."""

    reference: ReferenceName = Field(description="Name of a complete reference.")
    windows: Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(
        None, description="The first window and the one after the last, from 0; all when left out."
    )
    top_logprobs: int = Field(
        0, ge=0, le=MAX_TOP_LOGPROBS, description="The k most likely tokens of both models at every position."
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="`base64`: arrays as little-endian float32 and int32."
    )
    as_noise_floor: bool = Field(
        False,
        description="Keep the result with the reference as its noise floor; all windows, the reference's own model.",
    )
    stream: bool = Field(False, description="Send server-sent events: one per window, then the result.")


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
