"""The logprobs of a completion, written as JSON from arrays: equal to what vLLM writes from objects.

What was written of cached blocks is kept for a while, under their block hashes: prefixes that come again are most of
what a benchmark asks for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from cachetools import LRUCache
from vllm.entrypoints.generate.base.serving import format_token_id_placeholder

from scoremode_server.rows import Columns, Rows, json_logprobs
from scoremode_server.scoring.token_strings import TokenStrings

KEPT_BYTES = 64 * 1024**2

_ENTRY_BYTES = 512
"""What a kept piece costs beside its text: objects, the key."""


@dataclass(frozen=True, slots=True)
class Style:
    """How a request wants its logprobs."""

    num_top: int
    """Alternatives in OpenAI's `top_logprobs`."""
    as_token_ids: bool
    """`token_id:5` in place of a token's text."""


@dataclass(frozen=True, slots=True)
class Written:
    """Some rows as JSON, without the brackets around them."""

    full: bytes
    """vLLM's `prompt_logprobs`: at each position, tokens by id, with rank and text."""
    names: bytes
    logprobs: bytes
    top: bytes
    lengths: np.ndarray
    """Characters of each name, [rows]."""

    @property
    def num_bytes(self) -> int:
        """Memory that this takes."""
        return len(self.full) + len(self.names) + len(self.logprobs) + len(self.top) + self.lengths.nbytes


Key = tuple[bytes, int, Style]
"""The hash of the last block of a piece's rows, their number of columns, how they are written."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A piece of a prefix, and the key of the piece that ends where it starts: none, for the first."""

    written: Written
    before: Key | None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes to keep."""
        return self.written.num_bytes + _ENTRY_BYTES


class LogprobsWriter:
    """Writes the rows of prompts and of sampled tokens. Not for several threads at once."""

    def __init__(self, strings: TokenStrings, block_size: int) -> None:
        self._strings = strings
        self._block_size = block_size
        self._kept: LRUCache[Key, Kept] = LRUCache(KEPT_BYTES, getsizeof=lambda kept: kept.num_bytes)

    def prompt(
        self, token_ids: Sequence[int], rows: Rows, block_hashes: Sequence[bytes], num_cached_blocks: int, style: Style
    ) -> list[Written]:
        """Logprobs of a prompt of n tokens, in pieces: the first token, which has none, and the n - 1 rows after it.

        `block_hashes` are of the rows' whole blocks. Where the first `num_cached_blocks` of them, at least one, were
        computed for an earlier request, pieces are taken from those that are kept, and new ones kept.
        """
        num_columns = rows.num_columns
        kept_blocks = block_hashes if num_cached_blocks else ()
        keys: list[Key] = [(block_hash, num_columns, style) for block_hash in kept_blocks]
        pieces, num_found = self._find(keys)
        # A piece ends where the cached rows do: there this prompt parted from another, and the next may as well.
        counts = [max(num_found, num_cached_blocks), len(keys)]
        ends = [*(count * self._block_size for count in counts), len(rows)]
        columns = rows.token_ids, rows.logprobs, rows.ranks
        *new, tail = self._write(token_ids, columns, num_found * self._block_size, ends, style)
        before = keys[num_found - 1] if num_found else None
        for count, written in zip(counts, new, strict=True):
            if written is not None:
                self._keep(keys[count - 1], Kept(written, before))
                before = keys[count - 1]
        return [self._first(token_ids[0], style), *pieces, *filter(None, (*new, tail))]

    def sampled(self, columns: Columns, style: Style) -> Written:
        """Logprobs of a token that was sampled after a prompt: one row.

        vLLM completes characters with tokens of the same part only, so the prompt does not matter to it.
        """
        (written,) = self._write((), columns, 0, (1,), style)
        assert written is not None
        return written

    def _first(self, token_id: int, style: Style) -> Written:
        name = _placeholder(token_id) if style.as_token_ids else self._strings.first_of_a_prompt(token_id)
        return Written(b"null", name.encode(), b"null", b"null", _lengths([name]))

    def _find(self, keys: Sequence[Key]) -> tuple[list[Written], int]:
        """The kept pieces that make up the most of a sequence's first blocks, and how many blocks those are."""
        for num_found in range(len(keys), 0, -1):
            pieces: list[Written] = []
            key: Key | None = keys[num_found - 1]
            while key is not None and (kept := self._kept.get(key)) is not None:
                pieces.append(kept.written)
                key = kept.before
            if key is None:
                return pieces[::-1], num_found
        return [], 0

    def _keep(self, key: Key, kept: Kept) -> None:
        if kept.num_bytes <= self._kept.maxsize:
            self._kept[key] = kept

    def _write(
        self, token_ids: Sequence[int], columns: Columns, start: int, ends: Sequence[int], style: Style
    ) -> list[Written | None]:
        """The rows from `start` on, in a piece up to each of `ends`; None for a piece of none.

        Where the actual token is among the top k it stands once, with the rank that it has there.
        """
        ids, logprobs, ranks = (array[start:] for array in columns)
        num_columns = ids.shape[1]
        tokens = ids.ravel().tolist()
        texts = self._strings.json_at(token_ids, start + 1, ids)
        names = [_placeholder(token_id) for token_id in tokens] if style.as_token_ids else texts
        values = _as_json(json_logprobs(logprobs))
        repeats = _repeats(ids)
        full = [
            f'"{token_id}":{{"logprob":{value},"rank":{rank},"decoded_token":{text}}}'
            for token_id, value, rank, text in zip(
                tokens, values, _all_ranks(ranks, num_columns, repeats), texts, strict=True
            )
        ]
        top = [f"{name}:{value}" for name, value in zip(names, values, strict=True)]
        for place in repeats:
            full[place] = top[place] = ""
        parts = [
            slice((first - start) * num_columns, (end - start) * num_columns)
            for first, end in zip((start, *ends), ends, strict=False)
        ]
        return [
            Written(
                _objects(full[part], num_columns, num_columns),
                ",".join(names[part][::num_columns]).encode(),
                ",".join(values[part][::num_columns]).encode(),
                _objects(top[part], num_columns, style.num_top + 1),
                _lengths(names[part][::num_columns]),
            )
            if part.stop > part.start
            else None
            for part in parts
        ]


