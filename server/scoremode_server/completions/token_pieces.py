"""What stands around a token's logprob and rank in JSON, put together once for each token of the vocabulary."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import orjson

from scoremode_server.scoring.token_strings import TokenStrings


class TokenPieces:
    """A table over the vocabulary: `,"5":{"logprob":`, `,"decoded_token":"a"}` and `"a"` of each token, by its id."""

    def __init__(self, strings: TokenStrings) -> None:
        self._strings = strings
        self._tables = [np.zeros(0, object) for _ in range(3)]
        self._lengths = np.zeros(0, np.int64)
        """Characters of each text; -1 where the table does not have the token."""

    def around(self, token_ids: np.ndarray) -> tuple[list[bytes], list[bytes]]:
        """What stands before the logprob of each of `token_ids` [n], and after its rank if its text is that of the
        token alone."""
        self._fill(token_ids)
        before, after, _ = self._tables
        return before[token_ids].tolist(), after[token_ids].tolist()

    def texts(self, token_ids: np.ndarray) -> list[bytes]:
        """The text of each of `token_ids` [n] as JSON, alone."""
        self._fill(token_ids)
        texts: list[bytes] = self._tables[2][token_ids].tolist()
        return texts

    def lengths(self, token_ids: np.ndarray) -> np.ndarray:
        """Characters of the text of each of `token_ids` [n], alone."""
        self._fill(token_ids)
        lengths: np.ndarray = self._lengths[token_ids]
        return lengths

    def _fill(self, token_ids: np.ndarray) -> None:
        size = int(token_ids.max(initial=0)) + 1
        if size > len(self._lengths):
            more = size - len(self._lengths)
            self._tables = [np.append(table, np.zeros(more, object)) for table in self._tables]
            self._lengths = np.append(self._lengths, np.full(more, -1))
        missing = token_ids[self._lengths[token_ids] < 0]
        if missing.size:
            self._add(np.unique(missing).tolist())

    def _add(self, token_ids: Sequence[int]) -> None:
        before, after, texts = self._tables
        for token_id, text in zip(token_ids, self._strings.json_of(token_ids), strict=True):
            before[token_id] = b',"%d":{"logprob":' % token_id
            after[token_id] = after_rank(text)
            texts[token_id] = text.encode()
            self._lengths[token_id] = num_characters(text)


@lru_cache(maxsize=2**14)
def after_rank(text: str) -> bytes:
    """What stands after the rank of a token of this text, which is JSON."""
    return b',"decoded_token":%b}' % text.encode()


def num_characters(text: str) -> int:
    """Of a text, which is JSON."""
    return len(orjson.loads(text))
