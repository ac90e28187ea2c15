"""Our handlers of completions and of token ids around vLLM's, on the fake engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from scoremode_server.completions import handler
from scoremode_server.completions.handler import GAP, filled
from scoremode_server.completions.routes import GENERATE
from scoremode_server.engine.admission import EngineSize
from tests.bad_inputs import COMPLETIONS, LONG_NAME
from tests.unit.server.light_app import app_with_completions, client_of, error_of

ECHO = {"prompt": [[5, 6, 7], [8, 9]], "echo": True, "logprobs": 1, "max_tokens": 1}
TRL = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True}
PRIME_RL = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1, "logprobs": 1}}


@pytest.mark.parametrize("body", [ECHO, TRL, PRIME_RL, ECHO | {"prompt_logprobs": 3}])
async def test_a_large_response_is_written_in_parts_and_is_the_same(random_model: Path, monkeypatch, body):
    route = GENERATE if "token_ids" in body else COMPLETIONS
    async with client_of(app_with_completions(random_model)) as client:
        at_once = (await client.post(route, json=body, headers={"X-Request-Id": "the same"})).json()
        monkeypatch.setattr(handler, "WRITTEN_AT_ONCE", 0)
        in_parts = (await client.post(route, json=body, headers={"X-Request-Id": "the same"})).json()
    assert in_parts | {"created": 0} == at_once | {"created": 0}
    assert "error" not in at_once


async def test_the_generate_route_refuses_with_the_name_of_the_field(random_model: Path):
    size = EngineSize(tokens=3072, sequences=192, max_scoring_tokens=3)
    async with client_of(app_with_completions(random_model, size)) as client:
        for change, error in (
            ({"model": LONG_NAME}, (404, "model")),
            ({"token_ids": [5, -1]}, (400, "token_ids")),
            ({"token_ids": [5] * 5}, (413, "token_ids")),
            ({"cache_salt": "a" * 2**24}, (413, None)),
            # vLLM's own errors of these name no field.
            ({"features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}}, (400, "features")),
            ({"features": {"mm_hashes": {}, "mm_placeholders": {"image": []}}}, (400, "features")),
            ({"features": {"mm_hashes": {}, "mm_placeholders": {}, "mm_metadata": {"image": []}}}, (400, "features")),
        ):
            *found, message = error_of(await client.post(GENERATE, json=PRIME_RL | change))
            assert (tuple(found), len(message) < 1000) == (error, True)


@pytest.mark.parametrize(("route", "body"), [(COMPLETIONS, ECHO | {"prompt": [5, 6, 7]}), (GENERATE, PRIME_RL)])
async def test_an_answer_is_written_in_its_turn(random_model: Path, monkeypatch, route: str, body: dict[str, Any]):
    app = app_with_completions(random_model)
    handlers, turns, is_in_turn = app.state.scoremode_completions, set[str](), list[bool]()

    async def wait() -> None:
        turns.add("this")
        asyncio.get_running_loop().call_soon(turns.clear)

    def written(*given: Any) -> Iterator[bytes]:
        is_in_turn.append(bool(turns))
        return filled(*given)

    for each in (handlers[COMPLETIONS], handlers[GENERATE]):
        monkeypatch.setattr(each.core.scorer.pacer, "wait", wait)
    monkeypatch.setattr(handler, "filled", written)
    async with client_of(app) as client:
        assert (await client.post(route, json=body)).status_code == 200
    assert is_in_turn == [True]


def test_gaps_are_filled_in_order_each_when_it_is_reached():
    content = {"a": GAP, "text": "\0 \\u0000", "choices": [{"b": GAP, "c": None}, {"b": GAP}]}
    events = []
    fillings = (events.append("asked") or filling for filling in ([b"[1", b",2]"], [b"", b"3"], [b"null"]))
    for part in filled(content, fillings):
        events += [part]
    assert events[:6] == [b'{"a":', "asked", b"[1", b",2]", b',"text":"\\u0000 \\\\u0000","choices":[{"b":', "asked"]
    assert orjson.loads(b"".join(part for part in events if part != "asked")) == {
        "a": [1, 2],
        "text": "\0 \\u0000",
        "choices": [{"b": 3, "c": None}, {"b": None}],
    }
