"""Cuts a request's texts or conversations into windows, and sums up the negative log-likelihoods (NLLs) of windows."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import fsum
from typing import Any, Protocol

import numpy as np

from scoremode.metrics import count_words, exp
from scoremode.windows import Method, Window, cut_windows, resolve_context_length, resolve_stride, turn_windows
from scoremode.wire.protocol import PerplexityRequest, PerplexityWindow
from scoremode_server.errors import RequestError
from scoremode_server.scoring.limits import Limits


class TextCore(Protocol):
    """The parts of `Core` that cut texts. A recorder without vLLM has parts of its own."""

    limits: Limits
    tokenizer: Any
    conversations: Any
    info: Any


@dataclass(slots=True)
class TextDocument:
    """The tokens of one text or rendered conversation, and its windows. `text` is None for token ids and for
    conversations."""

    token_ids: list[int]
    text: str | None
    windows: list[Window] = field(default_factory=list)
    index: int = 0
    """Index of the text or conversation in the request. One conversation may give several documents, if the template
    renders a turn differently once more messages follow."""
    roles: list[str] = field(default_factory=list)
    """The role of each window's turn, for conversations."""


@dataclass(frozen=True, slots=True)
class TextWindows:
    """All windows of a request's documents. Documents share no context."""

    method: Method
    context_length: int
    stride: int
    documents: list[TextDocument]

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        """Yield the tokens of each window, and the position of its first target among them."""
        for document in self.documents:
            for window in document.windows:
                yield window.token_ids(document.token_ids), window.first_scored

    @property
    def windows(self) -> list[Window]:
        return [window for document in self.documents for window in document.windows]

    @property
    def num_tokens(self) -> int:
        return sum(len(document.token_ids) for document in self.documents)

    @property
    def num_bytes(self) -> int | None:
        """Count the bytes of all texts in UTF-8; None if there is no text."""
        return sum(len(document.text.encode()) for document in self.documents if document.text) or None

    @property
    def num_words(self) -> int | None:
        """Count the words of all texts; None if there is no text."""
        return sum(count_words(document.text) for document in self.documents if document.text) or None


@dataclass(slots=True)
class RunningPerplexity:
    """Sums up the NLLs of the windows so far."""

    num_windows: int
    nlls: list[np.ndarray] = field(default_factory=list)
    """For each window, the NLLs [num_scored] float64 of its targets, in nats."""
    _nll_sum: float = 0.0
    _num_scored: int = 0

    def add(self, nlls: np.ndarray) -> PerplexityWindow:
        """Add the next window, whose targets have these NLLs [num_scored] in nats, and report it."""
        nll_sum = fsum(nlls)
        self.nlls.append(nlls)
        self._nll_sum += nll_sum
        self._num_scored += len(nlls)
        return PerplexityWindow(
            index=len(self.nlls) - 1,
            num_windows=self.num_windows,
            num_scored=len(nlls),
            nll_sum=nll_sum,
            perplexity=exp(self._nll_sum / self._num_scored),
            total_scored=self._num_scored,
        )


async def cut_texts(request: PerplexityRequest, core: TextCore) -> TextWindows:
    """Tokenize a request's texts, or render its conversations, and cut them into windows. WindowError if the method
    does not allow the context length or stride, RequestError if fields contradict each other or nothing is scored."""
    if request.messages is not None:
        return await _turn_windows(request, core)
    method, field_name = request.method, "prompt" if request.texts is None else "texts"
    context_length = resolve_context_length(method, request.context_length, core.limits.max_model_len)
    stride = resolve_stride(method, context_length, request.stride)
    documents = await _documents(request, core)
    for document in documents:
        core.limits.check_vocabulary(document.token_ids, field_name)
    if request.max_tokens is not None:
        await _truncate(documents, request, request.max_tokens, core)
    # Checked before any text is cut. This is an upper bound: a text may have fewer windows.
    core.limits.check_num_sequences(sum(len(document.token_ids) // stride + 1 for document in documents), "stride")

    def cut() -> None:
        special = {"prefix_token_id": core.info.prefix_token_id, "bos_token_id": core.info.chunk_token_id}
        for document in documents:
            document.windows = cut_windows(len(document.token_ids), method, context_length, stride, **special)

    # Cut in a thread: a long text with a short stride has tens of thousands of windows.
    await asyncio.to_thread(cut)
    texts = TextWindows(method, context_length, stride, documents)
    if not texts.windows:
        raise RequestError(
            f"no token can be scored: {field_name} has {texts.num_tokens} tokens, too few for method "
            f"{method!r} with context_length {context_length}",
            field_name,
        )
    return texts


async def _turn_windows(request: PerplexityRequest, core: TextCore) -> TextWindows:
    excluded = ["prompt", "texts", "stride", "max_tokens", "add_special_tokens"]
    conversations = await core.conversations.sequences(request, excluded)
    if "method" in request.model_fields_set and request.method != "conversation":
        raise RequestError(f"messages are scored by method 'conversation', not {request.method!r}", "method")
    context_length = resolve_context_length("conversation", request.context_length, core.limits.max_model_len)
    documents = []
    for sequence in conversations:
        core.limits.check_vocabulary(sequence["token_ids"], f"messages[{sequence['conversation']}]")
        windows = turn_windows([(turn["first"], turn["end"]) for turn in sequence["turns"]], context_length)
        roles = [turn["role"] for turn in sequence["turns"]][: len(windows)]
        documents.append(TextDocument(sequence["token_ids"], None, windows, sequence["conversation"], roles))
    texts = TextWindows("conversation", context_length, context_length, documents)
    if not texts.windows:
        raise RequestError(f"no turn begins within context_length {context_length}", "context_length")
    return texts


async def _documents(request: PerplexityRequest, core: TextCore) -> list[TextDocument]:
    if (request.prompt is None) == (request.texts is None):
        raise RequestError("give either prompt (one text) or texts (several)", "prompt")
    if isinstance(request.prompt, list):
        return [TextDocument(request.prompt, None)]
    texts = [request.prompt] if request.prompt is not None else request.texts or []
    encoded = await core.tokenizer.encode_all(texts, request.adds_special_tokens) if texts else []
    return [
        TextDocument(token_ids, text, index=index)
        for index, (token_ids, text) in enumerate(zip(encoded, texts, strict=True))
    ]


async def _truncate(documents: list[TextDocument], request: PerplexityRequest, max_tokens: int, core: TextCore) -> None:
    """Keep the first `max_tokens` tokens of all documents together, and cut each document's text to match."""
    for document in documents:
        token_ids = document.token_ids[:max_tokens]
        max_tokens -= len(token_ids)
        if len(token_ids) < len(document.token_ids) and document.text is not None:
            special = request.adds_special_tokens and token_ids[:1] == [core.info.chunk_token_id]
            document.text = await core.tokenizer.decode(token_ids[special:]) if token_ids else ""
        document.token_ids = token_ids
