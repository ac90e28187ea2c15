"""The wire types of Scoremode's HTTP API, shared by client and server. `wire.references` has those of references.

Log-probabilities are natural logarithms (nats). Requests are validated strictly: an unknown field or a value of
another type is an error, and nothing is converted. The responses of `/v1/score` are typed dictionaries, because a model
object per token would cost more than the scoring.
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
"""Limit on top tokens per position; a server's own `--max-logprobs` may be lower."""
MAX_CANDIDATES = 256
"""Limit on candidate tokens (`candidate_token_ids`) per position."""
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; vLLM's OpenAI API uses this value too."""

ROUNDING = 1e-3
"""Nats by which rounding may lift a logprob above 0, or lower a divergence below 0. Logits are float32 numbers below
8,192, so the difference of two logits is off by at most 2**-11."""

T = TypeVar("T")

Many = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation stops at the first wrong value, because there may be millions."""

Int32 = Annotated[int, Field(ge=0, lt=2**31)]
"""A token id, a position or the number of a window."""
Rank = Annotated[int, Field(ge=1)]
Logprob = Annotated[float, Field(le=ROUNDING, allow_inf_nan=False)]
"""A logprob in JSON, with `LOWEST_LOGPROB` for minus infinity."""
Nats = Annotated[float, Field(ge=-ROUNDING, allow_inf_nan=False)]
"""An NLL or a divergence."""


def one_message(message: str) -> WrapValidator:
    """Replace a union's errors, one per branch, with a single error. It says which forms are allowed, and names the
    first wrong value in the branch that got furthest."""

    def validate(value: object, handler: Callable[[object], object]) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            closest = max(error.errors(include_url=False), key=lambda detail: detail["loc"][1:])
            place = "".join(f"[{index}]" for index in closest["loc"][1:])
            reason = f"; {place} {closest['msg'].removeprefix('Input ')}" if place else ""
            raise PydanticCustomError("shape", "{message}", {"message": message + reason}) from None

    return WrapValidator(validate)


TokenIds = Many[int]

PROMPT_FORMS = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
Prompt = Annotated[str | Many[str] | TokenIds | Many[TokenIds], one_message(PROMPT_FORMS)]
Continuations = Annotated[
    Many[str] | Many[TokenIds] | Many[Many[str]] | Many[Many[TokenIds]],
    one_message("must be a list of strings or of lists of token ids, or one such list per prompt"),
]
Candidates = Annotated[
    TokenIds | Many[TokenIds] | Many[Many[TokenIds]],
    one_message(
        "must be a list of token ids; for a single prompt, it may be one such list per position, and for several "
        "prompts, a list of these per prompt"
    ),
]
Positions = Annotated[
    NonNegativeInt | Many[NonNegativeInt],
    one_message("must be a position, counted from 0, or a list with one position per prompt"),
]
Text = Annotated[str | TokenIds, one_message("must be a string or a list of token ids")]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    body_factor: ClassVar[int] = 1
    """The limit on the body, in multiples of `--max-request-bytes`."""

    model: str | None = None
    """A served model or LoRA adapter; the served model when left out."""


Lane = Literal["prefill", "decode", "verify"]
"""How many tokens of a sequence one engine step takes. `prefill`: as many as fit. `decode`: one, as in generation.
`verify`: one more than speculative decoding drafts, as in verification."""
LANES: tuple[Lane, ...] = get_args(Lane)


class LaneFields(Request):
    """How many tokens of a sequence one engine step takes. This decides which kernels compute them."""

    lane: Lane = "prefill"
    """`prefill`: feed as many tokens per step as fit; `decode`: one, as in generation; `verify`: as many as speculative
    decoding verifies at once. `decode` and `verify` do not use the cache."""
    context: int | None = Field(None, ge=1)
    """For `decode` and `verify`: prefill at most this many tokens. By default, prefill every token before the one whose
    step gives the first returned logprob."""


CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")]
"""A salt that vLLM accepts. Some of vLLM's KV connectors use the salt in file names."""

Messages = Many[dict[str, Any]]
"""The messages of one conversation."""
Conversations = Annotated[
    Messages | Many[Messages], one_message("must be a list of messages, which are objects, or a list of such lists")
]
Tools = Many[dict[str, Any]]
ToolLists = Annotated[
    Tools | Many[Tools | None], one_message("must be a list of objects, or one such list per conversation")
]


