"""Logprobs as JSON: put together from pieces that were kept, they are what is written at once."""

import json
import random

import numpy as np
import pytest
from transformers import AutoTokenizer

from scoremode_server.completions import logprobs_json
from scoremode_server.completions.logprobs_json import LogprobsWriter, Style, openai_logprobs, prompt_logprobs
from scoremode_server.rows import Rows
from scoremode_server.scoring.token_strings import TokenStrings
from tests.unit.server.completions.test_prompt_texts import SIZE, block_hashes

STYLES = [Style(1, False), Style(0, False), Style(2, True)]


@pytest.fixture(scope="module")
def strings(byte_fallback_model) -> TokenStrings:
    tokenizer = AutoTokenizer.from_pretrained(byte_fallback_model)
    return TokenStrings(lambda: tokenizer)


def rows(prompt: list[int], width: int) -> Rows:
    """What an engine may say of a prompt: a row depends on the tokens up to its own, and nothing else."""
    ids = np.empty((len(prompt) - 1, width), np.int32)
    logprobs = np.empty((len(prompt) - 1, width), np.float32)
    ranks = np.empty(len(prompt) - 1, np.int32)
    for row in range(len(prompt) - 1):
        rng = np.random.default_rng(prompt[: row + 2])
        top = rng.choice(1024, width - 1, replace=False)
        if rng.random() < 0.3 and width > 1:
            top[rng.integers(width - 1)] = prompt[row + 1]
        ids[row] = [prompt[row + 1], *dict.fromkeys(top)][:width] if len(set(top)) == width - 1 else prompt[row + 1]
        logprobs[row] = -rng.random(width) * 20
        ranks[row] = rng.integers(1, 1024)
    return Rows.of(ids, logprobs, ranks)


def written(
    writer: LogprobsWriter, prompt: list[int], width: int, style: Style, num_blocks: int
) -> tuple[bytes, bytes]:
    hashes = block_hashes(prompt[1:])[:num_blocks]
    pieces = writer.prompt(prompt, rows(prompt, width), hashes, -(-num_blocks // 2), style)
    return prompt_logprobs(pieces), openai_logprobs(pieces)


@pytest.mark.parametrize("kept_bytes", [1 << 20, 8000], ids=["room for all", "room for few"])
def test_pieces_make_up_what_is_written_at_once(strings, monkeypatch, kept_bytes):
    """Prompts that branch at random, in several styles and widths, with any number of blocks from the cache."""
    monkeypatch.setattr(logprobs_json, "KEPT_BYTES", kept_bytes)
    writer = LogprobsWriter(strings, SIZE)
    rng = random.Random(3)
    prompts = [[0, 1, 2]]
    for _ in range(250):
        start = rng.choice(prompts[-20:])
        prompt = [0, *start[1 : rng.randint(1, len(start))], *[rng.randrange(1024) for _ in range(rng.randint(2, 20))]]
        prompts.append(prompt)
        width, style = rng.choice([1, 2, 4]), rng.choice(STYLES)
        num_blocks = rng.randint(0, (len(prompt) - 1) // SIZE)
        answer = written(writer, prompt, width, style, num_blocks)
        assert answer == written(LogprobsWriter(strings, SIZE), prompt, width, style, 0)
        full, openai = map(json.loads, answer)
        assert len(full) == len(openai["tokens"]) == len(openai["text_offset"]) == len(prompt)
        assert sum(kept.num_bytes for kept in writer._kept.values()) <= kept_bytes
    assert writer._kept


def test_what_prompts_begin_with_is_written_once_more_and_then_kept(strings, monkeypatch):
    """The first prompt does not know where the second parts from it; the second does, and the third has it."""
    writer = LogprobsWriter(strings, SIZE)
    num_rows = []
    write = writer._write

    def counting(token_ids, columns, start, ends, style):
        num_rows.append(ends[-1] - start)
        return write(token_ids, columns, start, ends, style)

    monkeypatch.setattr(writer, "_write", counting)
    shared = list(range(5, 46))
    for num_cached, end in [(0, 1), (10, 2), (10, 3), (12, 3)]:
        prompt = shared + [end] * 9
        writer.prompt(prompt, rows(prompt, 2), block_hashes(prompt[1:]), num_cached, STYLES[0])
    assert num_rows == [49, 49, 9, 1]


def test_an_actual_token_among_the_likeliest_stands_once_with_its_place_there(strings):
    of_one = Rows.of(np.array([[7, 9, 7, 8]]), np.array([[-1.5, -0.5, -1.5, -2.0]], np.float32), np.array([40]))
    pieces = LogprobsWriter(strings, SIZE).prompt([5, 7], of_one, [], 0, STYLES[0])
    (_, row) = json.loads(prompt_logprobs(pieces))
    assert {token: (entry["logprob"], entry["rank"]) for token, entry in row.items()} == {
        "7": (-1.5, 2),
        "9": (-0.5, 1),
        "8": (-2.0, 3),
    }
