"""The JSON around a token's logprob and rank, made once for each token of the vocabulary."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import orjson

from scoremode_server.scoring.token_strings import TokenStrings
from scoremode_server.vllm_patches.output_processor import INCOMPLETE

_UNKNOWN, _WHOLE, _WITHIN_CHARACTER = range(3)
"""Kinds of tokens: not in the table yet, complete characters, or ending within a character."""


class TokenPieces:
    """A table over the vocabulary: `,"5":{"logprob":`, `,"decoded_token":"a"}` and `"a"` of each token, by its id."""

    def __init__(self, strings: TokenStrings) -> None:
        self._strings = strings
        self._tables = [np.zeros(0, object) for _ in range(3)]
        self._lengths = np.zeros(0, np.int64)
        """Characters of each text."""
        self._kinds = np.zeros(0, np.uint8)

    def fill(self, token_ids: np.ndarray) -> list[int]:
        """Add these tokens [n] to the table, as all other methods expect. The places of those that end within a
        character."""
        size = int(token_ids.max(initial=0)) + 1
        if size > len(self._kinds):
            self._grow(size)
        kinds = self._kinds[token_ids]
        # Searching bytes is faster than reducing a short array.
        if _UNKNOWN in kinds.tobytes():
            self._add(np.unique(token_ids[kinds == _UNKNOWN]).tolist())
            kinds = self._kinds[token_ids]
        places: list[int] = []
        if _WITHIN_CHARACTER in kinds.tobytes():
            places = np.flatnonzero(kinds == _WITHIN_CHARACTER).tolist()
        return places

    def around(self, token_ids: np.ndarray) -> tuple[list[bytes], list[bytes]]:
        """The JSON before the logprob of each of `token_ids` [n], and after its rank with the token's own text."""
        before, after, _ = self._tables
        return before[token_ids].tolist(), after[token_ids].tolist()

    def texts(self, token_ids: np.ndarray) -> list[bytes]:
        """The text of each of `token_ids` [n] as JSON, alone."""
        texts: list[bytes] = self._tables[2][token_ids].tolist()
        return texts

    def lengths(self, token_ids: np.ndarray) -> np.ndarray:
        """Characters of the text of each of `token_ids` [n], alone."""
        lengths: np.ndarray = self._lengths[token_ids]
        return lengths

    def _grow(self, size: int) -> None:
        more = size - len(self._kinds)
        self._tables = [np.append(table, np.zeros(more, object)) for table in self._tables]
        self._lengths = np.append(self._lengths, np.zeros(more, np.int64))
        self._kinds = np.append(self._kinds, np.full(more, _UNKNOWN, np.uint8))

    def _add(self, token_ids: Sequence[int]) -> None:
        before, after, texts = self._tables
        for token_id, text in zip(token_ids, self._strings.json_of(token_ids), strict=True):
            before[token_id] = b',"%d":{"logprob":' % token_id
            after[token_id] = after_rank(text)
            texts[token_id] = text.encode()
            self._lengths[token_id] = num_characters(text)
            self._kinds[token_id] = _WITHIN_CHARACTER if text.endswith(f'{INCOMPLETE}"') else _WHOLE


@lru_cache(maxsize=2**14)
def after_rank(text: str) -> bytes:
    """The JSON after the rank of a token of this text, which is JSON."""
    return b',"decoded_token":%b}' % text.encode()


def num_characters(text: str) -> int:
    """Of a text, which is JSON."""
    return len(orjson.loads(text))
