"""Encodes and decodes text with the server's tokenizer. Texts of single tokens and of prefixes of prompts are
stored."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, cast

import numpy as np
from cachetools import LRUCache
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.renderers import TokenizeParams
from vllm.renderers.base import BaseRenderer
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from scoremode_server.errors import RequestError
from scoremode_server.vllm_compat.output_processor import INCOMPLETE, decode_within_character

CHARACTER_CONTEXT = 4
"""How many tokens before a position vLLM searches for the start of a character. It leaves out a prompt's first
token."""

STORED_CHARACTERS = 16 * 1024**2

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
"""The byte for which each character of a byte-level BPE token stands."""
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""SentencePiece's token for a single byte."""

TEXT_CONTEXT = 8
"""How many tokens before a position are enough to decode the tokens after it: up to four can be part of a character,
and one more decides about a space."""


class Tokenizer:
    """Encodes and decodes in the threads of vLLM's renderer."""

    def __init__(self, renderer: BaseRenderer) -> None:
        self._renderer = renderer
        self.strings = TokenStrings(self._tokenizer)

    async def encode(self, text: str | list[int], add_special_tokens: bool) -> list[int]:
        """Encode a text of any length. Token ids are returned as they are."""
        if not isinstance(text, str):
            return text
        (token_ids,) = await self.encode_all([text], add_special_tokens)
        return token_ids

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        self._tokenizer()
        params = TokenizeParams(max_total_tokens=None, add_special_tokens=add_special_tokens)
        encoded = await self._renderer.tokenize_prompts_async([TextPrompt(prompt=text) for text in texts], params)
        return [list(prompt["prompt_token_ids"]) for prompt in encoded]

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids, special tokens included."""
        self._tokenizer()
        params = TokenizeParams(max_total_tokens=None, needs_detokenization=True)
        decoded = await self._renderer.tokenize_prompt_async(TokensPrompt(prompt_token_ids=list(token_ids)), params)
        return str(decoded["prompt"])

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        if self._renderer.tokenizer is None:
            raise RequestError("this server has no tokenizer, so it cannot decode tokens", "token_ids")
        return self.strings.texts_of(token_ids)

    def bytes_of(self, token_ids: Sequence[int], texts: Sequence[str]) -> list[str | None]:
        """The bytes, in hexadecimal, of each token whose text alone has an incomplete character. None for other tokens,
        and for tokens whose bytes are not known."""
        pieces = self._tokenizer().convert_ids_to_tokens(list(token_ids))
        return [_hexadecimal(piece) if INCOMPLETE in text else None for piece, text in zip(pieces, texts, strict=True)]

    def special_token_id(self, name: Literal["bos", "eos"]) -> int | None:
        return cast(int | None, getattr(self._renderer.tokenizer, f"{name}_token_id", None))

    async def adds_bos(self) -> bool:
        """Whether the tokenizer puts BOS before a text."""
        bos = self.special_token_id("bos")
        return bos is not None and (await self.encode("", add_special_tokens=True))[:1] == [bos]

    def _tokenizer(self) -> TokenizerLike:
        tokenizer = self._renderer.tokenizer
        if tokenizer is None:
            raise RequestError("this server has no tokenizer: send token ids, not text", "prompt")
        return tokenizer


def _hexadecimal(piece: str | bytes) -> str | None:
    """The bytes, in hexadecimal, of a vocabulary entry: of byte-level BPE, SentencePiece's single byte, or `bytes`.
    None for other entries."""
    if isinstance(piece, bytes):
        return piece.hex()
    if match := _FALLBACK.fullmatch(piece):
        return match[1].lower()
    return bytes(_BYTES[character] for character in piece).hex() if set(piece) <= _BYTES.keys() else None


def as_prompts(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | list[int]]:
    """Convert OpenAI's four shapes of a prompt to a list of texts or token lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty: there is no token to score", "prompt")
    items: list[Any] = list(prompt)
    return [items] if isinstance(items[0], int) else items


