"""The wire types of Scoremode's HTTP API, shared by client and server; those of references are in `wire.references`.

Log-probabilities are natural logarithms (nats). The requests are validated strictly: an unknown field or a value of
another type is an error, never a guess. The responses of `/v1/score` are typed dictionaries, because a model object
per token would cost more than the scoring.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationError,
    WrapValidator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from scoremode.windows import Method, adds_special_tokens

MAX_TOP_LOGPROBS = 256
"""Top tokens at a position; a server allows what its `--max-logprobs` says, and at most these."""
MAX_CANDIDATES = 256
"""Chosen tokens at a position."""
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; vLLM's OpenAI API does the same."""

ROUNDING = 1e-3
"""Nats that a logprob may be above 0, or a divergence below it: the difference of two float32 numbers below 8,192, as
logits are, is off by at most 2**-11."""

T = TypeVar("T")

Many = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation ends at the first wrong value: a request or an answer can have millions."""

Int32 = Annotated[int, Field(ge=0, lt=2**31)]
"""A token id, a position or the number of a window."""
Rank = Annotated[int, Field(ge=1)]
Logprob = Annotated[float, Field(le=ROUNDING, allow_inf_nan=False)]
"""JSON has `LOWEST_LOGPROB` for minus infinity."""
Nats = Annotated[float, Field(ge=-ROUNDING, allow_inf_nan=False)]
"""An NLL or a divergence."""


def one_message(message: str) -> WrapValidator:
    """Replace the errors of every branch of a union by a single one: what is accepted, and the first wrong value of the
    branch that accepts the most values."""

    def validate(value: object, handler: Callable[[object], object]) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            closest = max(error.errors(include_url=False), key=lambda each: each["loc"][1:])
            place = "".join(f"[{index}]" for index in closest["loc"][1:])
            reason = f"; {place} {closest['msg'].removeprefix('Input ')}" if place else ""
            raise PydanticCustomError("shape", "{message}", {"message": message + reason}) from None

    return WrapValidator(validate)


TokenIds = Many[int]

PROMPT_FORMS = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
Prompt = Annotated[str | Many[str] | TokenIds | Many[TokenIds], one_message(PROMPT_FORMS)]
Continuations = Annotated[
    Many[str] | Many[TokenIds] | Many[Many[str]] | Many[Many[TokenIds]],
    one_message("must be a list of strings or of lists of token ids, or such a list for each prompt"),
]
Candidates = Annotated[
    TokenIds | Many[TokenIds] | Many[Many[TokenIds]],
    one_message(
        "must be a list of token ids, or for a single prompt a list of token ids for each position, or for several "
        "prompts such lists for each"
    ),
]
Positions = Annotated[
    NonNegativeInt | Many[NonNegativeInt],
    one_message("must be a position, which counts from 0, or one for each prompt"),
]
Text = Annotated[str | TokenIds, one_message("must be a string or a list of token ids")]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    body_factor: ClassVar[int] = 1
    """A body may have this many times `--max-request-bytes`."""

    model: str | None = None
    """A served model or LoRA adapter; the served model when left out."""


Lane = Literal["prefill", "decode", "verify"]
"""How many tokens of a sequence a step has: as many as fit; one, as when text is generated; or one more than
speculative decoding drafts, as when drafts are verified."""
LANES: tuple[Lane, ...] = get_args(Lane)


class LaneFields(Request):
    """How many tokens of a sequence a step has, which decides the kernels that compute them."""

    lane: Lane = "prefill"
    """`decode`: feed one token a step, as in generation; `verify`: as many as a step of speculative decoding has.
    Nothing is cached then."""
    context: int | None = Field(None, ge=1)
    """In the other lanes, prefill at most this many tokens; by default all those that come before the token whose step
    gives the first logprob that is returned."""


CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")]
"""What vLLM takes: some of its connectors make file names of it."""

Messages = Many[dict[str, Any]]
"""Of one conversation."""
Conversations = Annotated[
    Messages | Many[Messages], one_message("must be a list of messages, which are objects, or a list of such lists")
]
Tools = Many[dict[str, Any]]
ToolLists = Annotated[
    Tools | Many[Tools | None], one_message("must be a list of objects, or such a list for each conversation")
]


class MessagesFields(Request):
    """Conversations, which the served model's chat template renders as in `/v1/chat/completions`."""

    messages: Conversations | None = None
    """One conversation or several, of which turns are scored."""
    tools: ToolLists | None = None
    """Tools of all conversations, or a list for each."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template."""
    roles: Many[str] = Field(["assistant"], min_length=1)
    """The turns to score, by their role."""

    @property
    def conversations(self) -> list[Messages]:
        """All of the request."""
        messages: list[Any] = self.messages or []
        return messages if messages and isinstance(messages[0], list) else [messages]


