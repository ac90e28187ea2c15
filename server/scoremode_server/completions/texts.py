"""The texts of echoed prompts. A prefix is decoded once."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from cachetools import LRUCache
from vllm.tokenizers import TokenizerLike

from scoremode_server.vllm_compat.output_processor import INCOMPLETE

STORED_CHARACTERS = 16 * 1024**2

CONTEXT_TOKENS = 8
"""Tokens before a place that decide how the text continues: up to four that can be part of a character, and one more
that decides about a space."""

_ENTRY_CHARACTERS = 256
"""Memory of a stored text in addition to its characters."""


class PromptTexts:
    """Decodes prompts as the tokenizer does, special tokens included, and stores texts of prefixes.

    `get_tokenizer` raises if the server has none.
    """

    def __init__(self, get_tokenizer: Callable[[], TokenizerLike], block_size: int) -> None:
        self._get_tokenizer = get_tokenizer
        self._block_size = block_size
        self._context_text = lru_cache(maxsize=1024)(self._decode)
        self._stored: LRUCache[bytes, str] = LRUCache(
            STORED_CHARACTERS, getsizeof=lambda text: len(text) + _ENTRY_CHARACTERS
        )

    def text(self, token_ids: Sequence[int], block_hashes: Sequence[bytes]) -> str:
        """The text of a prompt. The text of its first blocks, which have these hashes, is stored for other prompts."""
        num_blocks = len(block_hashes)
        num_stored = next((count for count in range(num_blocks, 0, -1) if block_hashes[count - 1] in self._stored), 0)
        prefix = self._stored[block_hashes[num_stored - 1]] if num_stored else ""
        end = num_blocks * self._block_size
        if num_stored < num_blocks:
            prefix = self._extended(prefix, token_ids[:end], num_stored * self._block_size)
            self._stored[block_hashes[-1]] = prefix
        return self._extended(prefix, token_ids, end)

    def _extended(self, text: str, token_ids: Sequence[int], start: int) -> str:
        """The text of all tokens, given the `text` of those before `start`."""
        context = tuple(token_ids[max(0, start - CONTEXT_TOKENS) : start])
        before = self._context_text(context)
        both = self._decode([*context, *token_ids[start:]])
        # The context's first tokens may be the end of a character.
        reads_alike = text.endswith(before.lstrip(INCOMPLETE))
        if before.endswith(INCOMPLETE) or not (reads_alike and both.startswith(before)):
            # A character, or something that the tokenizer tidies up, extends over the place. Or the context alone has
            # another text: SentencePiece's decoder drops a whole run of bytes if one of them fits no character.
            return self._decode(token_ids)
        return text + both[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._get_tokenizer().decode(list(token_ids)) if token_ids else ""
