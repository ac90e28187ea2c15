"""The JSON around a token's logprob and rank, made once for each token of the vocabulary."""

from functools import lru_cache

import numpy as np
import orjson

from scoremode_server.scoring.token_strings import TokenStrings
from scoremode_server.vllm_patches.output_processor import INCOMPLETE

_UNKNOWN, _WHOLE, _WITHIN_CHARACTER = range(3)
"""Kinds of tokens: not in the table yet, complete characters, or ending within a character."""


class TokenPieces:
    """A table over the vocabulary, by token id, with the tokens that `fill` added.

    Attributes:
        before: what is before a token's logprob: `,"5":{"logprob":`.
        after: what is after its rank, with its own text: `,"decoded_token":"a"}`.
        texts: the text alone: `"a"`.
        lengths: characters of the text.
    """

    def __init__(self, strings: TokenStrings) -> None:
        self._strings = strings
        self.before, self.after, self.texts = (np.zeros(0, object) for _ in range(3))
        self.lengths = np.zeros(0, np.int64)
        self._kinds = np.zeros(0, np.uint8)

    def fill(self, token_ids: np.ndarray) -> list[int]:
        """Add these tokens [n]. Returns the places of those that end within a character."""
        size = int(token_ids.max(initial=0)) + 1
        if size > len(self._kinds):
            for table in (self.before, self.after, self.texts, self.lengths, self._kinds):
                table.resize(size, refcheck=False)
        kinds = self._kinds[token_ids]
        # Searching bytes is faster than reducing a short array.
        if _UNKNOWN in kinds.tobytes():
            self._add(np.unique(token_ids[kinds == _UNKNOWN]).tolist())
            kinds = self._kinds[token_ids]
        places: list[int] = []
        if _WITHIN_CHARACTER in kinds.tobytes():
            places = np.flatnonzero(kinds == _WITHIN_CHARACTER).tolist()
        return places

    def _add(self, token_ids: list[int]) -> None:
        for token_id, text in zip(token_ids, self._strings.texts_of(token_ids), strict=True):
            self.before[token_id] = b',"%d":{"logprob":' % token_id
            self.texts[token_id] = orjson.dumps(text)
            self.after[token_id] = after_rank(text)
            self.lengths[token_id] = len(text)
            self._kinds[token_id] = _WITHIN_CHARACTER if text.endswith(INCOMPLETE) else _WHOLE


@lru_cache(maxsize=2**14)
def after_rank(text: str) -> bytes:
    """The JSON after the rank of a token of this text."""
    return b',"decoded_token":%b}' % orjson.dumps(text)
