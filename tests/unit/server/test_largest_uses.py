"""The bounds of server and client, at the largest right requests of `tests/largest_uses.py` and the answers to them."""

import asyncio
import gc
import json
import tracemalloc
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
from scoremode.wire.references import KldRequest, ReferenceRequest, ReferenceRoutes
from scoremode_server.app import published_bounds
from scoremode_server.completions.requests import CompletionBody
from scoremode_server.engine.admission import MAX_WAITING_SEQUENCES, Admission, cancel_and_wait
from scoremode_server.engine.sequence import TokenSequence
from scoremode_server.errors import BusyError
from scoremode_server.http.json_fields import read_fields
from scoremode_server.http.responses import dump
from scoremode_server.references.answers import answer_windows
from scoremode_server.references.comparison import _positions
from scoremode_server.references.routes import _window
from scoremode_server.references.worker.orders import compared_columns
from scoremode_server.rows import Rows, score_columns
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.routes import _result
from scoremode_server.settings import MAX_REQUEST_BYTES, MAX_SCORING_TOKENS, MAX_SEQUENCES
from tests import largest_uses as largest
from tests.unit.server.engine.cache_setup import LARGE
from tests.unit.server.engine.fake_engine import HeldEngine, until
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
SIZE = replace(LARGE, max_scoring_tokens=MAX_SCORING_TOKENS)
"""As a server has it, whatever its KV cache holds."""
BOUNDS = published_bounds(LIMITS, SIZE)


def test_every_bound_is_published():
    assert BOUNDS.model_fields_set == Bounds.model_fields.keys()


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
    fields = {"name": "a", **largest.answers(prompt=8, answer=8)}
    fields["answers"]["data"][900] = {**fields["answers"]["data"][0], **change}
    with pytest.raises(ValueError, match="ReferenceRequest") as caught:
        ReferenceRequest.model_validate(read_fields(json.dumps(fields).encode()))
    (error,) = caught.value.errors(include_url=False, include_input=False)
    assert error["loc"][:4] == ("answers", "data", 900, next(iter(change)))


async def test_a_recording_may_be_four_times_as_long_as_another_request():
    async with client_of(light_app(max_request_bytes=1000)) as client:
        for length, status, message in ((3900, 404, "no folder"), (4000, 413, "4000 bytes, which is 4 times this")):
            content = {"name": "a", "prompt": "x" * length}
            check_error(await client.post(largest.REFERENCES, json=content), status, None, message)
        message = "1000 bytes, which is this server's --max-request-bytes"
        check_error(await client.post(largest.SCORE, json={"prompt": "x" * 1000}), 413, None, message)


async def test_what_waits_is_accepted_with_little_kv_cache():
    """32 requests of 16 prompts of 820 tokens, each with four options, next to as many sequences as may wait."""
    held = Admission(SIZE, None, lambda *counts: None)  # type: ignore[arg-type]
    async with held.request(MAX_WAITING_SEQUENCES - 64, 31 * 64 * 823):
        held.check(64, 64 * 823)
        with pytest.raises(BusyError, match="131008 of at most 131072 sequences wait"):
            held.check(65, 65)
    # A request that fits alone is accepted.
    held.check(2 * MAX_SEQUENCES, MAX_SCORING_TOKENS)


async def test_a_token_that_waits_takes_no_more_memory_than_is_said():
    """75 bytes per token, and seven kilobytes per sequence: through the route, with an engine that does not answer."""
    app, token_ids = light_app(HeldEngine(BLOCK_SIZE), size=replace(LARGE, max_scoring_tokens=2**20)), range(300, 1000)
    body = {"prompt": [[*token_ids, *token_ids]] * 64}
    async with client_of(app) as client:
        tracemalloc.start()
        posts = [asyncio.create_task(client.post(largest.SCORE, json=body)) for _ in range(4)]
        await until(lambda: app.state.scoremode.admission.num_sequences == 4 * 64)
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await cancel_and_wait(*posts)
    assert num_bytes < 4 * 64 * (75 * 1400 + 7000)


def allowed(make: Any, **reference: int) -> int:
    """The bytes that a client reads of the answer to a request, about a reference that the server describes."""
    client = ScoreClient("http://a")
    client.reference = lambda name: Reference.model_construct(name=name, **reference)  # type: ignore[method-assign]
    client.send = lambda call: call  # type: ignore[method-assign]
    call: Call[Any] = make(client)
    response = httpx.Response(200, request=httpx.Request(call.method, "http://a", json=call.body))
    return call.receiver(response, call.new_reader()).max_bytes


