"""Writes the logprobs of a completion from arrays, as the JSON that vLLM would write from objects.

JSON is stored by the hashes of the blocks that it describes, because benchmarks repeat prefixes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import orjson
from cachetools import LRUCache
from vllm.entrypoints.generate.base.serving import format_token_id_placeholder

from scoremode_server.engine.sequence import EnginePass
from scoremode_server.rows import Rows, json_logprobs
from scoremode_server.scoring.tokenizer import TokenStrings
from scoremode_server.vllm_compat.output_processor import INCOMPLETE

PIECE_ENTRIES = 16_384
"""Limit on logprobs in a piece of JSON. Writing this many takes some five milliseconds."""

STORED_BYTES = 64 * 1024**2

MAX_STORED_COLUMNS = 32
"""JSON with more tokens per row is not stored: one prompt with its top 100 would evict a hundred questions."""

_UNKNOWN, _UNIQUE, _SHARED, _WITHIN_CHARACTER = range(4)
"""Kinds of tokens, in order: not added yet, with a text of its own, with another token's text, or ending within a
character."""


@dataclass(frozen=True, slots=True)
class Style:
    """How a request wants its logprobs."""

    num_top: int | None
    """Alternatives in OpenAI's `top_logprobs`; None if OpenAI's `logprobs` are not wanted."""
    as_token_ids: bool
    """Whether OpenAI's `logprobs` name a token `token_id:5` instead of using its text."""


@dataclass(frozen=True, slots=True)
class OpenAI:
    """Some rows as JSON for the lists in OpenAI's `logprobs`, without their brackets."""

    names: bytes
    logprobs: bytes
    top: bytes
    lengths: np.ndarray
    """[rows]: the number of characters in each name."""


Key = tuple[bytes, int, Style]
"""A stored piece's key: the hash of its last block, its number of columns, and its style."""


@dataclass(frozen=True, slots=True)
class Written:
    """Some rows as JSON for lists, without their brackets."""

    full: bytes
    """vLLM's `prompt_logprobs`: for each position, tokens by id, with logprob, rank and text."""
    openai: OpenAI | None
    """OpenAI's `logprobs`; None if they are not wanted."""
    before: Key | None = None
    """The key of the stored piece that ends where this one starts; None for the first piece."""

    @property
    def num_bytes(self) -> int:
        """A rough size: OpenAI's parts are together about as long as `full`, and the objects take 512 bytes."""
        return 512 + 2 * len(self.full)


class Entries(NamedTuple):
    """The entries to write for some rows, row after row, one per token. A place is an index into all entries."""

    logprobs: list[bytes]
    repeats: list[int]
    """Places of top tokens that are their row's actual token."""
    ambiguous: list[int]
    """Places of tokens whose text another token may have."""
    completed: list[tuple[int, str]]
    """Places of tokens that end within a character, and their texts after their context."""


