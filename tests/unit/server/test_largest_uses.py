"""The bounds of server and client, at the largest right requests of `tests/largest_uses.py` and the answers to them."""

import asyncio
import gc
import json
import tracemalloc
from argparse import Namespace
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

from scoremode import ScoreClient
from scoremode.kld import POSITION_DTYPES, KldPositions, statistics
from scoremode.wire import Bounds, NoiseFloor, Reference, ReferenceWindows
from scoremode.wire.calls import Call
from scoremode.wire.protocol import PerplexityRequest, PerplexityWindow, ScoreRequest, TokensRequest, TurnsRequest
from scoremode.wire.references import KldRequest, ReferenceRequest
from scoremode_server.app import engine_size, published_bounds
from scoremode_server.completions.requests import CompletionBody
from scoremode_server.engine import admission
from scoremode_server.engine.admission import Admission
from scoremode_server.errors import BusyError
from scoremode_server.http.json_fields import read_fields
from scoremode_server.http.responses import dump
from scoremode_server.references.answers import answer_windows
from scoremode_server.references.routes import _window
from scoremode_server.references.worker.packing import ComparedRows
from scoremode_server.rows import Rows
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.routes import _result
from scoremode_server.scoring.sequences import RequestedSequence, ScoringPass
from scoremode_server.settings import MAX_REQUEST_BYTES, MAX_SCORING_TOKENS, MAX_SEQUENCES, server_settings
from tests import largest_uses as largest
from tests.unit.server.engine.cache_setup import LARGE
from tests.unit.server.engine.fake_engine import HeldEngine
from tests.unit.server.light_app import BLOCK_SIZE, check_error, client_of, light_app

MODELS = {
    largest.REFERENCES: ReferenceRequest,
    largest.PERPLEXITY: PerplexityRequest,
    largest.SCORE: ScoreRequest,
    "/v1/turns": TurnsRequest,
    "/v1/tokens": TokensRequest,
    "/v1/kld": KldRequest,
    "/v1/completions": CompletionBody,
    "/inference/v1/generate": GenerateRequest,
}
LIMITS = Limits(largest.CONTEXT, largest.TOKEN_ID + 1, 256, MAX_SEQUENCES, MAX_REQUEST_BYTES)
CONFIG: Any = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=256),
    parallel_config=SimpleNamespace(data_parallel_size=1),
    cache_config=SimpleNamespace(kv_cache_size_tokens=24_576),
    max_concurrent_batches=2,
)
SIZE = engine_size(CONFIG, server_settings(Namespace()))
BOUNDS = published_bounds(LIMITS, SIZE)
SERVED = {"model": "m", "dtype": "bfloat16", "quantization": None, "scoremode_version": "1", "vllm_version": "1"}
REFERENCE = Reference.model_construct(name="a", num_windows=1, num_tokens=1)


def test_every_bound_is_published():
    assert BOUNDS.model_fields_set == Bounds.model_fields.keys()
    assert (BOUNDS.request_bytes, BOUNDS.recording_bytes) == (16 * 2**20, 64 * 2**20)


@pytest.mark.parametrize("name", largest.REQUESTS)
def test_the_largest_right_request_is_read(name):
    route, content = largest.REQUESTS[name][0], largest.body(name)
    assert len(content) <= (BOUNDS.recording_bytes if route == largest.REFERENCES else BOUNDS.request_bytes)
    request = MODELS[route].model_validate(read_fields(content))
    if getattr(request, "answers", None) is not None:
        texts = answer_windows(request, request.answers, LIMITS)
        assert len(texts.windows) == len(request.answers.data) == len(request.labels)


@pytest.mark.parametrize(("encoding", "values"), largest.VALUES.values(), ids=largest.VALUES)
def test_the_largest_right_answer_is_written(encoding, values):
    LIMITS.check_num_sequences(len(values), "prompt")
    LIMITS.check_num_values(values, encoding)


@pytest.mark.parametrize("change", [{"token_ids": [5, "x"]}, {"prompt_token_ids": [-1]}, {"tokens": [1]}, {"text": 1}])
def test_a_wrong_value_deep_in_answers_is_one_short_error(change):
    fields = {"name": "a", **largest.answers(number=50_000, prompt=8, answer=8)}
    fields["answers"]["data"][40_000] = {**fields["answers"]["data"][0], **change}
    with pytest.raises(ValueError, match="ReferenceRequest") as caught:
        ReferenceRequest.model_validate(read_fields(json.dumps(fields).encode()))
    (error,) = caught.value.errors(include_url=False, include_input=False)
    assert error["loc"][:4] == ("answers", "data", 40_000, next(iter(change)))