class TurnsRequest(MessagesFields):
    """Body of `POST /v1/turns`."""

    add_generation_prompt: bool = False
    """Return each conversation up to where the assistant answers, as a prompt without turns."""


class Turn(TypedDict):
    """A scored turn: the tokens that the model generates for it, or for another role, those of its message."""

    role: str
    first: int
    end: int
    """Positions in the sequence, of its first token and after its last one."""
    is_merged: NotRequired[bool]
    """Whether its first token also has characters of what comes before the turn, for which the model was prompted."""


class TurnSequence(TypedDict):
    """A rendered conversation with its turns, or one of its turns as it was generated."""

    conversation: int
    token_ids: Many[Int32]
    turns: list[Turn]


class TurnsResponse(TypedDict):
    """Response of `POST /v1/turns`. A conversation has several sequences where the template renders a turn in another
    way once others follow: without its reasoning, for example."""

    object: Literal["turns"]
    data: list[TurnSequence]


TopLogprobsCount = Annotated[int, Field(ge=0, json_schema_extra={"maximum": MAX_TOP_LOGPROBS})]
"""Limited by the server, whose `--max-logprobs` may allow fewer."""


Statistic = Literal["entropy", "std_logprob"]


class ScoreRequest(MessagesFields, LaneFields):
    """Body of `POST /v1/score`: `prompt` or `messages`."""

    prompt: Prompt | None = None
    """One text or several, as text or as token ids."""
    continuations: Continuations | None = None
    """Score these instead, each after each prompt, or a list for each prompt. A text after a text is tokenized together
    with it."""
    add_special_tokens: bool = True
    """Let the tokenizer add its special tokens (BOS) to a text."""
    top_logprobs: TopLogprobsCount = 0
    """The k most likely tokens at every position."""
    candidate_token_ids: Candidates | None = None
    """Score these tokens too: one list for all positions, or lists of one length, one per position."""
    temperature: float = Field(1.0, ge=0.01, le=1000)
    """Of the distribution: softmax(logits / T)."""
    statistics: list[Statistic] = []
    """Figures of the whole distribution at every position, at this temperature, in nats: its entropy, and the standard
    deviation of the logprobs under it."""
    sinks: dict[str, JsonValue] = {}
    """Figures of packages that are installed on the server: by name, what each needs to know."""
    logprobs_from: Positions = 0
    """Return only positions from this one on; one for all prompts, or one per prompt."""
    return_ranks: bool = False
    """The rank of every token in the vocabulary, 1 for the most likely."""
    return_tokens: bool = False
    """Every token as text."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64`: logprobs as little-endian float32, NaN where there is none, and ids as int32, -1 there."""
    use_cache: bool = True
    """Accept logprobs that were computed for an earlier request."""
    cache_salt: CacheSalt | None = None
    """Share cached prefixes only with requests that have the same salt."""


class TokensRequest(Request):
    """Body of `POST /v1/tokens`."""

    token_ids: TokenIds
    """At most as many as the vocabulary has; ids may repeat."""


class TokensResponse(TypedDict):
    """Response of `POST /v1/tokens`."""

    object: Literal["tokens"]
    tokens: list[str]
    """The text of each token alone, as `return_tokens` of `/v1/score` has it."""
    bytes: NotRequired[list[str | None]]
    """The bytes of each token that ends within a character, in hexadecimal; null for others, and where the tokenizer
    does not say them."""


class TopLogprob(TypedDict):
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float
    token: NotRequired[str]


class TopLogprobArrays(TypedDict):
    """The k most likely tokens of n positions, in descending order, with `base64`."""

    shape: list[int]
    """[n, k]."""
    token_ids: str
    """int32."""
    logprobs: str
    """float32, nats."""


class CandidateLogprobArrays(TypedDict):
    """The m chosen tokens of n positions, in the order in which they were given, with `base64`."""

    shape: list[int]
    """[n, m]."""
    logprobs: str
    """float32, nats."""


class ColumnArray(TypedDict):
    """A column of n positions, with `base64`."""

    dtype: Literal["float32", "int32"]
    shape: list[int]
    """[n], or [n, numbers of a position]."""
    values: str


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
    columns: NotRequired[dict[str, list[Any] | ColumnArray]]
    """The figures of `statistics` and `sinks`, by name: a number or a list at each position, null where there is no
    context or a number is infinite."""


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
    lane: NotRequired[Lane]
    """With `mean_batch`, in the other lanes than prefill."""
    mean_batch: NotRequired[float | None]
    """Sequences of these lanes in the engine on average while the request ran; null if it had none there."""


SATURATES = "saturates"
"""In the name of a kernel whose sums this server's CPU cuts off."""
SATURATION = "INT8 sums saturate on a CPU without VNNI: not a figure of the quantization"


