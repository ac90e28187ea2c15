"""The logprobs of a completion's prompt, written as JSON from arrays: equal to what vLLM writes from objects.

Rows that came from the logprob cache are written some at a time, and what was written is kept for a while: prefixes
that come again have the same rows, and are most of what a benchmark asks for. Rows that were computed just now are
written and forgotten.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import numpy as np
import orjson
from vllm.entrypoints.generate.base.serving import format_token_id_placeholder
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs

from scoremode_server.errors import EngineOutputError
from scoremode_server.responses import json_logprobs
from scoremode_server.token_strings import CONTEXT, TokenStrings

ROWS = 16
"""Rows that are kept together."""

KEPT_BYTES = 64 * 1024**2

_ENTRY_BYTES = 1024
"""What a kept piece costs beside its text: objects, the key, the lengths."""


@dataclass(frozen=True, slots=True)
class Written:
    """Some rows as JSON, without the brackets around them."""

    full: str
    names: str
    logprobs: str
    top: str
    lengths: tuple[int, ...]
    """Characters of each name."""


@dataclass(frozen=True, slots=True)
class Style:
    """How a request wants its logprobs."""

    num_top: int
    """Alternatives in OpenAI's `top_logprobs`."""
    as_token_ids: bool
    """`token_id:5` in place of a token's text."""


Key = tuple[bytes, tuple[int, ...], Style]
Row = tuple[str, str, str, str]


class LogprobsWriter:
    """Writes the rows of prompts. Not for several threads at once."""

    def __init__(self, strings: TokenStrings) -> None:
        self._strings = strings
        self._kept: OrderedDict[Key, Written] = OrderedDict()
        self._num_bytes = 0

    def prompt(
        self,
        token_ids: Sequence[int],
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
        style: Style,
        num_cached_tokens: int,
    ) -> "PromptLogprobs":
        """Logprobs of a prompt of n tokens, from token ids and logprobs [n - 1, actual token and top k] and the actual
        tokens' ranks [n - 1]. The first `num_cached_tokens` rows came from the cache.

        Raises:
            EngineOutputError: the rows are of other tokens, or one is NaN.
        """
        ids, logprobs, ranks = arrays
        if not np.array_equal(ids[:, 0], token_ids[1:]) or np.isnan(logprobs).any():
            raise EngineOutputError("the engine returned logprobs of other tokens than were asked for, or NaN")
        first = self._strings.first_of_a_prompt(token_ids[0])
        return PromptLogprobs(
            _placeholder(token_ids[0]) if style.as_token_ids else first,
            self._pieces(
                token_ids,
                np.concatenate([ids, logprobs.view(np.int32), ranks[:, None]], axis=1),
                style,
                num_cached_tokens // ROWS,
            ),
        )

    def _pieces(self, token_ids: Sequence[int], table: np.ndarray, style: Style, num_shared: int) -> list[Written]:
        """All rows: the first `num_shared` pieces as they were written before, the others anew."""
        keys = [_key(token_ids, table, place * ROWS, style) for place in range(num_shared)]
        pieces = []
        for key in keys:
            if (written := self._kept.get(key)) is None:
                break
            self._kept.move_to_end(key)
            pieces.append(written)
        rows = self._rows(token_ids, table, len(pieces) * ROWS, style)
        pieces += [self._keep(key, _join(list(islice(rows, ROWS)))) for key in keys[len(pieces) :]]
        computed = list(rows)
        return [*pieces, _join(computed)] if computed else pieces

    def _keep(self, key: Key, written: Written) -> Written:
        self._num_bytes += _num_bytes(written) - (_num_bytes(self._kept[key]) if key in self._kept else 0)
        self._kept[key] = written
        while self._num_bytes > KEPT_BYTES:
            self._num_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
        return written

    def _rows(self, token_ids: Sequence[int], table: np.ndarray, start: int, style: Style) -> Iterator[Row]:
        """(full, name, logprob, top) of each row from `start` on, each as JSON.

        Where the actual token is among the top k it stands once, with the rank that it has there.
        """
        width = table.shape[1] // 2
        ids = table[start:, :width]
        rows = ids.tolist()
        self._strings.fill(chain.from_iterable(rows))
        values = _as_json(json_logprobs(np.ascontiguousarray(table[start:, width : 2 * width]).view(np.float32)))
        shown = zip(*[iter(values)] * width, strict=True)
        ranks = _merged_ranks(ids, table[start:, -1]).tolist()
        for position, (row, of_row, rank) in enumerate(zip(rows, shown, ranks, strict=True), start=start + 1):
            texts = self._strings.at(token_ids, position, row)
            names: Mapping[int, str] = {id_: _placeholder(id_) for id_ in row} if style.as_token_ids else texts
            actual, value = row[0], of_row[0]
            full = f'{{"{actual}":{{"logprob":{value},"rank":{rank},"decoded_token":{texts[actual]}}}'
            top = f"{{{names[actual]}:{value}"
            left = style.num_top
            for place in range(1, width):
                if (other := row[place]) != actual:
                    value = of_row[place]
                    full += f',"{other}":{{"logprob":{value},"rank":{place},"decoded_token":{texts[other]}}}'
                    if left:
                        top += f",{names[other]}:{value}"
                        left -= 1
            yield full + "}", names[actual], of_row[0], top + "}"


