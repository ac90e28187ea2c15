"""Decides which tokens of a text are scored, and with how much context: the windows of each perplexity method.

A method cuts a text of N tokens into windows. A window is a sequence that the model is fed; its *targets* are the
tokens whose log-probabilities count. Everything here is arithmetic on positions: nothing is tokenized or scored.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Literal, TypedDict, get_args

TextMethod = Literal["sliding", "overlapping", "disjoint", "llama.cpp", "rolling"]
"""The methods that cut a text."""
METHODS: tuple[TextMethod, ...] = get_args(TextMethod)
Method = Literal[TextMethod, "conversation"]
"""`conversation` has one window per scored turn, whose context is everything before the turn."""

STRIDED_METHODS: frozenset[Method] = frozenset({"sliding", "overlapping"})
"""The methods that take a stride; the others cut by the context length alone."""

EXHAUSTIVE_METHODS: frozenset[Method] = frozenset({"sliding", "rolling"})
"""The methods that score every token that has context exactly once, so the sum of NLLs is the text's NLL."""

DEFAULT_CONTEXT_LENGTH = 2048

TOKEN_CLASSES = ("text", "reasoning", "tool call", "other")
"""The kinds of targets in a conversation; run files store the index in this tuple."""


class WindowSettings(TypedDict, total=False):
    """How a text is cut into windows."""

    method: Method
    """One of `METHODS`; `sliding` when left out."""
    context_length: int | None
    """Tokens per window (`rolling`: targets per window); by default 2,048, or fewer if the model takes fewer."""
    stride: int | None
    """Tokens from one window to the next; by default a quarter of the context, for methods that take a stride."""
    max_tokens: int | None
    """Measure at most this many tokens of the text."""
    add_special_tokens: bool | None
    """Let the tokenizer add its special tokens; by default yes, except for `rolling`."""


class WindowError(ValueError):
    """Windows cannot be cut; `field` names the argument at fault."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens `[start, end)` of a text, after an optional `leading_token`; the targets are `[first_target, end)`."""

    start: int
    end: int
    first_target: int
    leading_token: int | None = None
    """A token that is not part of the text: BOS in place of a chunk's first token (`llama.cpp`), or the token that
    `rolling` puts before a text."""

    @property
    def num_scored(self) -> int:
        return self.end - self.first_target

    @property
    def num_tokens(self) -> int:
        """Tokens of the window, including its leading token."""
        return self.end - self.start + (self.leading_token is not None)

    @property
    def first_scored(self) -> int:
        """Position of the first target among the window's own tokens."""
        return self.first_target - self.start + (self.leading_token is not None)

    def token_ids(self, text: Sequence[int]) -> list[int]:
        """The window's tokens, given the tokens of the whole text."""
        body = list(text[self.start : self.end])
        return body if self.leading_token is None else [self.leading_token, *body]

    def moved(self, offset: int) -> "Window":
        """This window shifted right by `offset` tokens."""
        return Window(self.start + offset, self.end + offset, self.first_target + offset, self.leading_token)


def turn_windows(turns: Iterable[tuple[int, int]], context_length: int) -> list[Window]:
    """Make the windows of a conversation's turns, given as [first, end) positions in its tokens. Tokens after the first
    `context_length` are left out."""
    return [Window(0, min(end, context_length), first) for first, end in turns if first < context_length]


def turn_prompts(windows: Iterable[tuple[int, list[int], int]]) -> list[list[int]]:
    """For each window, the part of its context that is new compared with the conversation's previous window.

    Args:
        windows: One tuple per window: its conversation's index, its tokens, and its first target's position in them.
    """
    prompts: list[list[int]] = []
    last_conversation, last_tokens = -1, list[int]()
    for conversation, token_ids, first_scored in windows:
        context = token_ids[:first_scored]
        if conversation != last_conversation:
            last_tokens = []
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(last_tokens, context, strict=False))
        num_shared = sum(1 for _ in shared)
        prompts.append(context[num_shared:])
        last_conversation, last_tokens = conversation, token_ids
    return prompts


def adds_special_tokens(method: Method, requested: bool | None) -> bool:
    """Whether the tokenizer adds its special tokens: `requested`, or by default yes, except for `rolling` (lm-eval)."""
    return method != "rolling" if requested is None else requested