class MessagesFields(Request):
    """Conversations, which the served model's chat template renders as in `/v1/chat/completions`."""

    messages: Conversations | None = None
    """One conversation or several, whose turns are scored."""
    tools: ToolLists | None = None
    """Tools: one list for all conversations, or one list per conversation."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    roles: Many[str] = Field(["assistant"], min_length=1)
    """Roles whose turns are scored."""

    @property
    def conversations(self) -> list[Messages]:
        """The request's conversations, as a list even for a single one."""
        messages: list[Any] = self.messages or []
        return messages if messages and isinstance(messages[0], list) else [messages]


class TurnsRequest(MessagesFields):
    """Body of `POST /v1/turns`."""

    add_generation_prompt: bool = False
    """Return each conversation up to where the assistant answers, as a prompt without turns."""


class Turn(TypedDict):
    """A scored turn. For the assistant, it is the tokens that the model generates; else the message's tokens."""

    role: str
    first: int
    end: int
    """The turn's tokens are at the positions [first, end) of the sequence."""
    is_merged: NotRequired[bool]
    """Whether the turn's first token begins with the last characters of the prompt before the turn."""


class TurnSequence(TypedDict):
    """A rendered conversation with its turns, or the prompt and the tokens of a single turn."""

    conversation: int
    token_ids: Many[Int32]
    turns: list[Turn]


class TurnsResponse(TypedDict):
    """Response of `POST /v1/turns`. A conversation has several sequences if the template renders a turn differently
    once other turns follow: without its reasoning, for example."""

    object: Literal["turns"]
    data: list[TurnSequence]


TopLogprobsCount = Annotated[int, Field(ge=0, json_schema_extra={"maximum": MAX_TOP_LOGPROBS})]
"""A number of top tokens; the server's `--max-logprobs` is the limit."""


Statistic = Literal["entropy", "std_logprob"]


class ScoreRequest(MessagesFields, LaneFields):
    """Body of `POST /v1/score`, which has either `prompt` or `messages`."""

    prompt: Prompt | None = None
    """One text or several, as text or as token ids."""
    continuations: Continuations | None = None
    """Continuations to score instead of the prompts: one list, each scored after every prompt, or one list per prompt.
    A prompt and a continuation that are both text are tokenized together."""
    add_special_tokens: bool = True
    """Let the tokenizer add its special tokens (BOS) to a text."""
    top_logprobs: TopLogprobsCount = 0
    """How many of the most likely tokens to return at every position."""
    candidate_token_ids: Candidates | None = None
    """Tokens to score at every position in addition to the text's: one list for all positions. For a single
    prompt, it may also be one list per position; for several prompts, a list of such lists per prompt. All lists must
    have the same length."""
    temperature: float = Field(1.0, ge=0.01, le=1000)
    """T of the scored distribution, softmax(logits / T)."""
    statistics: list[Statistic] = []
    """Figures of the whole distribution at every position, at this temperature, in nats: its entropy, and the standard
    deviation of the logprobs under it."""
    sinks: dict[str, JsonValue] = {}
    """Settings of sinks, by name. A sink is a class on the server that computes more figures at every position."""
    logprobs_from: Positions = 0
    """First position to return, from 0: one for all prompts, or one per prompt."""
    return_ranks: bool = False
    """Return each scored token's rank in the vocabulary, 1 for the most likely."""
    return_tokens: bool = False
    """Return every token as text."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64`: arrays as little-endian float32 and int32. A position without context has NaN as its logprob, and -1 as
    the ids of its top tokens."""
    use_cache: bool = True
    """Accept logprobs that were computed for an earlier request."""
    cache_salt: CacheSalt | None = None
    """Share cached prefixes only with requests that have the same salt."""


class TokensRequest(Request):
    """Body of `POST /v1/tokens`."""

    token_ids: TokenIds
    """Token ids, at most as many as the vocabulary has; they may repeat."""


class TokensResponse(TypedDict):
    """Response of `POST /v1/tokens`."""

    object: Literal["tokens"]
    tokens: list[str]
    """The text of each token on its own, as for `return_tokens` of `/v1/score`."""
    bytes: NotRequired[list[str | None]]
    """The bytes of each token that ends within a character, in hexadecimal; null for other tokens, and if the tokenizer
    does not provide them."""


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
    """Logprobs of the m candidate tokens at n positions, in the order of the request, with `base64`."""

    shape: list[int]
    """[n, m]."""
    logprobs: str
    """float32, nats."""


class ColumnArray(TypedDict):
    """A figure of a statistic or a sink at n positions, with `base64`."""

    dtype: Literal["float32", "int32"]
    shape: list[int]
    """[n], or [n, width] for several numbers per position."""
    values: str


