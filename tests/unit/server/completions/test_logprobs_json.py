"""Logprobs as JSON: put together from pieces that were kept, they are what is written at once."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm.entrypoints.generate.base.serving import clamp_prompt_logprobs
from vllm.logprobs import create_prompt_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from scoremode_server.completions import logprobs_json
from scoremode_server.completions.logprobs_json import LogprobsWriter, Style, openai_logprobs, prompt_logprobs
from scoremode_server.rows import Rows
from scoremode_server.scoring.token_strings import TokenStrings
from tests.unit.server.completions.test_prompt_texts import SIZE, block_hashes

STYLES = [Style(1, False), Style(0, False), Style(2, True), Style(None, False)]


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
    pieces = list(writer.prompt(prompt, rows(prompt, width), hashes, -(-num_blocks // 2), style))
    full = b"".join(prompt_logprobs(pieces))
    return full, b"" if style.num_top is None else openai_logprobs([piece.openai for piece in pieces])


@pytest.mark.parametrize(
    ("kept_bytes", "piece_entries"),
    [(1 << 20, 16_384), (8000, 16_384), (1 << 20, 20)],
    ids=["room for all", "room for few", "small pieces"],
)
def test_pieces_add_up_to_the_json_that_is_written_at_once(strings, monkeypatch, kept_bytes, piece_entries):
    """Prompts that branch at random, in several styles and widths, with any number of blocks from the cache."""
    monkeypatch.setattr(logprobs_json, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(logprobs_json, "PIECE_ENTRIES", piece_entries)
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
        assert len(json.loads(answer[0])) == len(prompt)
        if answer[1]:
            openai = json.loads(answer[1])
            assert len(openai["tokens"]) == len(openai["text_offset"]) == len(openai["top_logprobs"]) == len(prompt)
        assert sum(kept.num_bytes for kept in writer._kept.values()) <= kept_bytes
    assert writer._kept


@pytest.mark.parametrize(("width", "num_written"), [(2, [49, 49, 9, 1]), (33, [49, 49, 49, 49])])
def test_common_prefixes_are_kept_unless_their_rows_are_wide(strings, monkeypatch, width, num_written):
    """Four prompts of 50 tokens share 41, of which the cache has ever more. The first does not know where the second
    differs from it; the second does, and the third reuses what was written."""
    writer, num_rows = LogprobsWriter(strings, SIZE), []
    write = writer._write

    def counting(token_ids, rows, start, end, style):
        num_rows[-1] += end - start
        return write(token_ids, rows, start, end, style)

    monkeypatch.setattr(writer, "_write", counting)
    for num_cached, end in [(0, 1), (10, 2), (10, 3), (12, 3)]:
        num_rows.append(0)
        prompt = [*range(5, 46), *[end] * 9]
        list(writer.prompt(prompt, rows(prompt, width), block_hashes(prompt[1:]), num_cached, STYLES[0]))
    assert num_rows == num_written
    assert bool(writer._kept) == (width < 33)


def test_each_piece_is_written_only_when_it_is_needed(strings, monkeypatch):
    """So the event loop runs other tasks between two of them, and no answer is in memory as a whole."""
    monkeypatch.setattr(logprobs_json, "PIECE_ENTRIES", 30)
    writer = LogprobsWriter(strings, SIZE)
    prompt = list(range(5, 55))
    sizes = [
        len(json.loads(b"[%b]" % piece.full)) for piece in writer.prompt(prompt, rows(prompt, 3), [], 0, STYLES[3])
    ]
    assert sizes == [1, 10, 10, 10, 10, 9]


@pytest.mark.parametrize("model", ["random_model", "byte_fallback_model"])
def test_prompt_logprobs_equal_those_of_vllms_own_objects(request, model):
    """Tokens of any kind, bytes among them: byte-level ones, and those of SentencePiece's kind."""
    tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue(model))
    writer = LogprobsWriter(TokenStrings(lambda: tokenizer), SIZE)
    rng = random.Random(5)
    characters = tokenizer.encode("日本語, naïve 🙂👩‍👧 " * 2, add_special_tokens=False)
    for width in (1, 2, 3, 9, 101):
        prompt = [rng.randrange(1024) for _ in range(40)] + characters
        of_prompt = rows(prompt, width)
        of_prompt.logprobs[3, 0] = -np.inf
        # A token that stands twice has one logprob.
        is_actual = of_prompt.token_ids == of_prompt.token_ids[:, :1]
        of_prompt.logprobs[:] = np.where(is_actual, of_prompt.logprobs[:, :1], of_prompt.logprobs)
        ours = json.loads(b"".join(prompt_logprobs(writer.prompt(prompt, of_prompt, [], 0, STYLES[3]))))
        assert [position and list(position.items()) for position in ours] == of_vllm(tokenizer, of_prompt, width)


def of_vllm(tokenizer, rows: Rows, width: int) -> list[list[tuple[str, dict[str, object]]] | None]:
    """Entries of each position, in vLLM's order, as its completions handler returns them."""
    processor = LogprobsProcessor(tokenizer, None, create_prompt_logprobs(False), None, None, width - 1)
    columns = (torch.from_numpy(array.copy()) for array in (rows.token_ids, rows.logprobs, rows.ranks))
    processor._update_prompt_logprobs(LogprobsTensors(*columns))
    return [
        position and [(str(token_id), asdict(logprob)) for token_id, logprob in position.items()]
        for position in clamp_prompt_logprobs(processor.prompt_logprobs)
    ]


def test_two_rows_are_written_as_vllm_writes_them():
    """The second's actual token is also the top one, whose rank it gets; OpenAI's `top_logprobs` has one more."""
    ids = np.array([[7, 9, 8], [6, 6, 5]])
    of_two = Rows.of(ids, np.array([[-1.5, -0.5, -2], [-0.25, -0.25, -3]], np.float32), np.array([40, 7]))
    pieces = list(LogprobsWriter(Letters(), SIZE).prompt([5, 7, 6], of_two, [], 0, STYLES[0]))
    assert b"".join(prompt_logprobs(pieces)).decode() == (
        '[null,{"7":{"logprob":-1.5,"rank":40,"decoded_token":"h"},"9":{"logprob":-0.5,"rank":1,"decoded_token":"j"},'
        '"8":{"logprob":-2.0,"rank":2,"decoded_token":"i"}},{"6":{"logprob":-0.25,"rank":1,"decoded_token":"g"},'
        '"5":{"logprob":-3.0,"rank":2,"decoded_token":"f"}}]'
    )
    assert openai_logprobs([piece.openai for piece in pieces]).decode() == (
        '{"text_offset":[0,1,2],"token_logprobs":[null,-1.5,-0.25],"tokens":["f","h","g"],'
        '"top_logprobs":[null,{"h":-1.5,"j":-0.5},{"g":-0.25,"f":-3.0}]}'
    )


class Letters:
    """Stands in for `TokenStrings`: token 0 is a, 1 is b."""

    def json_of(self, token_ids: Sequence[int]) -> list[str]:
        return [f'"{chr(ord("a") + token_id)}"' for token_id in token_ids]

    def first_of_a_prompt(self, token_id: int) -> str:
        return self.json_of([token_id])[0]
