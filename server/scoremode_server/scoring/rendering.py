"""Helps to render conversations: threads, the spans between generation marks, and an encoder of texts that begin
alike."""

import asyncio
import inspect
import threading
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar, cast

from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from scoremode_server.errors import BusyError
from scoremode_server.threads import CallThreads

T = TypeVar("T")

THREADS = 2
"""How many requests' conversations are rendered at once. Templates run in Python, so more threads would not be
faster."""

MAX_REQUESTS = 32
"""Limit on requests whose conversations are being rendered or wait for a thread."""

Span = tuple[int, int]
"""The positions of a span's first character in a text, and of the character after its last."""

_FOR_TEMPLATES = {"tools", "documents", "chat_template", "add_generation_prompt"}
"""Arguments of `apply_chat_template` that a template can read, or that are the template."""

_FINDING_SPANS = threading.Lock()


class RenderingThreads:
    """Runs rendering in threads. A thread cannot be cancelled, so a request counts until its thread has ended."""

    def __init__(self) -> None:
        self._threads = CallThreads(THREADS)
        self._here: set[Future[Any]] = set()

    async def run(self, work: Callable[[threading.Event], T]) -> T:
        """Run a request's work and return its result. The work gets an event that is set once nobody waits for the
        result. BusyError if too many requests are being rendered."""
        self._here = {future for future in self._here if not future.done()}
        if len(self._here) >= MAX_REQUESTS:
            raise BusyError(f"the conversations of {MAX_REQUESTS} requests are being rendered: try again later", None)
        is_over = threading.Event()
        future = self._threads.submit("conversations", partial(work, is_over))
        self._here.add(future)
        try:
            return await asyncio.wrap_future(future)
        finally:
            is_over.set()


class MarkedRendering:
    """A tokenizer for vLLM's `safe_apply_chat_template` that stores the spans between a template's `{% generation %}`
    marks. transformers' own method only returns a mask of tokens, and marks all of them if a span ends within the
    first token.

    Attributes:
        spans: spans in the text that was rendered last.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.spans: list[Span] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, conversation: list[Any], **options: Any) -> str:
        """Render a conversation, and store its spans."""
        own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - _FOR_TEMPLATES
        variables = {name: value for name, value in options.items() if name not in own}
        # All renderings of a template share the object with which transformers finds spans, so only one runs at a time.
        with _FINDING_SPANS:
            (text,), (self.spans,) = render_jinja_template(
                [conversation], return_assistant_tokens_mask=True, **self._tokenizer.special_tokens_map | variables
            )
        return str(text)


class TextEncoder:
    """Encodes a text, then other texts that begin like it. For another text, the tokens of the common beginning are
    reused.

    Texts are cut before a special token: the tokenizer finds special tokens first, and encodes the text between them
    separately.

    Args:
        count: Called with the number of characters that are encoded.

    Attributes:
        token_ids: token ids of the first text.
    """

    def __init__(self, tokenizer: Any, text: str, count: Callable[[int], None]) -> None:
        self._tokenizer, self._text, self._count = tokenizer, text, count
        self._encoding = self._encoded(text)
        self.token_ids: list[int] = self._encoding["input_ids"]
        special = {
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            # A token with one of these flags may depend on the text before it.
            if not (token.lstrip or token.single_word or token.normalized)
        }
        tokens = zip(self.token_ids, self._encoding.get("offset_mapping") or (), strict=False)
        self._cuts = [(*span, index) for index, (token_id, span) in enumerate(tokens) if token_id in special]
        """Where special tokens start and end in the first text, and how many tokens come before each."""

    def encode(self, text: str) -> list[int]:
        """Encode another text."""
        at = bisect_left(self._cuts, True, key=lambda cut: not text.startswith(self._text[: cut[1]]))
        start, _, num_tokens = self._cuts[at - 1] if at else (0, 0, 0)
        rest: list[int] = self._encoded(text[start:])["input_ids"]
        return self.token_ids[:num_tokens] + rest

    def tokens_of(self, span: Span) -> tuple[int, int, bool]:
        """The position of the first token with characters of a span of the first text, and the position after the last;
        both are 0 if there is none. The third value says whether the first token also has characters before the
        span."""
        # Tokenizers may assign white space to no token.
        tokens = [token for at in range(*span) if (token := self._encoding.char_to_token(at)) is not None]
        if not tokens:
            return 0, 0, False
        return tokens[0], tokens[-1] + 1, self._encoding.token_to_chars(tokens[0]).start < span[0]

    def _encoded(self, text: str) -> BatchEncoding:
        self._count(len(text))
        return cast(
            BatchEncoding,
            self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=self._tokenizer.is_fast),
        )