class ComputedBy(BaseModel):
    """The code and hardware that compute with the weights; a field is null if the server cannot know it."""

    model_config = ConfigDict(frozen=True)

    implementation: str | None = None
    """`vllm` for a model class of vLLM, `transformers` for its backend that runs the transformers library's
    (`--model-impl`), else the Python package of the class."""
    wrong_logits: str | None = None
    """The scale or soft cap of the model's config that its logits lack, so that scores are not the model's."""
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

    @property
    def fault(self) -> str | None:
        """Why figures are not those that the model's weights should have; None where nothing is known to be wrong."""
        if self.wrong_logits:
            return f"scores are not those of the model: {self.wrong_logits}"
        return SATURATION if any(SATURATES in kernel for kernel in self.kernels or ()) else None


class ServedModel(BaseModel):
    """A model as a server serves it, or served it when a reference was recorded."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str
    revision: str | None = None
    """The commit of a model from the hub; None of a folder, and from an older server."""
    dtype: str
    quantization: str | None
    scoremode_version: str
    vllm_version: str
    computed_by: ComputedBy | None = None
    """Model runner, kernels, GPUs and parallelism; None from an older server."""
    stored_dtype: str | None = None
    """Of most of the checkpoint's weights, which may be served in another; None where that is not known, and from an
    older server."""
    weight_bytes: NonNegativeInt | None = None
    """Of the weight files that the server loads; None where it cannot know, or is older."""
    num_parameters: NonNegativeInt | None = None
    """Weights of the model before any quantization; None where the server cannot know, or is older."""
    stop_token_ids: Many[Int32] | None = None
    """Tokens after which the server ends an answer: the EOS ids of `generation_config.json` and of the tokenizer; None
    from an older server."""
    chat_template_fingerprint: str | None = None
    """Of the chat templates, the server's variables for them, BOS and EOS; None without a Jinja template, and from an
    older server."""

    def computes_otherwise(self, wanted: "ServedModel") -> str:
        """The values of `computed_by` that differ, in words; empty where none do. A field that one does not know, such
        as an older server, does not differ."""
        pairs = [(name, value, getattr(wanted.computed_by, name, None)) for name, value in self.computed_by or ()]
        known = [pair for pair in pairs if None not in pair]
        return ", ".join(f"{name} is {value!r} instead of {other!r}" for name, value, other in known if value != other)

    @property
    def most_noise_floor(self) -> float:
        """The most nats by which a model diverges from itself in the mean because of rounding. In 16 bits the largest
        floor that was seen is 0.02, and activations that are quantized round in larger steps."""
        return 0.05 if self.dtype == "float32" and self.quantization is None else 0.2

    @property
    def is_batch_invariant(self) -> bool:
        """Whether what it computes does not depend on the batch, as far as is known."""
        return self.computed_by is not None and self.computed_by.batch_invariant is True


class Bounds(BaseModel):
    """The most that a server takes and answers. A client uses the defaults with a server that does not publish its own.

    docs/http-api.md says where each bound applies, and which option sets it."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    request_bytes: PositiveInt = 16 * 1024**2
    """Bytes of a request's body."""
    recording_bytes: PositiveInt = 16 * 1024**2
    """Bytes of the body of `POST /v1/references`."""
    fields: PositiveInt = 1000
    """Fields of a body."""
    lists: PositiveInt = 100_000
    """Lists and objects in one field."""
    values: PositiveInt = 500_000
    """Values in one field, or names in one that has tokens or texts."""
    messages: PositiveInt = 1024
    """Messages of a conversation."""
    sequences: PositiveInt = 65_536
    """Sequences of a request."""
    waiting_sequences: PositiveInt = 2**17
    """Sequences of all requests in an API server process, without an answer yet."""
    scoring_tokens: PositiveInt = 2**24
    """Tokens of a request, and of all requests in an API server process, without an answer yet."""
    sequence_tokens: PositiveInt = 2**31
    """Tokens of a sequence or a conversation."""
    top_logprobs: NonNegativeInt = 20
    """Top tokens at a position."""
    candidates: PositiveInt = MAX_CANDIDATES
    """Chosen tokens at a position."""
    float_values: PositiveInt = 2**23
    """Logprobs of an answer with `encoding_format` `float`, or tokens of conversations that are rendered."""
    base64_values: PositiveInt = 2**26
    """Logprobs of an answer with `base64`, or of a completion."""
    sequence_values: PositiveInt = 2**24
    """Logprobs of one sequence."""
    rendering_requests: PositiveInt = 32
    """Requests whose conversations are rendered or wait for it, in an API server process."""
    export_bytes: PositiveInt = 256 * 1024**2
    """Bytes of an export between the engine and its client, unless one window has more."""
    all_exports_bytes: PositiveInt = 512 * 1024**2
    """Bytes of all exports in an API server process together, unless one export alone has more."""
    request_seconds: float | None = None
    """Seconds to answer a request; null without a limit."""


