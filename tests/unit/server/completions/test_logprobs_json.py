"""Logprobs as JSON: put together from pieces that were kept, they are what is written at once."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs
from vllm.logprobs import Logprob

from scoremode_server.completions import logprobs_json
from scoremode_server.completions.logprobs_json import LogprobsWriter, Style, openai_logprobs, prompt_logprobs
from scoremode_server.engine.sequence import EnginePass, TokenSequence
from scoremode_server.rows import Rows
from scoremode_server.scoring.tokenizer import TokenStrings
from tests.unit.server.completions.test_texts import SIZE, block_hashes

STYLES = [Style(1, False), Style(1, True), Style(0, False), Style(None, False)]


@pytest.fixture(scope="module")
def strings(byte_fallback_model) -> TokenStrings:
    tokenizer = AutoTokenizer.from_pretrained(byte_fallback_model)
    return TokenStrings(lambda: tokenizer)


def rows(prompt: list[int], width: int) -> Rows:
    """Rows that an engine may compute for a prompt: a row depends only on the tokens up to its own."""
    shape = (len(prompt) - 1, width)
    ids, logprobs, ranks = np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(len(prompt) - 1, np.int32)
    for row, actual in enumerate(prompt[1:]):
        rng = np.random.default_rng(prompt[: row + 2])
        # The actual token may be one of the top ones.
        ids[row] = [actual, *rng.choice(np.arange(actual - 20, actual + 20) % 1024, width - 1, replace=False)]
        logprobs[row] = -rng.random(width) * 20
        ranks[row] = rng.integers(1, 1024)
    return Rows.from_arrays(ids, logprobs, ranks)


def result_of(prompt: list[int], rows: Rows, hashes: Sequence[bytes] = (), num_cached_blocks: int = 0) -> EnginePass:
    result = EnginePass(TokenSequence(context=prompt), block_hashes=hashes, num_cached_blocks=num_cached_blocks)
    result.rows, result.output = rows, SimpleNamespace(prompt_token_ids=prompt)
    return result


def written(writer: LogprobsWriter, prompt: list[int], width: int, style: Style, num_blocks: int) -> list[bytes]:
    hashes = block_hashes(prompt[1:])[:num_blocks]
    pieces = list(writer.prompt(result_of(prompt, rows(prompt, width), hashes, -(-num_blocks // 2)), style))
    openai = [] if style.num_top is None else [b"".join(openai_logprobs(pieces))]
    return [b"".join(prompt_logprobs(pieces)), *openai]


@pytest.mark.parametrize(("kept_bytes", "piece_entries"), [(1 << 20, 16_384), (8000, 16_384), (1 << 20, 20)])
def test_pieces_add_up_to_the_json_that_is_written_at_once(strings, monkeypatch, kept_bytes, piece_entries):
    """Prompts that branch at random, in several styles and widths, with any number of blocks from the cache."""
    monkeypatch.setattr(logprobs_json, "STORED_BYTES", kept_bytes)
    monkeypatch.setattr(logprobs_json, "PIECE_ENTRIES", piece_entries)
    writer = LogprobsWriter(strings, SIZE)
    rng = random.Random(3)
    prompts = [[0, 1, 2]]
    for _ in range(100):
        start = rng.choice(prompts[-20:])
        prompt = [0, *start[1 : rng.randint(1, len(start))], *[rng.randrange(1024) for _ in range(rng.randint(2, 20))]]
        prompts.append(prompt)
        width, style = rng.choice([1, 2, 4]), rng.choice(STYLES)
        answer = written(writer, prompt, width, style, rng.randint(0, (len(prompt) - 1) // SIZE))
        assert answer == written(LogprobsWriter(strings, SIZE), prompt, width, style, 0)
        assert len(json.loads(answer[0])) == len(prompt)
        assert sum(kept.num_bytes for kept in writer._stored.values()) <= kept_bytes
    assert writer._stored


TEXTS = ["a", "b", "a", "b", "", '"\\', "a", "é", "日本", "�", "x�", "<s>"]
"""Texts of the tokens, by id: several are alike, and two end within a character, which the tokens before them
complete."""
COMPLETED = {9: "ü", 10: ""}


TEXT_TABLE = SimpleNamespace(
    texts_of=lambda token_ids: [TEXTS[token_id] for token_id in token_ids],
    first_of_a_prompt=lambda token_id: f"first {token_id}",
    texts_within=lambda prompt, start, ids, places: [(place, COMPLETED[ids.ravel()[place]]) for place in places],
)
"""Stands in for `TokenStrings`."""


def plain(prompt: list[int], rows: Rows, style: Style) -> tuple[bytes, bytes | None]:
    """The JSON of vLLM's own models: `prompt_logprobs`, and OpenAI's `logprobs` if they are wanted."""
    places: list[dict[int, Logprob] | None] = [None]
    for ids, logprobs, rank in zip(rows.token_ids.tolist(), rows.logprobs.tolist(), rows.ranks.tolist(), strict=True):
        ranks = [rank, *range(1, len(ids))]
        texts = [COMPLETED.get(token_id, TEXTS[token_id]) for token_id in ids]
        # vLLM's dictionary: a token that comes again keeps its place, and gets the later rank.
        places.append(
            dict(zip(ids, map(Logprob, (max(each, -9999.0) for each in logprobs), ranks, texts), strict=True))
        )
    full = orjson.dumps(
        [place and {str(token_id): asdict(each) for token_id, each in place.items()} for place in places]
    )
    if style.num_top is None:
        return full, None
    choice = CompletionLogProbs()
    for token_id, place in zip(prompt, places, strict=True):
        entries = place or {token_id: Logprob(0, None, f"first {token_id}")}
        named = {each: f"token_id:{each}" if style.as_token_ids else entries[each].decoded_token for each in entries}
        choice.text_offset.append(sum(map(len, choice.tokens)))
        choice.tokens.append(named[token_id])
        choice.token_logprobs.append(place and place[token_id].logprob)
        top: dict[str, float] = {}
        for each in list(place or ())[: style.num_top + 1]:
            top[named[each]] = max(place[each].logprob, top.get(named[each], -np.inf))
        choice.top_logprobs.append(place and top)
    return full, orjson.dumps(choice.model_dump())


@st.composite
def prompts_with_rows(draw: st.DrawFn) -> tuple[list[int], Rows]:
    """A prompt, and rows with different top tokens, one of which may be the actual token."""
    prompt = draw(st.lists(st.integers(0, len(TEXTS) - 1), min_size=2, max_size=6))
    num_top = draw(st.integers(0, 5))
    values = st.floats(-30, 0, width=32) | st.just(-np.inf)
    ids, logprobs, ranks = [], [], []
    for actual in prompt[1:]:
        of_tokens = draw(st.lists(values, min_size=len(TEXTS), max_size=len(TEXTS), unique=True))
        ids.append([actual, *draw(st.permutations(range(len(TEXTS))))[:num_top]])
        logprobs.append([of_tokens[token_id] for token_id in ids[-1]])
        ranks.append(draw(st.integers(1, 200_000)))
    return prompt, Rows.from_arrays(np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(ranks, np.int32))


@given(prompts_with_rows(), st.none() | st.integers(0, 6), st.booleans())
def test_json_is_that_of_vllms_models(given_rows, num_top, as_token_ids):
    prompt, rows = given_rows
    style = Style(num_top, as_token_ids)
    pieces = list(LogprobsWriter(TEXT_TABLE, SIZE).prompt(result_of(prompt, rows), style))
    full, openai = plain(prompt, rows, style)
    assert b"".join(prompt_logprobs(pieces)) == full
    if openai is not None:
        assert b"".join(openai_logprobs(pieces)) == openai
