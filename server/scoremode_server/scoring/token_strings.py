"""Tokens as text, decoded once for each token of the vocabulary and never for a position."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import orjson
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from scoremode_server.vllm_patches.output_processor import INCOMPLETE, decode_within_character

CONTEXT = 4
"""Tokens that vLLM looks back for the start of a character; a prompt's first is never among them."""


class TokenStrings:
    """A table over the vocabulary: each token's text, alone, and that text as JSON.

    `get_tokenizer` raises where the server runs without one.
    """

    def __init__(self, get_tokenizer: Callable[[], TokenizerLike]) -> None:
        self._get_tokenizer = get_tokenizer
        self._texts: dict[int, str] = {}
        self._json: dict[int, str] = {}
        self._incomplete: set[int] = set()
        self._first: dict[int, str] = {}
        self._completed = lru_cache(maxsize=2**16)(self._complete)

    def fill_vocabulary(self) -> None:
        """Fill the whole table, which takes some 3 µs a token: at the start, no request waits for it."""
        self.fill(self._get_tokenizer().get_vocab().values())

    def fill(self, token_ids: Iterable[int]) -> None:
        """Make sure that the table has these tokens."""
        wanted = set(token_ids)
        if wanted <= self._json.keys():
            return
        # Not a difference of sets, which would walk through the whole table.
        missing = [token_id for token_id in wanted if token_id not in self._json]
        for token_id, text in zip(missing, convert_ids_list_to_tokens(self._get_tokenizer(), missing), strict=True):
            self._texts[token_id] = text
            self._json[token_id] = orjson.dumps(text).decode()
            if text.endswith(INCOMPLETE):
                self._incomplete.add(token_id)

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, alone."""
        self.fill(token_ids)
        return [self._texts[token_id] for token_id in token_ids]

    def json_at(self, prompt: Sequence[int], start: int, ids: np.ndarray) -> list[str]:
        """Texts as JSON of ids [rows, columns], row after row: tokens that may stand at positions `start` and on of a
        prompt.

        A token that ends within a character has the text that it completes with the tokens before it, or none.
        """
        token_ids = ids.ravel().tolist()
        texts = self._json_of(token_ids)
        if not self._incomplete.isdisjoint(token_ids):
            for place, token_id in enumerate(token_ids):
                if token_id in self._incomplete:
                    position = start + place // ids.shape[1]
                    texts[place] = self._completed(token_id, tuple(prompt[max(1, position - CONTEXT) : position]))
        return texts

    def _json_of(self, token_ids: Sequence[int]) -> list[str]:
        try:
            return [self._json[token_id] for token_id in token_ids]
        except KeyError:
            # Seldom: looking for missing ones first would take longer than this.
            self.fill(token_ids)
            return [self._json[token_id] for token_id in token_ids]

    def first_of_a_prompt(self, token_id: int) -> str:
        """Text as JSON of a prompt's first token, which vLLM decodes by itself, as a text would start with it."""
        if token_id not in self._first:
            self._first[token_id] = orjson.dumps(self._get_tokenizer().decode(token_id)).decode()
        return self._first[token_id]

    def _complete(self, token_id: int, context: tuple[int, ...]) -> str:
        """Text as JSON of a token that ends within a character."""
        return orjson.dumps(decode_within_character(self._get_tokenizer(), token_id, context)).decode()