class ScoreResult(TypedDict):
    """One scored sequence, or one continuation. Lists run over `token_ids`; a text's first logprob is null."""

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
    """The figures of `statistics` and `sinks`, by name: a number or a list per position, null without context. An
    infinite number is null too."""


class Usage(TypedDict):
    """Tokens of all scored sequences, and how many of them came from the cache."""

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
    """The lane, if it is not prefill; `mean_batch` comes with it."""
    mean_batch: NotRequired[float | None]
    """Mean number of sequences that the engine had in the decode or verify lane while it computed sequences of this
    request; null if it computed none."""


SATURATES = "saturates"
"""Part of a kernel's name if its sums saturate on this server's CPU."""
SATURATION = "INT8 sums saturate on a CPU without VNNI: not a figure of the quantization"


class ComputedBy(BaseModel):
    """The code and hardware that run the model; a field is null if the server cannot determine it."""

    model_config = ConfigDict(frozen=True)

    implementation: str | None = None
    """`vllm` for a model class of vLLM, `transformers` for vLLM's backend that runs the transformers library's classes
    (`--model-impl`), else the Python package of the class. Without vLLM: a library with its version."""
    wrong_logits: str | None = None
    """A scale or soft cap that the model's config has and its logits lack, so the scores are wrong."""
    model_runner: Literal["v1", "v2"] | None = None
    attention_backends: list[str] | None = None
    """Attention backends, by vLLM's names; several for a model with more than one kind of attention."""
    kernels: list[str] | None = None
    """The different ways in which the model's layers are computed: each names the class of the quantization method, and
    the kernel classes and functions that vLLM chose."""
    kv_cache_dtype: str | None = None
    device: str | None = None
    """The GPU's model, or "cpu", on the first rank."""
    num_devices: int | None = None
    """Number of devices of all replicas together."""
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    expert_parallel: bool | None = None
    speculative_method: str | None = None
    """vLLM's name of the method of speculative decoding; "none" without it."""
    batch_invariant: bool | None = None
    eager: bool | None = None
    """Whether the model runs without CUDA graphs and compilation (`--enforce-eager`)."""
    cuda_graphs: str | None = None
    """vLLM's mode of CUDA graphs, such as `FULL_AND_PIECEWISE`; null if `eager`."""
    compilation: str | None = None
    """vLLM's compilation mode, such as `VLLM_COMPILE`; null if `eager`."""

    @property
    def fault(self) -> str | None:
        """Why the scores are not the model's true scores; None if no fault is known."""
        if self.wrong_logits:
            return f"scores are not those of the model: {self.wrong_logits}"
        return SATURATION if any(SATURATES in kernel for kernel in self.kernels or ()) else None


class ServedModel(BaseModel):
    """A model as a server serves it, or served it when a reference was recorded."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str
    revision: str | None = None
    """The commit of a model from the hub; None for a folder, and from an older server."""
    dtype: str
    quantization: str | None
    scoremode_version: str
    vllm_version: str
    """Empty if a reference was recorded without vLLM, such as with the transformers library."""
    computed_by: ComputedBy | None = None
    """Model runner, kernels, GPUs and parallelism; None from an older server."""
    stored_dtype: str | None = None
    """The dtype of most weights in the checkpoint, converted to `dtype` when loaded; None if unknown."""
    weight_bytes: NonNegativeInt | None = None
    """Size of the weight files that the server loads; None if unknown, and from an older server."""
    num_parameters: NonNegativeInt | None = None
    """Weights of the model before any quantization; None if unknown, and from an older server."""
    stop_token_ids: Many[Int32] | None = None
    """Tokens after which the server ends an answer: the EOS ids of `generation_config.json` and of the tokenizer; None
    from an older server."""
    chat_template_fingerprint: str | None = None
    """Hash of the chat templates, the server's variables for them, BOS and EOS; None without a Jinja template, and from
    an older server."""

    @property
    def engine(self) -> str:
        """The library that runs the model, with its version."""
        if self.vllm_version:
            return f"vLLM {self.vllm_version}"
        return (self.computed_by and self.computed_by.implementation) or "an unknown library"

    def computes_otherwise(self, wanted: "ServedModel") -> str:
        """List the values of `computed_by` that differ, as a phrase; empty if none do. A field that is None on either
        side, as from an older server, does not count."""
        pairs = [(name, value, getattr(wanted.computed_by, name, None)) for name, value in self.computed_by or ()]
        full = [pair for pair in pairs if None not in pair]
        return ", ".join(f"{name} is {value!r} instead of {other!r}" for name, value, other in full if value != other)

    @property
    def most_noise_floor(self) -> float:
        """Limit on a plausible noise floor: the mean KL divergence in nats that rounding can cause. The largest floor
        seen in 16 bits is 0.02; quantized activations round in larger steps."""
        return 0.05 if self.dtype == "float32" and self.quantization is None else 0.2

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the server says that its results do not depend on the batch."""
        return self.computed_by is not None and self.computed_by.batch_invariant is True


