"""The logprobs of a completion's prompt, written as JSON from arrays: equal to what vLLM writes from objects."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import orjson
from vllm.entrypoints.generate.base.serving import format_token_id_placeholder
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs

from scoremode_server.errors import EngineOutputError
from scoremode_server.responses import json_logprobs
from scoremode_server.token_strings import TokenStrings


class PromptLogprobs:
    """Logprobs of a prompt of n tokens, from token ids and logprobs [n - 1, actual token and top k] and the actual
    tokens' ranks [n - 1].

    At each position vLLM has a dictionary, the actual token first: where that is among the top k, it stands once, with
    the rank that it has there.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
        strings: TokenStrings,
        *,
        num_top: int,
        as_token_ids: bool,
    ) -> None:
        ids, logprobs, ranks = arrays
        if not np.array_equal(ids[:, 0], token_ids[1:]) or np.isnan(logprobs).any():
            raise EngineOutputError("the engine returned logprobs of other tokens than were asked for, or NaN")
        strings.fill(np.unique(ids).tolist())
        values = _as_json(json_logprobs(logprobs))
        width = ids.shape[1]
        self._strings = strings
        self._as_token_ids = as_token_ids
        self._logprobs = ["null", *values[::width]]
        self._texts = [strings.first_of_a_prompt(token_ids[0])]
        self._top, self._full = ["null"], ["null"]
        rows = zip(ids.tolist(), _rows(values, width), _merged_ranks(ids, ranks).tolist(), strict=True)
        for position, (row, shown, rank) in enumerate(rows, start=1):
            self._add(row, shown, rank, num_top, strings.at(token_ids, position, row))
        self._names = [_placeholder(token_id) for token_id in token_ids] if as_token_ids else self._texts

    def _add(self, row: list[int], shown: tuple[str, ...], rank: int, num_top: int, texts: Mapping[int, str]) -> None:
        """Write one position; `texts` are its tokens as JSON."""
        actual = row[0]
        self._texts.append(texts[actual])
        full = [f'"{actual}":{{"logprob":{shown[0]},"rank":{rank},"decoded_token":{texts[actual]}}}']
        top = [f"{_placeholder(actual) if self._as_token_ids else texts[actual]}:{shown[0]}"]
        for place in range(1, len(row)):
            token_id = row[place]
            if token_id != actual:
                full.append(
                    f'"{token_id}":{{"logprob":{shown[place]},"rank":{place},"decoded_token":{texts[token_id]}}}'
                )
                top.append(f"{_placeholder(token_id) if self._as_token_ids else texts[token_id]}:{shown[place]}")
        self._full.append(f"{{{','.join(full)}}}")
        self._top.append(f"{{{','.join(top[: num_top + 1])}}}")

    def full(self) -> bytes:
        """vLLM's `prompt_logprobs`: at each position, tokens by id, with rank and text."""
        return f"[{','.join(self._full)}]".encode()

    def openai(self, sampled: CompletionLogProbs | None) -> bytes:
        """OpenAI's `logprobs`: of the prompt, and of what was sampled behind it."""
        names_read: list[str] = orjson.loads(f"[{','.join(self._names)}]")
        *offsets, end = accumulate(map(len, names_read), initial=0)
        names, logprobs, top = list(self._names), list(self._logprobs), list(self._top)
        if sampled is not None:
            offsets += [offset + end for offset in sampled.text_offset]
            names += map(_json, sampled.tokens)
            logprobs += map(_json, sampled.token_logprobs)
            top += map(_json, sampled.top_logprobs)
        return (
            f'{{"text_offset":{orjson.dumps(offsets).decode()},"token_logprobs":[{",".join(logprobs)}],'
            f'"tokens":[{",".join(names)}],"top_logprobs":[{",".join(top)}]}}'
        ).encode()


def _merged_ranks(ids: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Ranks of the actual tokens, [rows]: the place among the top k where they are there."""
    found = ids[:, 1:] == ids[:, :1]
    return np.where(found.any(axis=1), found.argmax(axis=1) + 1, ranks) if found.size else ranks


def _as_json(values: np.ndarray) -> list[str]:
    """Each number of an array as JSON."""
    written = orjson.dumps(np.ascontiguousarray(values).ravel(), option=orjson.OPT_SERIALIZE_NUMPY)
    return written[1:-1].decode().split(",") if values.size else []


def _rows(values: list[str], width: int) -> "zip[tuple[str, ...]]":
    """`values` in rows of `width`."""
    return zip(*[iter(values)] * width, strict=True)


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _placeholder(token_id: int) -> str:
    """vLLM's name of a token where texts are not wanted, as JSON."""
    return f'"{format_token_id_placeholder(token_id)}"'
