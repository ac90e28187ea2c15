"""Block hashes: the keys of blocks of rows."""

import secrets
from functools import lru_cache
from hashlib import blake2b

import numpy as np

HASH_BYTES = 16


class BlockHasher:
    """Hashes the blocks of token sequences, each with the hash of the block before it, as vLLM's prefix cache does. A
    secret of this process is the key, so that no client can search for collisions.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._secret = secrets.token_bytes(HASH_BYTES)
        self._root = lru_cache(maxsize=256)(self._hash_identity)

    def hashes(self, token_ids: np.ndarray, identity: str) -> list[bytes]:
        """A hash per whole block of tokens [n] int32 after the first token: of all tokens up to the block's end, and of
        `identity`, everything else that the rows depend on. Empty if n is at most the block size."""
        data = token_ids.tobytes()
        step = self.block_size * token_ids.itemsize
        # The first token has no row, but all rows depend on it.
        parent = self._root(identity) + data[: token_ids.itemsize]
        hashes = []
        for start in range(token_ids.itemsize, len(data) - step + 1, step):
            parent = blake2b(data[start : start + step], key=parent, digest_size=HASH_BYTES).digest()
            hashes.append(parent)
        return hashes

    def _hash_identity(self, identity: str) -> bytes:
        return blake2b(identity.encode(), key=self._secret, digest_size=HASH_BYTES).digest()
