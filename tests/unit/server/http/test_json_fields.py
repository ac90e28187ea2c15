"""Fields of a JSON body: what is decoded, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode_server.errors import RequestError
from scoremode_server.http.json_fields import read_fields

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text() | st.just("prompt"), values))
def test_fields_are_what_json_says(body):
    assert read_fields(json.dumps(body, indent=1).encode()) == body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({str(number): 1 for number in range(1001)}, "the body has 1001 fields"),
        ({"messages": [{}] * 2**18}, "messages has 262145 lists and objects"),
        ({"prompt": ["a", *[[]] * 2**18]}, "prompt has 262145 lists and objects"),
        # Each unknown name of an object would be an error of its own.
        ({"answers": {"data": [{f"{at}": 0 for at in range(500_000)}]}}, "answers has 500002 names"),
        ({"stop": ["a"] * 500_001}, "stop has 500001 values"),
        ({"stop": ['","', *["\\\\"] * 500_001]}, "stop has 500002 values"),
    ],
)
def test_bodies_that_would_occupy_the_server_are_refused(body: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message):
        read_fields(json.dumps(body).encode())


def test_brackets_and_commas_in_texts_are_not_counted():
    lines = '{"a": [1, "\\\\"]}\\n' * 100_000
    body = {"prompt": ["[" * 200_000], "suffix": "," * 600_000, "messages": [{"content": lines}], "stop": ['"', lines]}
    assert read_fields(json.dumps(body).encode()) == body
