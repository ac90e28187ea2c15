"""Rendering of conversations: how often, what is encoded, and how it ends with its request."""

import asyncio
import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from scoremode_server.errors import BusyError
from scoremode_server.http.requests import CLIENT_CLOSED_REQUEST
from scoremode_server.scoring import conversations, rendering
from scoremode_server.scoring.rendering import MAX_REQUESTS, THREADS, RenderingThreads, TextEncoder
from scoremode_server.vllm_compat.engine_client import drop_canceled_texts
from tests.models import MARKED_TEMPLATE
from tests.unit.server.engine.cache_setup import LARGE
from tests.unit.server.light_app import app_with_completions, client_of, error_of, leaving
from tests.unit.server.scoring.chat_templates import TEMPLATES, Served

TURNS = "/v1/turns"
SPECIAL = ["<|im_start|>", "<|im_end|>"]
pieces = st.lists(
    st.sampled_from([*SPECIAL, "</s>", "a", "the ", " the", "\n", "\n\n", " ", "é", "🤖", "<|im"]), max_size=12
)


@pytest.fixture(params=["random_model", "byte_fallback_model"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue(request.param))
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


def chat(num_messages: int, words: str = "Some words. ") -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[place % 2], "content": words * (1 + place % 3)} for place in range(num_messages)
    ]


def test_what_begins_alike_has_the_tokens_of_the_whole_text(tokenizer):
    @given(pieces, pieces, pieces)
    def check(beginning: list[str], one: list[str], other: list[str]) -> None:
        first, second = ("".join(beginning + rest) for rest in (one, other))
        lengths: list[int] = []
        encoder = TextEncoder(tokenizer, first, lengths.append)
        assert encoder.token_ids == tokenizer(first, add_special_tokens=False)["input_ids"]
        assert encoder.encode(second) == tokenizer(second, add_special_tokens=False)["input_ids"]
        kept = max((first.rfind(token, 0, len(first)) for token in SPECIAL), default=0)
        if first == second and kept > 0:
            assert lengths[-1] <= len(first) - kept

    check()


def counted(app: Any) -> tuple[float, float]:
    """Renderings, and characters encoded."""
    metrics = app.state.scoremode.conversations.metrics
    return tuple(each.collect()[0].samples[0].value for each in (metrics.renderings, metrics.encoded_characters))


@pytest.mark.parametrize("family", ["smollm3", "chatml"])
async def test_work_grows_with_the_length_of_a_conversation(served: Served, family: str):
    """One rendering is enough if there are marks. Otherwise a turn has three at most, and its beginning is not encoded
    again."""
    model = served(TEMPLATES[family])
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100_000}))
    app = app_with_completions(model)
    found = {}
    async with client_of(app) as client:
        for num_messages in (20, 200):
            before = counted(app)
            answer = await client.post(TURNS, json={"messages": chat(num_messages)})
            assert sum(len(each["turns"]) for each in answer.json()["data"]) == num_messages // 2
            found[num_messages] = [after - earlier for after, earlier in zip(counted(app), before, strict=True)]
    if family == "smollm3":
        assert (found[20][0], found[200][0]) == (1, 1)
    else:
        assert found[200][0] <= 1 + 3 * 100
    assert found[200][1] < 11 * found[20][1]


