"""Prompt logprobs kept as the arrays in which they arrive from the engine.

vLLM turns them into Python objects token by token, as dictionaries or as flat lists, on the API server's one event
loop; at 100,000 tokens a second that is most of its work. There is no extension point before that step, so this is a
patch of two methods of vLLM's `LogprobsProcessor`: requests that carry the mark `PACKED` keep arrays, and their tokens
have no text; all others take vLLM's own way.

A third patch is for the one token that such a request may generate: vLLM decodes the whole prompt to find the text that
the token adds, and here only the prompt's end.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, uses_fast_detokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

PACKED = "scoremode_packed"
"""The mark in `SamplingParams.extra_args`."""

DECODED_TOKENS = 16
"""Tokens at a prompt's end that the text of the next token may depend on. A character has at most four bytes, so that
four tokens can be part of it; vLLM's detokenizer for slow tokenizers looks at six."""

INCOMPLETE = "�"
"""What the bytes of a part of a character decode to."""


class PackedLogprobs:
    """Prompt logprobs of one request: rows for its tokens but the first, columns for the actual token and the top k."""

    def __init__(self) -> None:
        self.blocks: Sequence[bytes] = ()
        """Keys of the first rows in the logprob cache, in blocks of `block_size`; none while nobody has asked for them
        again."""
        self.num_cached_blocks = 0
        """How many of them, from the first on, were there before."""
        self.block_size = 1
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    @classmethod
    def of(cls, token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> "PackedLogprobs":
        """Of arrays shaped as `arrays` returns them."""
        packed = cls()
        packed._parts.append((token_ids, logprobs, ranks))
        return packed

    def append(self, tensors: LogprobsTensors) -> None:
        """Take the rows of one more part of the prompt."""
        token_ids, logprobs, ranks, *_ = tensors
        self._parts.append((token_ids.numpy(), logprobs.numpy(), ranks.numpy()))

    def arrays(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(token ids [rows, width], logprobs [rows, width] float32, ranks of the actual tokens [rows])."""
        if not self._parts:
            return np.empty((0, width), np.int32), np.empty((0, width), np.float32), np.empty(0, np.int32)
        token_ids, logprobs, ranks = self._parts[0] if len(self._parts) == 1 else self._joined()
        return token_ids.astype(np.int32, copy=False), logprobs, ranks.astype(np.int32, copy=False)

    def _joined(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        token_ids, logprobs, ranks = zip(*self._parts, strict=True)
        return np.concatenate(token_ids), np.concatenate(logprobs), np.concatenate(ranks)


def is_packed(params: SamplingParams | None) -> bool:
    """Whether a request carries the mark."""
    return params is not None and bool(params.extra_args) and PACKED in params.extra_args


def _with_end_of_prompt(tokenizer: TokenizerLike, request: EngineCoreRequest) -> EngineCoreRequest:
    """The request with the end of its prompt only, if what follows has the same text behind it as behind all.

    Where a prompt ends within a character, vLLM's detokenizer gives the whole prompt as the next token's text.
    """
    if request.prompt_token_ids is None or len(request.prompt_token_ids) <= DECODED_TOKENS:
        return request
    end = request.prompt_token_ids[-DECODED_TOKENS:]
    # Where vLLM's detokenizer goes past transformers, so does this: there is nothing that it would add.
    decode = tokenizer._tokenizer.decode if uses_fast_detokenizer(tokenizer) else tokenizer.decode
    text = decode(end, skip_special_tokens=request.sampling_params.skip_special_tokens)
    if not text or text.endswith(INCOMPLETE):
        return request
    shorter = copy(request)
    shorter.prompt_token_ids = end
    return shorter


def install() -> None:
    """Patch vLLM in this process; once is enough, and more does no harm."""
    if getattr(LogprobsProcessor, "_scoremode_patched", False):
        return
    make, update = LogprobsProcessor.from_new_request.__func__, LogprobsProcessor._update_prompt_logprobs
    make_detokenizer = IncrementalDetokenizer.from_new_request.__func__

    def from_new_request(
        cls: type[LogprobsProcessor], tokenizer: TokenizerLike | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        if not is_packed(request.sampling_params):
            return make(cls, tokenizer, request)
        processor = make(cls, None, request)
        processor.prompt_logprobs = PackedLogprobs()
        return processor

    def update_prompt_logprobs(self: Any, tensors: LogprobsTensors) -> None:
        if isinstance(self.prompt_logprobs, PackedLogprobs):
            self.prompt_logprobs.append(tensors)
        else:
            update(self, tensors)

    def detokenizer_from_new_request(
        cls: type[IncrementalDetokenizer], tokenizer: TokenizerLike | None, request: EngineCoreRequest
    ) -> IncrementalDetokenizer:
        if tokenizer is not None and is_packed(request.sampling_params):
            request = _with_end_of_prompt(tokenizer, request)
        return make_detokenizer(cls, tokenizer, request)

    LogprobsProcessor.from_new_request = classmethod(from_new_request)
    LogprobsProcessor._update_prompt_logprobs = update_prompt_logprobs
    IncrementalDetokenizer.from_new_request = classmethod(detokenizer_from_new_request)
    LogprobsProcessor._scoremode_patched = True