class PromptLogprobs:
    """A prompt's logprobs as JSON, in pieces; `first` is the name of its first token, which has none."""

    def __init__(self, first: str, pieces: list[Written]) -> None:
        self._first = first
        self._pieces = pieces

    def full(self) -> bytes:
        """vLLM's `prompt_logprobs`: at each position, tokens by id, with rank and text."""
        return f"[{','.join(['null', *[piece.full for piece in self._pieces]])}]".encode()

    def openai(self, sampled: CompletionLogProbs | None) -> bytes:
        """OpenAI's `logprobs`: of the prompt, and of what was sampled behind it."""
        names = [self._first, *[piece.names for piece in self._pieces]]
        logprobs = ["null", *[piece.logprobs for piece in self._pieces]]
        top = ["null", *[piece.top for piece in self._pieces]]
        lengths = chain([len(orjson.loads(self._first))], *[piece.lengths for piece in self._pieces])
        *offsets, end = accumulate(lengths, initial=0)
        if sampled is not None:
            offsets += [offset + end for offset in sampled.text_offset]
            names += map(_json, sampled.tokens)
            logprobs += map(_json, sampled.token_logprobs)
            top += map(_json, sampled.top_logprobs)
        return (
            f'{{"text_offset":{_json(offsets)},"token_logprobs":[{",".join(logprobs)}],'
            f'"tokens":[{",".join(names)}],"top_logprobs":[{",".join(top)}]}}'
        ).encode()


def _key(token_ids: Sequence[int], table: np.ndarray, start: int, style: Style) -> Key:
    """What some rows are written from: the rows, and the tokens before them that may begin a character."""
    return table[start : start + ROWS].tobytes(), tuple(token_ids[max(1, start + 1 - CONTEXT) : start + 1]), style


def _join(rows: list[Row]) -> Written:
    full, names, logprobs, top = zip(*rows, strict=True)
    lengths = tuple(map(len, orjson.loads(f"[{','.join(names)}]")))
    return Written(",".join(full), ",".join(names), ",".join(logprobs), ",".join(top), lengths)


def _merged_ranks(ids: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Ranks of the actual tokens, [rows]: the place among the top k where they are there."""
    found = ids[:, 1:] == ids[:, :1]
    return np.where(found.any(axis=1), found.argmax(axis=1) + 1, ranks) if found.size else ranks


def _as_json(values: np.ndarray) -> list[str]:
    """Each number of an array as JSON."""
    written = orjson.dumps(np.ascontiguousarray(values).ravel(), option=orjson.OPT_SERIALIZE_NUMPY)
    return written[1:-1].decode().split(",") if values.size else []


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _num_bytes(written: Written) -> int:
    return _ENTRY_BYTES + len(written.full) + len(written.names) + len(written.logprobs) + len(written.top)


def _placeholder(token_id: int) -> str:
    """vLLM's name of a token where texts are not wanted, as JSON."""
    return f'"{format_token_id_placeholder(token_id)}"'