def openai_logprobs(pieces: Sequence[Written]) -> bytes:
    """OpenAI's `logprobs`, of the prompt and of what was sampled after it."""
    offsets = np.cumsum(np.concatenate([[0], *[piece.lengths for piece in pieces]]))[:-1]
    return b'{"text_offset":%b,"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}' % (
        orjson.dumps(offsets, option=orjson.OPT_SERIALIZE_NUMPY),
        b",".join([piece.logprobs for piece in pieces]),
        b",".join([piece.names for piece in pieces]),
        b",".join([piece.top for piece in pieces]),
    )


def prompt_logprobs(pieces: Sequence[Written]) -> bytes:
    """vLLM's `prompt_logprobs`."""
    return b"[%b]" % b",".join([piece.full for piece in pieces])


def _objects(entries: Sequence[str], num_columns: int, most: int) -> bytes:
    """Each row's entries, `most` of those that are not empty, as a JSON object."""
    rows = zip(*[iter(entries)] * num_columns, strict=True)
    are_whole = most >= num_columns
    objects = [
        # Sorting entries out takes three times as long as writing a row that is whole.
        ",".join(row if are_whole and "" not in row else list(filter(None, row))[:most])
        for row in rows
    ]
    return f"{{{'},{'.join(objects)}}}".encode()


def _lengths(names: Sequence[str]) -> np.ndarray:
    """Characters of each name, which is JSON."""
    return np.array(list(map(len, orjson.loads(f"[{','.join(names)}]"))), np.int64)


def _repeats(ids: np.ndarray) -> list[int]:
    """Places in ids [rows, actual token and top k], row after row, where one of the top k is the row's actual token."""
    found: np.ndarray = ids == ids[:, :1]
    found[:, 0] = False
    places: list[int] = np.flatnonzero(found).tolist()
    return places


def _all_ranks(ranks: np.ndarray, num_columns: int, repeats: Sequence[int]) -> list[int]:
    """Ranks of all tokens, row after row: an actual token's own, or its place among the top k if it repeats there."""
    table = list(range(num_columns)) * len(ranks)
    table[::num_columns] = ranks.tolist()
    for place in repeats:
        table[place - place % num_columns] = place % num_columns
    return table


def _as_json(values: np.ndarray) -> list[str]:
    """Each number of an array as JSON."""
    written = orjson.dumps(np.ascontiguousarray(values).ravel(), option=orjson.OPT_SERIALIZE_NUMPY)
    return written[1:-1].decode().split(",") if values.size else []


def _placeholder(token_id: int) -> str:
    """vLLM's name of a token where texts are not wanted, as JSON."""
    return f'"{format_token_id_placeholder(token_id)}"'