def compared(num_scored: int, num_top: int, routes: ReferenceRoutes | None) -> bytes:
    """The event of a window."""
    columns = compared_columns(max(1, num_top), num_routed_layers=len(routes.layers) if routes else 0)
    rows = Rows.empty(num_scored, score_columns(1 + max(1, num_top)) + columns)
    for column in rows.columns:
        rows.column(column.name)[:] = 2**31 - 1 if column.dtype == "int32" else -12.3456789
    if routes is not None:
        rows.column("expert_agreement").view(np.int16)[:] = np.tile((routes.top_k, 1), len(routes.layers))
    request = KldRequest(reference="a", top_logprobs=num_top, encoding_format="base64")
    return b"data: %b\n\n" % dump(_window(request, routes, largest.SEQUENCES, rows, _positions(rows)))


@pytest.mark.parametrize(("num_windows", "num_scored"), largest.COMPARED)
@pytest.mark.parametrize("num_top", [0, 1, 5, 256])
@pytest.mark.parametrize("routes", [None, ReferenceRoutes(layers=["layer"] * 96, num_experts=512, top_k=16)])
def test_a_client_reads_a_whole_comparison(num_windows, num_scored, num_top, routes):
    # Each position takes as much as the last of four.
    few, more = (len(compared(number, num_top, routes)) for number in (1, 4))
    num_bytes = num_windows * (few + (num_scored - 1) * -(-(more - few) // 3))
    figures = statistics(KldPositions(**{name: np.ones(50, dtype) for name, dtype in POSITION_DTYPES.items()}), [50])
    assert num_bytes + 2 * len(dump(figures)) < allowed(
        lambda client: client.kld(
            "a",
            top_logprobs=num_top,
            num_positions=num_windows * num_scored,
            routes=None if routes is None else "own",
        )
    )


@pytest.mark.parametrize(
    ("num_windows", "num_prompt", "label"),
    [
        (largest.PROMPTS, largest.PROMPT_TOKENS, "a label"),
        (largest.PROMPTS, 1500, None),
        (largest.SEQUENCES, 100, "a label"),
        (largest.DOCUMENTS, 100, "标" * 1024),
    ],
)
def test_a_client_reads_where_all_windows_of_a_reference_are_from(num_windows, num_prompt, label):
    one = ReferenceWindows(
        name="a",
        text_fingerprint="x" * 32,
        num_context=[largest.TOKEN_ID],
        documents=[largest.SEQUENCES],
        labels=label and [label],
        roles=["assistant"],
        prompts=[largest.tokens(num_prompt)],
    )
    num_bytes = num_windows * len(one.model_dump_json().encode())
    most, claimed = (
        allowed(lambda client: client.reference_windows("a"), num_windows=num_windows, num_tokens=num_tokens)
        for num_tokens in (num_windows * num_prompt, 2**60)
    )
    assert num_bytes < most
    # A server cannot say how much a client reads.
    assert claimed <= 2**27 + 2**20


def test_a_client_reads_a_reference_with_floors_of_all_answers():
    lengths = [largest.ANSWER_TOKENS] * largest.SEQUENCES
    floor = NoiseFloor(mean=0, p99=0, max=0, num_scored=1, created=1, agreement_lengths=lengths)
    assert 3 * len(floor.model_dump_json()) < allowed(lambda client: ScoreClient.reference(client, "a"))


# Not in its encoding: a tokenizer without such characters has a token for each byte.
@pytest.mark.parametrize("prompt", [largest.tokens(500), "😀" * 125], ids=["tokens", "text"])
@pytest.mark.parametrize("num_top", [0, 20, 256])
def test_a_client_reads_scores_with_everything(prompt, num_top):
    fields: Any = {"top_logprobs": num_top, "return_ranks": True, "return_tokens": True}
    token_ids, shape = largest.tokens(500), (499, 1 + num_top)
    rows = Rows.from_arrays(np.full(shape, 262_143), np.full(shape, -12.3456789), np.full(499, 262_144))
    sequence = TokenSequence(context=token_ids)
    strings: Any = SimpleNamespace(texts_of=lambda ids: ["\ufffd" * 20] * len(ids))
    request = ScoreRequest(prompt=prompt, encoding_format="base64", **fields)
    result = _result(request, strings, sequence, SimpleNamespace(rows=rows, num_candidates=0))
    assert len(dump(result)) < allowed(lambda client: client.score(prompt, **fields)) - 2**20


def test_a_client_reads_all_windows_of_a_text():
    figures = dict.fromkeys(("nll_sum", "perplexity"), 12.3456789012345678)
    counts = dict.fromkeys(("index", "num_windows", "num_scored", "total_scored"), largest.SEQUENCES)
    num_bytes = largest.SEQUENCES * len(f"data: {PerplexityWindow(**figures, **counts).model_dump_json()}\n\n")
    assert num_bytes < allowed(lambda client: client.perplexity([1] * largest.SEQUENCES, stride=1))
    # Add logprobs and ranks of each target.
    num_bytes += largest.POSITIONS * len(f"{-12.3456789012345678},{largest.TOKEN_ID},")
    text = [1] * (largest.POSITIONS // 64)
    assert num_bytes < allowed(lambda client: client.record_reference("a", text, return_ranks=True, stride=32))