class ServerInfo(ServedModel):
    """Response of `GET /v1/score`: what a client needs to cut windows and to repeat a run."""

    object: Literal["score.info"] = "score.info"
    max_model_len: PositiveInt
    vocab_size: PositiveInt
    max_top_logprobs: int
    bos_token_id: int | None
    eos_token_id: int | None
    adds_bos: bool
    """Whether the tokenizer puts BOS before a text by itself."""
    max_num_seqs: PositiveInt | None = None
    """Sequences that the engine runs at once (`--max-num-seqs`); None from a server older than this field."""
    fingerprint: str | None = None
    """Of the contents of config and weights, dtype and quantization, of an adapter too if `model` names one; begins
    with `v2-`, or `v2-dummy-` with dummy weights; None from an older server."""
    bounds: Bounds = Field(default_factory=Bounds)

    @property
    def devices(self) -> str | None:
        """GPUs of the server, or "cpu"; None where it does not say."""
        if self.computed_by is None or self.computed_by.device is None:
            return None
        number = self.computed_by.num_devices or 1
        return self.computed_by.device if number == 1 else f"{number} x {self.computed_by.device}"

    @property
    def prefix_token_id(self) -> int | None:
        """The token that `rolling` puts before a text: BOS, else EOS."""
        return self.eos_token_id if self.bos_token_id is None else self.bos_token_id

    @property
    def chunk_token_id(self) -> int | None:
        """The token that `llama.cpp` puts in place of a chunk's first: BOS, where the tokenizer adds one."""
        return self.bos_token_id if self.adds_bos else None


class PerplexityRequest(MessagesFields, LaneFields):
    """Body of `POST /v1/perplexity`: `prompt`, one text; `texts`, several that share no context; or `messages`."""

    prompt: Text | None = None
    """One text, or its token ids."""
    texts: Many[str] | None = None
    """Several texts, each cut into windows separately."""
    method: Method = "sliding"
    """How the text is cut into windows; `conversation` with messages."""
    context_length: int | None = Field(None, ge=2)
    """Tokens per window; by default 2,048, or the model's context if that is shorter, or for messages."""
    stride: int | None = Field(None, ge=1)
    """Tokens from one window to the next; by default a quarter of the context."""
    max_tokens: int | None = Field(None, ge=1)
    """Take at most this many tokens of the text."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens; yes, except for `rolling`, as in lm-eval."""
    cache_salt: CacheSalt | None = None
    """Share cached prefixes only with requests that have the same salt."""
    stream: bool = False
    """Send server-sent events: one per window, then the result."""

    @property
    def adds_special_tokens(self) -> bool:
        """`add_special_tokens`, or the default of the method."""
        return adds_special_tokens(self.method, self.add_special_tokens)


Figure = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value), Field(ge=0.999)]
"""A perplexity: at least 1, but for `ROUNDING`. It may be infinite, which is null in JSON."""


class PerplexityWindow(BaseModel):
    """A streamed event: one window's NLL in nats, and the perplexity of all windows so far."""

    object: Literal["perplexity.window"] = "perplexity.window"
    index: NonNegativeInt
    num_windows: PositiveInt
    num_scored: PositiveInt
    nll_sum: Annotated[float, Field(allow_inf_nan=False)]
    total_scored: PositiveInt
    perplexity: Figure
    logprobs: Many[Logprob] | None = None
    """Of the targets, in order, as are their ranks; of a recording with `return_ranks`."""
    ranks: Many[Rank] | None = None


class TextInWindows(BaseModel):
    """How much text was measured, and how it was cut into windows."""

    method: Method
    context_length: PositiveInt
    stride: PositiveInt
    num_tokens: PositiveInt
    num_windows: PositiveInt
    num_scored: PositiveInt
    """Targets of all windows."""
    num_bytes: int | None
    """UTF-8 bytes of the text; None where token ids were given."""
    num_words: int | None


class PerplexityResponse(TextInWindows):
    """Response of `POST /v1/perplexity`. NLLs in nats; docs/methods.md defines every figure."""

    id: str
    object: Literal["perplexity"] = "perplexity"
    created: int
    model: str
    perplexity: Figure
    perplexity_stderr: float | None
    nll_sum: float
    nll_mean: float
    nll_stderr: float | None
    bits_per_byte: float | None
    word_perplexity: float | None
    usage: Usage
    lane: Lane = "prefill"
    mean_batch: float | None = None
    """As in a `ScoreResponse`."""