class TokenPieces:
    """The JSON around a token's logprob and rank, by token id, for the tokens that `fill` added.

    Attributes:
        before: the JSON before a token's logprob: `"5":{"logprob":`.
        after: the JSON after its rank, with its own text: `,"decoded_token":"a"}`.
        texts: the text alone: `"a"`.
        lengths: characters of the text.
    """

    def __init__(self, strings: TokenStrings) -> None:
        self._strings = strings
        self.before, self.after, self.texts = (np.zeros(0, object) for _ in range(3))
        self.lengths = np.zeros(0, np.int64)
        self._kinds = np.zeros(0, np.uint8)
        self._first_with_text: dict[str, int] = {}

    def fill(self, token_ids: np.ndarray) -> tuple[list[int], list[int]]:
        """Add the tokens [n] that are new. Returns two lists of indices into `token_ids`: tokens whose text another
        token may have, and those of them that end within a character."""
        size = int(token_ids.max(initial=0)) + 1
        if size > len(self._kinds):
            for table in (self.before, self.after, self.texts, self.lengths, self._kinds):
                table.resize(size, refcheck=False)
        kinds = self._kinds[token_ids]
        # Searching bytes is faster than reducing a short array.
        if _UNKNOWN in kinds.tobytes():
            self._add(np.unique(token_ids[kinds == _UNKNOWN]).tolist())
            kinds = self._kinds[token_ids]
        ambiguous = np.flatnonzero(kinds > _UNIQUE)
        return ambiguous.tolist(), ambiguous[kinds[ambiguous] == _WITHIN_CHARACTER].tolist()

    def _add(self, token_ids: list[int]) -> None:
        texts = self._strings.texts_of(token_ids)
        self.before[token_ids] = [b'"%d":{"logprob":' % token_id for token_id in token_ids]
        self.texts[token_ids] = list(map(orjson.dumps, texts))
        self.after[token_ids] = list(map(_after_rank, texts))
        self.lengths[token_ids] = list(map(len, texts))
        for token_id, text in zip(token_ids, texts, strict=True):
            if text.endswith(INCOMPLETE):
                self._kinds[token_id] = _WITHIN_CHARACTER
            elif (first := self._first_with_text.setdefault(text, token_id)) == token_id:
                self._kinds[token_id] = _UNIQUE
            else:
                self._kinds[[first, token_id]] = _SHARED


