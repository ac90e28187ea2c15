"""The text of a prompt that is echoed, without decoding a prefix again that was decoded before."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from cachetools import LRUCache
from vllm.tokenizers import TokenizerLike

from scoremode_server.vllm_patches.output_processor import INCOMPLETE

KEPT_CHARACTERS = 16 * 1024**2

CONTEXT_TOKENS = 8
"""Tokens before a place that decide how the text goes on there: a character has at most four bytes, so that four tokens
can be part of it, and one token before decides about a space."""

_ENTRY_CHARACTERS = 256
"""What a kept text costs beside its characters."""


class PromptTexts:
    """Decodes prompts as the tokenizer does, special tokens included; texts of prefixes are kept, and the least
    recently used are dropped first. docs/decisions.md has the rates with and without.

    `get_tokenizer` raises where the server runs without one.
    """

    def __init__(self, get_tokenizer: Callable[[], TokenizerLike], block_size: int) -> None:
        self._get_tokenizer = get_tokenizer
        self._block_size = block_size
        self._context_text = lru_cache(maxsize=1024)(self._decode)
        self._kept: LRUCache[bytes, str] = LRUCache(
            KEPT_CHARACTERS, getsizeof=lambda text: len(text) + _ENTRY_CHARACTERS
        )

    def text(self, token_ids: Sequence[int], block_hashes: Sequence[bytes]) -> str:
        """The text of a prompt; that of its first blocks, of which the hashes are given, is kept for prompts that begin
        with the same ones."""
        if not block_hashes:
            return self._decode(token_ids)
        num_blocks = len(block_hashes)
        num_kept = next((count for count in range(num_blocks, 0, -1) if block_hashes[count - 1] in self._kept), 0)
        prefix = self._kept[block_hashes[num_kept - 1]] if num_kept else ""
        end = num_blocks * self._block_size
        if num_kept < num_blocks:
            prefix = self._extended(prefix, token_ids[:end], num_kept * self._block_size)
            self._keep(block_hashes[-1], prefix)
        return self._extended(prefix, token_ids, end)

    def _extended(self, text: str, token_ids: Sequence[int], start: int) -> str:
        """The text of all tokens, where `text` is that of those before `start`."""
        context = tuple(token_ids[max(0, start - CONTEXT_TOKENS) : start])
        before = self._context_text(context)
        both = self._decode([*context, *token_ids[start:]])
        # The context's first tokens may be the end of a character.
        reads_alike = text.endswith(before.lstrip(INCOMPLETE))
        if before.endswith(INCOMPLETE) or not (reads_alike and both.startswith(before)):
            # A character, or something that the tokenizer tidies up, lies across the place. Or the context reads
            # otherwise after what comes before it: SentencePiece's decoder gives up on a whole run of bytes, however
            # long, if one of them fits no character.
            return self._decode(token_ids)
        return text + both[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._get_tokenizer().decode(list(token_ids)) if token_ids else ""

    def _keep(self, block_hash: bytes, text: str) -> None:
        if len(text) + _ENTRY_CHARACTERS <= self._kept.maxsize:
            self._kept[block_hash] = text