class Held:
    """Renderings that do not end before they may."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.num_begun = threading.Event(), threading.Event(), 0
        self._render = conversations.safe_apply_chat_template

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_begun += 1
        self.begun.set()
        assert self.may_end.wait(60)
        return self._render(*args, **options)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    monkeypatch.setattr(conversations, "safe_apply_chat_template", held)
    yield held
    held.may_end.set()


async def test_rendering_ends_when_its_client_leaves_and_counts_until_then(served: Served, held: Held, monkeypatch):
    monkeypatch.setattr(rendering, "MAX_REQUESTS", 1)
    app = app_with_completions(served(TEMPLATES["chatml"]))
    leave, body = asyncio.Event(), {"messages": chat(6)}
    async with client_of(app) as client:
        leaves = asyncio.create_task(leaving(app, TURNS, body, leave))
        assert await asyncio.to_thread(held.begun.wait, 60)
        leave.set()
        assert (await asyncio.wait_for(leaves, 60))[0]["status"] == CLIENT_CLOSED_REQUEST
        answer = await client.post(TURNS, json=body)
        assert error_of(answer)[0] == 429
        assert int(answer.headers["Retry-After"]) > 0
        held.may_end.set()
        while (answer := await client.post(TURNS, json=body)).status_code == 429:
            pass
    assert answer.status_code == 200
    # The request whose client left had one rendering. The other one had one for the whole, and two for each turn but
    # the last.
    assert held.num_begun == 1 + 1 + 2 * 3 - 1


class Body(str):
    """A body that a weak reference can be made of."""


async def test_clients_that_leave_hold_no_place_and_no_body():
    """But for those that are being rendered, as many as there are threads."""
    threads, may_end, bodies = RenderingThreads(), threading.Event(), list[weakref.ref[Body]]()
    for _ in range(500):
        body = Body("a body")
        bodies.append(weakref.ref(body))
        request = asyncio.create_task(threads.run(lambda _, body=body: may_end.wait() and body))
        del body
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait([request])
        del request
    assert sum(body() is not None for body in bodies) == THREADS
    waiting = [asyncio.create_task(threads.run(lambda _: 5)) for _ in range(MAX_REQUESTS)]
    refused = [task for task in waiting if (await asyncio.sleep(0), task.done())[1]]
    assert len(refused) == THREADS
    may_end.set()
    assert sorted(map(type, await asyncio.gather(*waiting, return_exceptions=True)), key=str) == (
        [int] * (MAX_REQUESTS - THREADS) + [BusyError] * THREADS
    )


async def test_texts_of_clients_that_left_are_not_kept_until_a_thread_is_free(random_model):
    app, may_end, texts = app_with_completions(random_model), threading.Event(), list[weakref.ref[Body]]()
    renderer, tokenizer = app.state.scoremode.client.renderer, app.state.scoremode.tokenizer
    drop_canceled_texts(app.state.scoremode.client)
    hang = [renderer._executor.submit(may_end.wait) for _ in range(renderer._executor._max_workers)]
    for _ in range(100):
        text = Body("a text")
        texts.append(weakref.ref(text))
        request = asyncio.create_task(tokenizer.encode(text, False))
        del text
        for _ in range(10):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait([request])
        del request
    assert sum(text() is not None for text in texts) == 0
    may_end.set()
    assert await tokenizer.encode("words", False)
    assert all(future.result() for future in hang)


@pytest.mark.parametrize(
    ("route", "seconds", "status"), [(TURNS, 1.0, 504), ("/v1/score", 1.0, 504), (TURNS, None, 503)]
)
async def test_rendering_ends_with_the_time_of_its_request_and_with_the_server(
    served: Served,
    held: Held,
    route: str,
    seconds: float | None,
    status: int,
):
    app = app_with_completions(served(TEMPLATES["chatml"]), size=replace(LARGE, request_timeout=seconds))
    async with client_of(app) as client:
        request = asyncio.create_task(client.post(route, json={"messages": chat(6)}))
        assert await asyncio.to_thread(held.begun.wait, 60)
        if seconds is None:
            await app.state.scoremode.admission.drain(0)
        assert error_of(await asyncio.wait_for(request, 60))[0] == status


class Counted(list[str]):
    """Texts of a message, and how often they are looked for."""

    num_looks = 0

    def __iter__(self) -> Iterator[str]:
        Counted.num_looks += 1
        return super().__iter__()


@pytest.mark.parametrize("order", ["messages", "messages | reverse"])
async def test_what_is_marked_is_looked_for_where_it_follows(served: Served, order: str, monkeypatch):
    """Turns are looked up once each, not once per pair, and their texts are found in a template with another order
    too."""
    template = MARKED_TEMPLATE.replace("in messages", f"in ({order})")
    app, texts_of = app_with_completions(served(template)), conversations._texts_of
    app.state.scoremode.conversations.limits = replace(app.state.scoremode.limits, max_model_len=10**7)
    monkeypatch.setattr(conversations, "_texts_of", lambda message: Counted(texts_of(message)))
    monkeypatch.setattr(Counted, "num_looks", 0)
    messages = [{"role": ("user", "assistant")[place % 2], "content": f"This is {place}."} for place in range(400)]
    async with client_of(app) as client:
        answer = await client.post(TURNS, json={"messages": messages})
    assert len(answer.json()["data"][0]["turns"]) == 200
    if order == "messages":
        assert Counted.num_looks <= 2 * 200


async def test_thousands_of_tags_are_read_once(served: Served):
    """A pattern that looks for the end of each would take minutes."""
    app = app_with_completions(served(TEMPLATES["chatml"]))
    app.state.scoremode.conversations.limits = replace(app.state.scoremode.limits, max_model_len=10**7)
    contents = ["<think>" * 60_000, "<think>a</think>" * 20_000, "</think>" * 60_000]
    async with client_of(app) as client:
        for content in contents:
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
            answer = await asyncio.wait_for(client.post(TURNS, json={"messages": messages}), 20)
            assert answer.status_code == 200, answer.text
