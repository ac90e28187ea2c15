"""Large responses, written while they are sent."""

import asyncio
from collections.abc import Iterator

import orjson

from scoremode_server.completions import response_parts
from scoremode_server.completions.response_parts import GAP, filled, in_turns
from scoremode_server.scoring.turns import Turns


def test_gaps_are_filled_in_order():
    content = {"a": GAP, "text": "\0 \\u0000", "choices": [{"b": GAP, "c": None}, {"b": GAP}]}
    json = b"".join(filled(content, [[b"[1", b",2]"], [b"", b"3"], [b"null"]]))
    assert orjson.loads(json) == {
        "a": [1, 2],
        "text": "\0 \\u0000",
        "choices": [{"b": 3, "c": None}, {"b": None}],
    }


def test_a_filling_is_asked_for_when_its_gap_is_reached():
    asked = []

    def fillings() -> Iterator[list[bytes]]:
        for number in (1, 2):
            asked.append(number)
            yield [b"%d" % number]

    parts = filled({"a": GAP, "b": GAP}, fillings())
    assert [(next(parts), list(asked)) for _ in range(4)] == [
        (b'{"a":', []),
        (b"1", [1]),
        (b',"b":', [1]),
        (b"2", [1, 2]),
    ]


async def test_others_have_their_turn_between_parts(monkeypatch):
    monkeypatch.setattr(response_parts, "HELD_SECONDS", -1)
    events = []

    def parts() -> Iterator[bytes]:
        for part in (b"a", b"", b"b"):
            events.append(part)
            yield part

    async def other() -> None:
        for _ in range(3):
            events.append("other")
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    sent = [part async for part in in_turns(parts(), Turns(at_once=1))]
    await running
    assert b"".join(sent) == b"ab"
    assert events == ["other", b"a", "other", b"", "other", b"b"]


async def test_small_parts_are_sent_as_one():
    assert [part async for part in in_turns([b"a", b"b", b"c"], Turns())] == [b"abc"]