async def test_a_recording_may_be_four_times_as_long_as_another_request():
    async with client_of(light_app(max_request_bytes=1000)) as client:
        for length, status, message in ((3900, 404, "no folder"), (4000, 413, "4000 bytes, which is 4 times this")):
            content = {"name": "a", "prompt": "x" * length}
            check_error(await client.post(largest.REFERENCES, json=content), status, None, message)
        message = "1000 bytes, which is this server's --max-request-bytes"
        check_error(await client.post(largest.SCORE, json={"prompt": "x" * 1000}), 413, None, message)


async def abort(request_ids: list[str]) -> None:
    """Nothing is in an engine."""


async def test_what_waits_is_accepted_with_little_kv_cache(monkeypatch):
    """32 requests of 16 prompts of 820 tokens, each with four options."""
    held = Admission(SIZE, abort, lambda *counts: None)
    async with AsyncExitStack() as requests:
        for _ in range(32):
            await requests.enter_async_context(held.request(64, 64 * 823))
        assert held.num_tokens == 1_685_504 > 16 * 24_576
        monkeypatch.setattr(admission, "MAX_WAITING_SEQUENCES", held.num_sequences + 2)
        held.check(2, 2)
        with pytest.raises(BusyError, match="2048 of at most 2050 sequences wait"):
            held.check(3, 3)
    # A request that fits alone is accepted.
    held.check(2 * MAX_SEQUENCES, MAX_SCORING_TOKENS)


async def test_a_token_that_waits_takes_no_more_memory_than_is_said():
    """75 bytes a token, and seven kilobytes a sequence: through the route, with an engine that does not answer."""
    app, token_ids = light_app(HeldEngine(BLOCK_SIZE), size=replace(LARGE, max_scoring_tokens=2**20)), range(300, 1000)
    content = json.dumps({"prompt": [[*token_ids, *token_ids]] * 64})
    headers = {"Content-Type": "application/json"}
    async with client_of(app) as client:
        gc.collect()
        tracemalloc.start()
        try:
            posts = [
                asyncio.create_task(client.post(largest.SCORE, content=content, headers=headers)) for _ in range(4)
            ]
            while app.state.scoremode.admission.num_sequences < 4 * 64:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            gc.collect()
            num_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        for post in posts:
            post.cancel()
            with suppress(asyncio.CancelledError):
                await post
    assert num_bytes < 4 * 64 * (75 * 1400 + 7000)


def allowed(make: Any) -> int:
    """The bytes that a client reads of the answer to a request."""
    client = ScoreClient("http://a")
    client.reference, client.send = (lambda name: REFERENCE), (lambda call: call)  # type: ignore[method-assign]
    call: Call[Any] = make(client)
    response = httpx.Response(200, request=httpx.Request(call.method, "http://a", json=call.body))
    return call.receiver(response, call.new_reader()).max_bytes


def compared(num_scored: int, num_top: int, encoding: str = "base64") -> bytes:
    """The event of a window."""
    positions = {
        name: np.full(num_scored, 2**31 - 1 if dtype == "<i4" else -12.3456789, dtype)
        for name, dtype in POSITION_DTYPES.items()
    }
    top = (np.full((num_scored, num_top), 2**31 - 1, np.int32), np.full((num_scored, num_top), -12.3456789, np.float32))
    rows = ComparedRows(KldPositions(**positions), dict.fromkeys(("top_logprobs", "reference_top_logprobs"), top))
    request = KldRequest(reference="a", top_logprobs=num_top, encoding_format=encoding)
    return b"data: %b\n\n" % dump(_window(request, largest.SEQUENCES, rows))


