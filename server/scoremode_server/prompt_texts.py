"""The text of a prompt that is echoed, without decoding a prefix again that was decoded before."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache

from vllm.tokenizers import TokenizerLike

from scoremode_server.engine.packed_logprobs import INCOMPLETE

KEPT_CHARACTERS = 16 * 1024**2

CONTEXT_TOKENS = 16
"""Tokens before a place that decide how the text goes on there."""

_ENTRY_CHARACTERS = 256
"""What a kept text costs beside its characters."""


class PromptTexts:
    """Decodes prompts as the tokenizer does, special tokens included; texts of prefixes are kept for a while.

    `get_tokenizer` raises where the server runs without one.
    """

    def __init__(self, get_tokenizer: Callable[[], TokenizerLike]) -> None:
        self._get_tokenizer = get_tokenizer
        self._context_text = lru_cache(maxsize=1024)(self._decode)
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._num_characters = 0

    def text(self, token_ids: Sequence[int], blocks: Sequence[bytes], block_size: int) -> str:
        """The text of a prompt. `blocks` are keys of its first blocks of `block_size` tokens, each a key of all tokens
        up to the block's end; texts are kept for prompts that begin with the same blocks.
        """
        if not blocks:
            return self._decode(token_ids)
        num_kept = next((count for count in range(len(blocks), 0, -1) if blocks[count - 1] in self._kept), 0)
        prefix = self._kept[blocks[num_kept - 1]] if num_kept else ""
        end = len(blocks) * block_size
        if num_kept < len(blocks):
            prefix = self._extended(prefix, token_ids[:end], num_kept * block_size)
        self._keep(blocks[-1], prefix)
        return self._extended(prefix, token_ids, end)

    def _extended(self, text: str, token_ids: Sequence[int], start: int) -> str:
        """The text of all tokens, where `text` is that of those before `start`."""
        context = tuple(token_ids[max(0, start - CONTEXT_TOKENS) : start])
        before = self._context_text(context)
        both = self._decode([*context, *token_ids[start:]])
        if before.endswith(INCOMPLETE) or not both.startswith(before):
            # A character, or something that the tokenizer tidies up, lies across the place.
            return self._decode(token_ids)
        return text + both[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._get_tokenizer().decode(list(token_ids)) if token_ids else ""

    def _keep(self, key: bytes, text: str) -> None:
        """Make this the most recently used text; it is the same whenever it is kept."""
        if key not in self._kept:
            self._num_characters += len(text) + _ENTRY_CHARACTERS
            self._kept[key] = text
        self._kept.move_to_end(key)
        while self._num_characters > KEPT_CHARACTERS:
            self._num_characters -= len(self._kept.popitem(last=False)[1]) + _ENTRY_CHARACTERS