class Bounds(BaseModel):
    """Limits on requests and answers. The defaults apply to a server that does not publish its own.

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
    """Values in one field. In a field that has tokens or texts, only the names in objects count."""
    messages: PositiveInt = 1024
    """Messages of a conversation."""
    sequences: PositiveInt = 65_536
    """Sequences of a request."""
    waiting_sequences: PositiveInt = 2**17
    """Unanswered sequences of all requests in an API server process."""
    scoring_tokens: PositiveInt = 2**24
    """Unanswered tokens of a request, and of all requests in an API server process."""
    sequence_tokens: PositiveInt = 2**31
    """Tokens of a sequence or a conversation."""
    top_logprobs: NonNegativeInt = 20
    """Top tokens at a position."""
    candidates: PositiveInt = MAX_CANDIDATES
    """Candidate tokens at a position."""
    float_values: PositiveInt = 2**23
    """Logprobs of an answer with `encoding_format` `float`, or tokens of rendered conversations."""
    base64_values: PositiveInt = 2**26
    """Logprobs of an answer with `base64`, or of a completion."""
    sequence_values: PositiveInt = 2**24
    """Logprobs of one sequence."""
    rendering_requests: PositiveInt = 32
    """Requests in an API server process whose conversations are being rendered or are queued for it."""
    export_bytes: PositiveInt = 256 * 1024**2
    """Bytes of an export that the engine has computed and the client has not read; one larger window is allowed if it
    is alone."""
    all_exports_bytes: PositiveInt = 512 * 1024**2
    """The same bytes over all exports in an API server process; one larger export is allowed if it is alone."""
    request_seconds: float | None = None
    """Seconds in which a request must be answered; null for no limit."""


class ServerInfo(ServedModel):
    """Response of `GET /v1/score`: the properties that a client needs to cut windows and to repeat a run."""

    object: Literal["score.info"] = "score.info"
    max_model_len: PositiveInt
    vocab_size: PositiveInt
    max_top_logprobs: int
    bos_token_id: int | None
    eos_token_id: int | None
    adds_bos: bool
    """Whether the tokenizer puts BOS before a text by default."""
    max_num_seqs: PositiveInt | None = None
    """Sequences that the engine runs at once (`--max-num-seqs`); None from an older server."""
    fingerprint: str | None = None
    """Hash of config, weights, dtype and quantization, and of the adapter if `model` names one. Begins with `v2-`, or
    `v2-dummy-` for dummy weights; None from an older server."""
    bounds: Bounds = Field(default_factory=Bounds)

    @property
    def devices(self) -> str | None:
        """Number and model of the server's GPUs, or "cpu"; None if unknown."""
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
        """The token that replaces the first token of a `llama.cpp` chunk: BOS, or None if the tokenizer adds none."""
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
    """Tokens per window. The default for a text is 2,048, or the model's context if that is shorter; for messages, the
    model's context."""
    stride: int | None = Field(None, ge=1)
    """Tokens from one window to the next, for `sliding` and `overlapping`; by default a quarter of a window."""
    max_tokens: int | None = Field(None, ge=1)
    """Measure at most this many tokens of the text."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens; by default yes, except for `rolling`, as in lm-eval."""
    cache_salt: CacheSalt | None = None
    """Share cached prefixes only with requests that have the same salt."""
    stream: bool = False
    """Send server-sent events: one per window, then the result."""

    @property
    def adds_special_tokens(self) -> bool:
        """`add_special_tokens`, or the default of the method."""
        return adds_special_tokens(self.method, self.add_special_tokens)


Figure = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value), Field(ge=0.999)]
"""A perplexity: at least 1, except for rounding. It may be infinite, which is null in JSON."""


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
    """Logprobs of the targets, in order. They and `ranks` come only from a recording with `return_ranks`."""
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
    """UTF-8 bytes of the text; None if token ids were given."""
    num_words: int | None


class PerplexityResponse(TextInWindows):
    """Response of `POST /v1/perplexity`. NLLs are in nats; docs/methods.md defines every figure."""

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
