"""The texts of tokens, decoded once per token of the vocabulary."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import orjson
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from scoremode_server.vllm_patches.output_processor import INCOMPLETE, decode_within_character

CONTEXT = 4
"""Tokens before a position in which vLLM looks for the start of a character, without a prompt's first token."""


class TokenStrings:
    """A table of each token's text alone, also as JSON. `get_tokenizer` raises if the server has no tokenizer."""

    def __init__(self, get_tokenizer: Callable[[], TokenizerLike]) -> None:
        self._get_tokenizer = get_tokenizer
        self._texts: dict[int, str] = {}
        self._json: dict[int, str] = {}
        self._first: dict[int, str] = {}
        self._completed = lru_cache(maxsize=2**16)(self._complete)

    def fill_vocabulary(self) -> None:
        """Fill the whole table, which takes some 3 µs per token."""
        self.fill(self._get_tokenizer().get_vocab().values())

    def fill(self, token_ids: Iterable[int]) -> None:
        wanted = set(token_ids)
        if wanted <= self._json.keys():
            return
        # A difference of sets would go through the whole table.
        missing = [token_id for token_id in wanted if token_id not in self._json]
        for token_id, text in zip(missing, convert_ids_list_to_tokens(self._get_tokenizer(), missing), strict=True):
            self._texts[token_id] = text
            self._json[token_id] = orjson.dumps(text).decode()

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token alone."""
        self.fill(token_ids)
        return [self._texts[token_id] for token_id in token_ids]

    def json_of(self, token_ids: Sequence[int]) -> list[str]:
        self.fill(token_ids)
        return [self._json[token_id] for token_id in token_ids]

    def json_within(
        self, prompt: Sequence[int], start: int, ids: np.ndarray, places: Sequence[int]
    ) -> list[tuple[int, str]]:
        """For ids [rows, columns] at positions from `start` of a prompt: the places of tokens that end within a
        character, and as JSON the text that each completes with the tokens before it, which may be empty."""
        num_columns = ids.shape[1]
        contexts = {row: self._context(prompt, start + row) for row in {place // num_columns for place in places}}
        # After a complete character there is nothing to complete.
        return [
            (place, self._completed(token_id, context) if (context := contexts[place // num_columns]) else '""')
            for place, token_id in zip(places, ids.ravel()[places].tolist(), strict=True)
        ]

    def _context(self, prompt: Sequence[int], position: int) -> tuple[int, ...]:
        """The tokens before a position that may be part of its character."""
        context = prompt[max(1, position - CONTEXT) : position]
        for index in range(len(context), 0, -1):
            (text,) = self.texts_of(context[index - 1 : index])
            if text and not text.endswith(INCOMPLETE):
                return tuple(context[index:])
        return tuple(context)

    def first_of_a_prompt(self, token_id: int) -> str:
        """The text as JSON of a prompt's first token, which vLLM decodes as the start of a text."""
        if token_id not in self._first:
            self._first[token_id] = orjson.dumps(self._get_tokenizer().decode(token_id)).decode()
        return self._first[token_id]

    def _complete(self, token_id: int, context: tuple[int, ...]) -> str:
        """The text as JSON of a token that ends within a character."""
        return orjson.dumps(decode_within_character(self._get_tokenizer(), token_id, context)).decode()
