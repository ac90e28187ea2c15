"""Large responses, written while they are sent."""

import asyncio

import orjson

from scoremode_server.completions import handler
from scoremode_server.completions.handler import GAP, filled, in_turns
from scoremode_server.scoring.scorer import Turns


def test_gaps_are_filled_in_order_each_when_it_is_reached():
    content = {"a": GAP, "text": "\0 \\u0000", "choices": [{"b": GAP, "c": None}, {"b": GAP}]}
    events = []
    fillings = (events.append("asked") or filling for filling in ([b"[1", b",2]"], [b"", b"3"], [b"null"]))
    for part in filled(content, fillings):
        events += [part]
    middle = b',"text":"\\u0000 \\\\u0000","choices":[{"b":'
    assert events[:6] == [b'{"a":', "asked", b"[1", b",2]", middle, "asked"]
    assert orjson.loads(b"".join(part for part in events if part != "asked")) == {
        "a": [1, 2],
        "text": "\0 \\u0000",
        "choices": [{"b": 3, "c": None}, {"b": None}],
    }


async def test_other_tasks_run_between_two_large_parts(monkeypatch):
    monkeypatch.setattr(handler, "HELD_SECONDS", -1)
    events = []

    async def other() -> None:
        for _ in range(3):
            events.append("other")
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    sent = [
        part async for part in in_turns((events.append(part) or part for part in (b"a", b"", b"b")), Turns(at_once=1))
    ]
    await running
    assert b"".join(sent) == b"ab"
    assert events == ["other", b"a", "other", b"", "other", b"b"]
    # Small parts are sent as one.
    monkeypatch.setattr(handler, "HELD_SECONDS", 60)
    assert [part async for part in in_turns([b"a", b"b", b"c"], Turns())] == [b"abc"]