@pytest.mark.parametrize(("num_windows", "num_scored"), largest.COMPARED)
@pytest.mark.parametrize("num_top", [0, 1, 5, 256])
def test_a_client_reads_a_whole_comparison(num_windows, num_scored, num_top):
    # Each position takes as much as the last of four.
    few, more = (len(compared(number, num_top)) for number in (1, 4))
    num_bytes = num_windows * (few + (num_scored - 1) * -(-(more - few) // 3))
    figures = statistics(KldPositions(**{name: np.ones(50, dtype) for name, dtype in POSITION_DTYPES.items()}), [50])
    assert num_bytes + 2 * len(dump(figures)) < allowed(
        lambda client: client.kld("a", top_logprobs=num_top, num_positions=num_windows * num_scored)
    )


def test_the_least_event_of_a_window_has_the_size_that_is_said():
    assert len(compared(1, 1)) <= 512
    assert len(compared(1, 0, "float")) <= 512


@pytest.mark.parametrize(
    ("num_windows", "num_prompt", "label"),
    [
        (largest.PROMPTS, largest.PROMPT_TOKENS, "a label"),
        (largest.PROMPTS, 1500, None),
        (largest.SEQUENCES, 100, "a label"),
        (largest.DOCUMENTS, 100, "标" * 1024),
    ],
)
def test_a_client_reads_where_all_windows_of_a_reference_are_from(monkeypatch, num_windows, num_prompt, label):
    one = ReferenceWindows(
        name="a",
        text_fingerprint="x" * 32,
        num_context=[largest.TOKEN_ID],
        documents=[largest.SEQUENCES],
        labels=label and [label],
        roles=["assistant"],
        prompts=[largest.tokens(num_prompt)],
    )
    monkeypatch.setattr(REFERENCE, "num_windows", num_windows)
    monkeypatch.setattr(REFERENCE, "num_tokens", num_windows * num_prompt)
    assert num_windows * len(one.model_dump_json().encode()) < allowed(lambda client: client.reference_windows("a"))
    # A server cannot say how much a client reads.
    monkeypatch.setattr(REFERENCE, "num_tokens", 2**60)
    assert allowed(lambda client: client.reference_windows("a")) <= 2**27 + 2**20


def test_a_client_reads_a_reference_with_floors_of_all_answers():
    lengths = [largest.ANSWER_TOKENS] * largest.SEQUENCES
    floor = NoiseFloor(mean=0, p99=0, max=0, num_scored=1, created=1, agreement_lengths=lengths)
    content = 3 * len(floor.model_dump_json())
    assert content < allowed(lambda client: ScoreClient.reference(client, "a"))


# Not in its encoding: a tokenizer without such characters has a token for each byte.
@pytest.mark.parametrize("prompt", [largest.tokens(500), "😀" * 125], ids=["tokens", "text"])
@pytest.mark.parametrize("num_top", [0, 20, 256])
def test_a_client_reads_scores_with_everything(prompt, num_top):
    fields: Any = {"top_logprobs": num_top, "return_ranks": True, "return_tokens": True}
    token_ids, shape = largest.tokens(500), (499, 1 + num_top)
    rows = Rows.from_arrays(np.full(shape, 262_143), np.full(shape, -12.3456789), np.full(499, 262_144))
    sequence = RequestedSequence(context=token_ids, first=0, targets=token_ids, prompt_index=0)
    strings: Any = SimpleNamespace(texts_of=lambda ids: ["\ufffd" * 20] * len(ids))
    request = ScoreRequest(prompt=prompt, encoding_format="base64", **fields)
    result = _result(request, strings, sequence, ScoringPass(sequence, {262_143: 0}), SimpleNamespace(rows=rows))
    assert len(dump(result)) < allowed(lambda client: client.score(prompt, **fields)) - 2**20


def test_a_client_reads_all_windows_of_a_text():
    window = PerplexityWindow(
        index=largest.SEQUENCES,
        num_windows=largest.SEQUENCES,
        num_scored=1,
        nll_sum=12.3456789012345678,
        total_scored=largest.SEQUENCES,
        perplexity=12.3456789012345678,
    )
    event = len(window.model_dump_json()) + len("data: \n\n")
    assert largest.SEQUENCES * event < allowed(lambda client: client.perplexity([1] * largest.SEQUENCES, stride=1))
    # With logprobs and ranks of each target.
    target = len(f"{-12.3456789012345678},{largest.TOKEN_ID},")
    num_bytes = largest.POSITIONS * target + largest.SEQUENCES * event
    text = [1] * (largest.POSITIONS // 64)
    assert num_bytes < allowed(lambda client: client.record_reference("a", text, return_ranks=True, stride=32))