class LogprobsWriter:
    """Writes the rows of prompts and of sampled tokens. Not thread-safe."""

    def __init__(self, strings: TokenStrings, block_size: int) -> None:
        self._strings = strings
        self._pieces = TokenPieces(strings)
        self._block_size = block_size
        self._stored: LRUCache[Key, Written] = LRUCache(STORED_BYTES, getsizeof=lambda piece: piece.num_bytes)

    def prompt(self, result: EnginePass, style: Style) -> Iterator[Written]:
        """Yield a prompt's logprobs in pieces, each written when the reader asks for it: the first token, which has
        none, and then the rows after it.

        If the engine had the first blocks cached, stored pieces are reused, and new pieces are stored.
        """
        token_ids, rows, num_columns = result.output.prompt_token_ids, result.rows, result.rows.width
        most_rows = max(1, PIECE_ENTRIES // num_columns)
        most_blocks = most_rows // self._block_size
        stores = result.num_cached_blocks and most_blocks and num_columns <= MAX_STORED_COLUMNS
        hashes = result.block_hashes if stores else ()
        keys: list[Key] = [(block_hash, num_columns, style) for block_hash in hashes]
        stored, num_stored = self._find(keys)
        yield self._first(token_ids[0], style)
        yield from stored
        before = keys[num_stored - 1] if num_stored else None
        start = num_stored
        for end in _ends(num_stored, min(result.num_cached_blocks, len(keys)), len(keys), most_blocks):
            piece = self._write(token_ids, rows, start * self._block_size, end * self._block_size, style, before)
            if piece.num_bytes <= self._stored.maxsize:
                self._stored[keys[end - 1]] = piece
            before, start = keys[end - 1], end
            yield piece
        for first in range(start * self._block_size, len(rows), most_rows):
            yield self._write(token_ids, rows, first, min(first + most_rows, len(rows)), style)

    def sampled(self, rows: Rows, style: Style) -> OpenAI:
        """OpenAI's logprobs of one sampled token. Its text does not depend on the prompt, as in vLLM."""
        return self._openai(rows, self._entries((), rows, 0), style)

    def _first(self, token_id: int, style: Style) -> Written:
        if style.num_top is None:
            return Written(b"null", None)
        as_text = self._strings.first_of_a_prompt
        name = format_token_id_placeholder(token_id) if style.as_token_ids else as_text(token_id)
        return Written(b"null", OpenAI(orjson.dumps(name), b"null", b"null", np.array([len(name)])))

    def _find(self, keys: Sequence[Key]) -> tuple[list[Written], int]:
        """Find the stored pieces that cover as many of a sequence's first blocks as possible. Returns the pieces and
        the number of blocks."""
        for num_stored in range(len(keys), 0, -1):
            pieces: list[Written] = []
            key: Key | None = keys[num_stored - 1]
            while key is not None and key in self._stored:
                pieces.append(self._stored[key])
                key = pieces[-1].before
            if key is None:
                return pieces[::-1], num_stored
        return [], 0

    def _write(
        self, token_ids: Sequence[int], rows: Rows, start: int, end: int, style: Style, before: Key | None = None
    ) -> Written:
        """Write the rows from `start` to `end`, at least one. An actual token that is also a top token appears once,
        with its rank among these."""
        rows = rows[start:end]
        entries = self._entries(token_ids, rows, start)
        openai = None if style.num_top is None else self._openai(rows, entries, style)
        return Written(self._full(rows, entries), openai, before)

    def _entries(self, token_ids: Sequence[int], rows: Rows, start: int) -> Entries:
        """Collect the entries to write for rows of a prompt. The first of them is the prompt's row `start`."""
        ids = rows.token_ids
        ambiguous, within = self._pieces.fill(ids.ravel())
        logprobs = orjson.dumps(json_logprobs(rows.logprobs).ravel(), option=orjson.OPT_SERIALIZE_NUMPY)
        repeats: np.ndarray = ids == ids[:, :1]
        repeats[:, 0] = False
        completed = self._strings.texts_within(token_ids, start + 1, ids, within) if within else []
        return Entries(logprobs[1:-1].split(b","), np.flatnonzero(repeats).tolist(), ambiguous, completed)

    def _full(self, rows: Rows, entries: Entries) -> bytes:
        """Write vLLM's `prompt_logprobs`. Each entry has five pieces: the separator before it, and the token's id,
        logprob, rank and text."""
        ids, num_columns = rows.token_ids, rows.width
        after = self._pieces.after[ids.ravel()].tolist()
        for place, text in entries.completed:
            after[place] = _after_rank(text)
        pieces = [b","] * (5 * ids.size)
        pieces[0 :: 5 * num_columns] = [b"},{"] * len(rows)
        pieces[1::5] = self._pieces.before[ids.ravel()].tolist()
        pieces[2::5] = entries.logprobs
        pieces[3::5] = [_rank(rank) for rank in range(num_columns)] * len(rows)
        pieces[4::5] = after
        # A prompt has thousands of ranks: they are formatted together, without a call for each.
        ranks = orjson.dumps(np.ascontiguousarray(rows.ranks), option=orjson.OPT_SERIALIZE_NUMPY)
        pieces[3 :: 5 * num_columns] = (b',"rank":' + ranks[1:-1].replace(b",", b'|,"rank":')).split(b"|")
        for place in entries.repeats:
            column = place % num_columns
            pieces[5 * (place - column) + 3] = _rank(column)
            pieces[5 * place : 5 * place + 5] = [b""] * 5
        return b"".join(pieces).removeprefix(b"},") + b"}"

    def _openai(self, rows: Rows, entries: Entries, style: Style) -> OpenAI:
        assert style.num_top is not None
        ids, num_columns = rows.token_ids.ravel(), rows.width
        if style.as_token_ids:
            names = [b'"%b"' % format_token_id_placeholder(token_id).encode() for token_id in ids.tolist()]
            lengths = np.array(list(map(len, names[::num_columns])), np.int64) - 2
        else:
            names, lengths = self._pieces.texts[ids].tolist(), self._pieces.lengths[ids[::num_columns]]
            for place, text in entries.completed:
                names[place] = orjson.dumps(text)
                if place % num_columns == 0:
                    lengths[place // num_columns] = len(text)
        return OpenAI(
            b",".join(names[::num_columns]),
            b",".join(entries.logprobs[::num_columns]),
            _top(names, rows.logprobs, entries, style.num_top),
            lengths,
        )


def openai_logprobs(pieces: Iterable[Written], sampled: Sequence[OpenAI] = ()) -> Iterator[bytes]:
    """Yield an empty part per piece, after which other tasks may run, and then OpenAI's `logprobs` of the prompt and of
    the sampled token."""
    parts: list[OpenAI] = []
    for piece in pieces:
        assert piece.openai is not None
        parts.append(piece.openai)
        yield b""
    parts += sampled
    lengths = np.concatenate([part.lengths for part in parts])
    # Each of the longest strings is a separate part, which saves a copy of it.
    offsets = orjson.dumps(lengths.cumsum() - lengths, option=orjson.OPT_SERIALIZE_NUMPY)
    yield b'{"text_offset":%b,"token_logprobs":[' % offsets
    yield b",".join([part.logprobs for part in parts])
    yield b'],"tokens":['
    yield b",".join([part.names for part in parts])
    yield b'],"top_logprobs":['
    yield b",".join([part.top for part in parts])
    yield b"]}"


def prompt_logprobs(pieces: Iterable[Written]) -> Iterator[bytes]:
    opening = b"["
    for piece in pieces:
        yield opening
        yield piece.full
        opening = b","
    yield b"]"


def _ends(start: int, num_cached: int, num_blocks: int, most: int) -> Iterator[int]:
    """Yield the number of blocks up to the end of each piece, from block `start` on, with at most `most` blocks per
    piece. One piece ends with the cached blocks: there this prompt differs from an earlier one, and the next prompt may
    differ there too."""
    for last in (num_cached, num_blocks):
        while start < last:
            start = min(start + most, last)
            yield start


def _left_out(entries: Entries, shape: tuple[int, ...], num_top: int) -> list[int]:
    """The places that OpenAI's `top_logprobs` leaves out, in rows of this shape. It has a row's actual token and up to
    `num_top` others."""
    if shape[1] <= num_top + 1:
        return list(entries.repeats)
    shown = np.ones(shape, bool)
    shown.flat[entries.repeats] = False
    return cast(list[int], np.flatnonzero(~shown | (shown.cumsum(axis=1) > num_top + 1)).tolist())


def _top(names: list[bytes], logprobs: np.ndarray, entries: Entries, num_top: int) -> bytes:
    """Write OpenAI's `top_logprobs` of rows with logprobs [rows, columns] and one name per logprob. Each entry has four
    pieces: the separator before it, the name, a colon and the logprob.

    If different tokens have the same name, the most likely one's logprob is written. Only rows with ambiguous tokens
    are searched for such names.
    """
    num_columns: int = logprobs.shape[1]

    def has_equal_names(row: int) -> bool:
        return len(set(names[row * num_columns : (row + 1) * num_columns])) < num_columns

    left_out = _left_out(entries, logprobs.shape, num_top)
    pieces = [b","] * (4 * len(names))
    pieces[0 :: 4 * num_columns] = [b"},{"] * len(logprobs)
    pieces[1::4] = names
    pieces[2::4] = [b":"] * len(names)
    pieces[3::4] = entries.logprobs
    hidden = set(left_out)
    for row in filter(has_equal_names, {place // num_columns for place in entries.ambiguous}):
        places = set(range(row * num_columns, (row + 1) * num_columns)) - hidden
        best = _most_likely(names, logprobs.flat, sorted(places))
        left_out += places - best.keys()
        for place, other in best.items():
            pieces[4 * place + 3] = entries.logprobs[other]
    for place in left_out:
        pieces[4 * place : 4 * place + 4] = [b""] * 4
    return b"".join(pieces).removeprefix(b"},") + b"}"


def _most_likely(names: list[bytes], logprobs: "np.flatiter[Any]", places: Iterable[int]) -> dict[int, int]:
    """Map the first place of each name to the place of that name's most likely token."""
    firsts, best = dict[bytes, int](), dict[int, int]()
    for place in places:
        first = firsts.setdefault(names[place], place)
        if first not in best or logprobs[place] > logprobs[best[first]]:
            best[first] = place
    return best


def _rank(rank: int) -> bytes:
    return b',"rank":%d' % rank


@lru_cache(maxsize=2**14)
def _after_rank(text: str) -> bytes:
    return b',"decoded_token":%b}' % orjson.dumps(text)