class TokenStrings:
    """Stores the text of each token, decoded alone. `get_tokenizer` raises if the server has no tokenizer.

    Attributes:
        first_of_a_prompt: a function from a prompt's first token to its text, which vLLM decodes as the start of a
            text.
    """

    def __init__(self, get_tokenizer: Callable[[], TokenizerLike]) -> None:
        self._get_tokenizer = get_tokenizer
        self._texts: dict[int, str] = {}
        self.first_of_a_prompt = cache(lambda token_id: get_tokenizer().decode(token_id))
        self._completed = lru_cache(maxsize=2**16)(
            lambda token_id, context: decode_within_character(get_tokenizer(), token_id, context)
        )

    def fill_vocabulary(self) -> None:
        """Fill the whole table, which takes some 3 µs per token."""
        self._fill(self._get_tokenizer().get_vocab().values())

    def _fill(self, token_ids: Iterable[int]) -> None:
        # A difference of sets would iterate over the whole table.
        missing = [token_id for token_id in set(token_ids) if token_id not in self._texts]
        if missing:
            self._texts.update(zip(missing, convert_ids_list_to_tokens(self._get_tokenizer(), missing), strict=True))

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token alone."""
        self._fill(token_ids)
        return [self._texts[token_id] for token_id in token_ids]

    def texts_within(
        self, prompt: Sequence[int], start: int, ids: np.ndarray, places: Sequence[int]
    ) -> list[tuple[int, str]]:
        """Decode tokens that end within a character, together with the prompt's tokens before them. Row i of `ids`
        [rows, columns] has tokens for position `start` + i of the prompt, and `places` are indices into `ids.ravel()`.
        Returns each place with its text, which may be empty."""
        num_columns = ids.shape[1]
        contexts = {row: self._context(prompt, start + row) for row in {place // num_columns for place in places}}
        # After a complete character the token has no text of its own.
        return [
            (place, self._completed(token_id, context) if (context := contexts[place // num_columns]) else "")
            for place, token_id in zip(places, ids.ravel()[places].tolist(), strict=True)
        ]

    def _context(self, prompt: Sequence[int], position: int) -> tuple[int, ...]:
        """The tokens before a position that may be part of the same character."""
        context = prompt[max(1, position - CHARACTER_CONTEXT) : position]
        for index in range(len(context), 0, -1):
            (text,) = self.texts_of(context[index - 1 : index])
            if text and not text.endswith(INCOMPLETE):
                return tuple(context[index:])
        return tuple(context)


class PromptTexts:
    """Decodes prompts as the tokenizer does, special tokens included, and stores texts of prefixes.

    `get_tokenizer` raises if the server has no tokenizer.
    """

    def __init__(self, get_tokenizer: Callable[[], TokenizerLike], block_size: int) -> None:
        self._get_tokenizer = get_tokenizer
        self._block_size = block_size
        self._context_text = lru_cache(maxsize=1024)(self._decode)
        # An entry has some 256 bytes in addition to its text.
        self._stored: LRUCache[bytes, str] = LRUCache(STORED_CHARACTERS, getsizeof=lambda text: len(text) + 256)

    def text(self, token_ids: Sequence[int], block_hashes: Sequence[bytes]) -> str:
        """Decode a prompt. The text of its first blocks, whose hashes are `block_hashes`, is stored for other
        prompts."""
        num_blocks = len(block_hashes)
        num_stored = next((count for count in range(num_blocks, 0, -1) if block_hashes[count - 1] in self._stored), 0)
        prefix = self._stored[block_hashes[num_stored - 1]] if num_stored else ""
        end = num_blocks * self._block_size
        if num_stored < num_blocks:
            prefix = self._extended(prefix, token_ids[:end], num_stored * self._block_size)
            self._stored[block_hashes[-1]] = prefix
        return self._extended(prefix, token_ids, end)

    def _extended(self, text: str, token_ids: Sequence[int], start: int) -> str:
        """The text of all tokens, given the `text` of the tokens before `start`."""
        context = tuple(token_ids[max(0, start - TEXT_CONTEXT) : start])
        before = self._context_text(context)
        both = self._decode([*context, *token_ids[start:]])
        # The context may begin within a character, and then decodes to U+FFFD at its start.
        reads_alike = text.endswith(before.lstrip(INCOMPLETE))
        if before.endswith(INCOMPLETE) or not (reads_alike and both.startswith(before)):
            # A character, or something that the tokenizer cleans up, spans the cut. Or the context alone has another
            # text: SentencePiece's decoder drops a whole run of bytes if one of them fits no character.
            return self._decode(token_ids)
        return text + both[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._get_tokenizer().decode(list(token_ids)) if token_ids else ""
