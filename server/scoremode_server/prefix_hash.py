"""Keys for the prefixes of token sequences, made when they are asked for: a sequence that shares nothing with another
needs the first one only."""

import secrets
from functools import lru_cache, partial
from hashlib import blake2b

import numpy as np

_SUMS = 2
"""64-bit sums in a key."""

_KEY_BYTES = 8 * _SUMS


class Chain:
    """The whole blocks of one token sequence, its first token not counted, by keys of all tokens up to each block's
    last and of an identity.

    `head` is the key of the first block. There are none where the sequence is no longer than a block.
    """

    __slots__ = ("_block_size", "_hash", "_keys", "_root", "head", "num_blocks", "token_ids")

    def __init__(self, hash: "PrefixHash", token_ids: np.ndarray, block_size: int, identity: str) -> None:
        self._hash = hash
        self._block_size = block_size
        # Shorter than an identity, and kept for as long as the chain.
        self._root = hash.root(identity)
        self._keys: list[bytes] | None = None
        self.token_ids = token_ids
        self.num_blocks = (len(token_ids) - 1) // block_size
        self.head = blake2b(token_ids[: block_size + 1].tobytes(), digest_size=_KEY_BYTES, key=self._root).digest()

    @property
    def keys(self) -> list[bytes]:
        """A key for each block; `head` is the first."""
        if self._keys is None:
            keys = self._hash.keys(self.token_ids, self._block_size, self._root)
            self._keys = [self.head, *keys[1:]][: self.num_blocks]
        return self._keys


class PrefixHash:
    """Sums of tokens times secret factors, modulo 2^64, two of them: multilinear universal hashing (Carter and Wegman
    1979).

    Two prefixes that differ have the same sum with a probability of 2^-(64 - t), where 2^t is the largest power of two
    that divides the difference of two tokens, so of 2^-45 at most for vocabularies below 2^20; and the same two sums
    with one of 2^-90. The factors, and what stands for an identity, are drawn anew for each process, so nobody can
    choose tokens that collide.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._factors = np.empty((_SUMS, 0), np.int64)
        self.root = lru_cache(maxsize=256)(partial(_root, secrets.token_bytes(_KEY_BYTES)))

    def keys(self, token_ids: np.ndarray, block_size: int, root: bytes) -> list[bytes]:
        """A key for each whole block of tokens [n] int32 but the first token: of all tokens up to the block's last, and
        of the identity that `root` stands for."""
        num_tokens = (len(token_ids) - 1) // block_size * block_size + 1
        # A token of 0 counts, lest a prefix be the same with and without it.
        terms = self._first_factors(num_tokens) * (token_ids[:num_tokens] + 1)
        sums = terms.cumsum(axis=1)[:, block_size::block_size]
        keys = (sums.T + np.frombuffer(root, np.int64)).tobytes()
        return [keys[start : start + _KEY_BYTES] for start in range(0, len(keys), _KEY_BYTES)]

    def _first_factors(self, count: int) -> np.ndarray:
        """[sums, count], always the same."""
        missing = count - self._factors.shape[1]
        if missing > 0:
            more = self._random.integers(-(2**63), 2**63, size=(_SUMS, count + missing))
            self._factors = np.concatenate([self._factors, more], axis=1)
        return self._factors[:, :count]


def _root(secret: bytes, identity: str) -> bytes:
    """What stands for an identity: it is added to the sums, and keys the first block's hash."""
    return blake2b(identity.encode(), digest_size=_KEY_BYTES, key=secret).digest()