def resolve_context_length(method: Method, context_length: int | None, max_model_len: int) -> int:
    """The given context length, or the default that fits the model. WindowError if windows would exceed the model's
    context."""
    # A `rolling` window predicts `context_length` tokens, and has one more token before them.
    num_before = 1 if method == "rolling" else 0
    if context_length is None:
        most = max_model_len - num_before
        return most if method == "conversation" else min(DEFAULT_CONTEXT_LENGTH, most)
    needed = context_length + num_before
    if needed > max_model_len:
        raise WindowError(
            f"context_length {context_length} needs windows of {needed} tokens with method {method!r}, "
            f"but the model takes at most {max_model_len}",
            "context_length",
        )
    return context_length


def resolve_stride(method: Method, context_length: int, stride: int | None) -> int:
    """The given stride, or the method's default: a quarter of the context if windows overlap, else the whole context.
    WindowError if the stride is not positive or skips tokens, or the method takes none."""
    if stride is None:
        return max(1, context_length // 4) if method in STRIDED_METHODS else context_length
    if stride < 1:
        raise WindowError(f"stride must be at least 1, got {stride}", "stride")
    if stride > context_length:
        raise WindowError(
            f"stride {stride} is larger than context_length {context_length}: tokens between windows would be skipped",
            "stride",
        )
    if method not in STRIDED_METHODS and stride != context_length:
        raise WindowError(f"method {method!r} takes no stride: its windows follow from context_length", "stride")
    return stride


def cut_windows(
    num_tokens: int,
    method: Method,
    context_length: int,
    stride: int | None = None,
    *,
    prefix_token_id: int | None = None,
    bos_token_id: int | None = None,
) -> list[Window]:
    """Cut a text of `num_tokens` tokens into the windows of `method`.

    `prefix_token_id` is put before the text for `rolling`; `bos_token_id` replaces the first token of each
    `llama.cpp` chunk, and is None for a model whose tokenizer adds no BOS. A text too short for the method gives no
    windows.

    Raises:
        WindowError: impossible context length or stride, or `rolling` without a prefix token.
    """
    if method == "conversation":
        raise WindowError("method 'conversation' is for messages, not for a text", "method")
    if context_length < 2:
        raise WindowError(f"context_length must be at least 2 tokens, got {context_length}", "context_length")
    stride = resolve_stride(method, context_length, stride)
    if method == "sliding":
        return _sliding(num_tokens, context_length, stride)
    if method == "llama.cpp":
        return _llama_cpp(num_tokens, context_length, bos_token_id)
    if method == "rolling":
        if prefix_token_id is None:
            raise WindowError("method 'rolling' needs a BOS or EOS token before the text; the model has none", "method")
        return _rolling(num_tokens, context_length, prefix_token_id)
    return [Window(start, start + context_length, start + 1) for start in range(0, num_tokens - context_length, stride)]


def _sliding(num_tokens: int, context_length: int, stride: int) -> list[Window]:
    """Cut as in Hugging Face's "Perplexity of fixed-length models".

    A window scores the tokens after the previous window's end. If the stride is as long as the context, a window's
    first token has no context and is not scored.
    """
    windows, reached = [], 0
    for start in range(0, num_tokens, stride):
        end = min(start + context_length, num_tokens)
        windows.append(Window(start, end, max(reached, start + 1)))
        reached = end
        if end == num_tokens:
            break
    return [window for window in windows if window.num_scored > 0]


def _llama_cpp(num_tokens: int, context_length: int, bos_token_id: int | None) -> list[Window]:
    """Cut as `llama-perplexity -c L` does: only whole chunks, of which the second half is scored."""
    begin = 0 if bos_token_id is None else 1
    chunk = Window(begin, context_length, context_length // 2 + 1, bos_token_id)
    starts = range(0, num_tokens - context_length + 1, context_length)
    return [chunk.moved(start) for start in starts if chunk.num_scored > 0]


def _rolling(num_tokens: int, context_length: int, prefix_token_id: int) -> list[Window]:
    """Cut as lm-eval's `get_rolling_token_windows` with `context_len=1`: the last window reaches back to be full."""
    first = Window(0, min(context_length, num_tokens), 0, prefix_token_id)
    ends = [min(reached + context_length, num_tokens) for reached in range(first.end, num_tokens, context_length)]
    later = [Window(end - context_length - 1, end, reached) for reached, end in pairwise([first.end, *ends])]
    return [first, *later] if num_tokens else []
