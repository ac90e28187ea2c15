"""Server-sent events as the standard defines them, however the network cuts them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode.wire.calls import EventParser


def parse(*chunks: bytes) -> list[bytes]:
    parser = EventParser()
    return [data for chunk in chunks for data in parser.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: one\n\ndata: two\n\n", [b"one", b"two"]),
        (b"data:one\n\n", [b"one"]),
        (b"data:  one \n\n", [b" one "]),
        (b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"]),
        (b"data: one\r\rdata: two\r\r:", [b"one", b"two"]),
        (b"data: one\ndata: more\n\n", [b"one\nmore"]),
        (b": keep-alive\n\nevent: window\nid: 7\nretry: 3\ndata: one\n\n", [b"one"]),
        (b"data: one\n", []),
        ("data: a\u2028b\x85c\n\n".encode(), ["a\u2028b\x85c".encode()]),
    ],
    ids=["two", "no space", "one space is cut", "CR LF", "CR", "lines", "other fields", "unfinished", "not line ends"],
)
def test_events_are_read_as_the_standard_says(stream, expected):
    assert parse(stream) == expected


@given(st.data(), st.sampled_from([b"\n", b"\r\n"]))
def test_chunk_boundaries_do_not_matter(data, line_end):
    stream = line_end.join(
        [": hello", "data: é€", "", "data: two", "data: lines", "", ""][i].encode() for i in range(7)
    )
    cuts = sorted(data.draw(st.sets(st.integers(min_value=1, max_value=len(stream) - 1))))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parse(*chunks) == ["é€".encode(), b"two\nlines"]
