"""Keys for the prefixes of token sequences, all of a sequence's in a few steps of numpy."""

from functools import lru_cache
from hashlib import blake2b

import numpy as np

_SUMS = 2
"""64-bit sums in a key."""

_KEY_BYTES = 8 * _SUMS


class PrefixHash:
    """Sums of tokens times secret factors, modulo 2^64, two of them: multilinear universal hashing (Carter and Wegman
    1979).

    Two prefixes that differ have the same sum with a probability of 2^-(64 - t), where 2^t is the largest power of two
    that divides the difference of two tokens, so of 2^-45 at most for vocabularies below 2^20; and the same two sums
    with one of 2^-90. The factors are drawn anew for each process, so nobody can choose tokens that collide.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._factors = np.empty((_SUMS, 0), np.uint64)
        self._root = lru_cache(maxsize=256)(_root)

    def keys(self, token_ids: np.ndarray, block_size: int, identity: str) -> list[bytes]:
        """A key for each whole block of tokens [n] int32 but the first token: of all tokens up to the block's last, and
        of `identity`."""
        num_blocks = (len(token_ids) - 1) // block_size
        if num_blocks < 1:
            return []
        num_tokens = num_blocks * block_size + 1
        # A token of 0 counts, lest a prefix be the same with and without it.
        counted = token_ids[:num_tokens].astype(np.uint64) + np.uint64(1)
        sums = np.cumsum(counted * self._first_factors(num_tokens), axis=1)[:, block_size::block_size]
        keys = (sums.T + self._root(identity)).tobytes()
        return [keys[start : start + _KEY_BYTES] for start in range(0, len(keys), _KEY_BYTES)]

    def _first_factors(self, count: int) -> np.ndarray:
        """[sums, count], always the same."""
        missing = count - self._factors.shape[1]
        if missing > 0:
            more = self._random.integers(2**64, size=(_SUMS, count + missing), dtype=np.uint64)
            self._factors = np.concatenate([self._factors, more], axis=1)
        return self._factors[:, :count]


def _root(identity: str) -> np.ndarray:
    """What an identity adds to the sums."""
    return np.frombuffer(blake2b(identity.encode(), digest_size=_KEY_BYTES).digest(), np.uint64)
