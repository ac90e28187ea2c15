"""Fields of a JSON body: in which form each is decoded, and where it goes wrong."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode_server.errors import RequestError
from scoremode_server.json_fields import (
    CONTINUATIONS,
    ONE_PROMPT,
    PROMPTS,
    TEXTS,
    read_anything,
    read_list,
    read_scalar,
    split,
    stand_in,
)

token_ids = st.lists(st.integers())
texts = st.lists(st.text())


def read(value: Any, forms: dict[str, Any] = PROMPTS) -> Any:
    return read_list(split(json.dumps({"field": value}, indent=1).encode())["field"], "field", forms)


@given(st.one_of(st.none(), st.text(), texts, token_ids, st.lists(token_ids)))
def test_a_prompt_of_any_form_is_what_json_says(value: Any):
    assert read(value) == value


@given(texts)
def test_texts_are_what_json_says(value: list[str]):
    assert read(value, TEXTS) == value
    assert read(value, CONTINUATIONS) == value


@pytest.mark.parametrize(
    ("value", "forms", "message"),
    [
        ([5, 1.0], PROMPTS, "field[1] must be a token id, not a float"),
        ([True], PROMPTS, "field[0] must be a token id, not a boolean"),
        ([[1], [2, None]], PROMPTS, "field[1][1] must be a token id, not null"),
        (["a"], ONE_PROMPT, "field[0] must be a token id, not a string"),
        ([[1]], ONE_PROMPT, "field[0] must be a token id, not a list"),
        ([5], CONTINUATIONS, "field[0] must be a list of token ids, not a number"),
        ([[1]], TEXTS, "field[0] must be a string, not a list"),
    ],
)
def test_the_first_wrong_value_is_named(value: Any, forms: dict[str, Any], message: str):
    with pytest.raises(RequestError, match="^" + message.replace("[", r"\[") + "$") as raised:
        read(value, forms)
    assert raised.value.param == "field"


@pytest.mark.parametrize("value", [5, 1.5, True, "text"])
def test_what_is_no_list_is_left_to_the_model(value: Any):
    assert read(value, TEXTS) == value


def test_a_list_in_the_place_of_one_value_is_not_decoded():
    fields = split(b'{"a": [1, "\xff"], "b": {"c": 1e999}}')
    assert read_scalar(fields["a"], "a") == []
    assert read_scalar(fields["b"], "b") == {}
    assert read_list(fields["b"], "b", PROMPTS) == {}


def test_brackets_in_texts_are_no_lists():
    assert read(["[" * 200_000]) == ["[" * 200_000]


def test_values_are_counted_where_they_are_values():
    text = "," * 600_000
    assert read_anything(split(json.dumps({"a": text}).encode())["a"], "a") == text


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.text() | st.integers(), st.lists), max_size=4), st.text())
def test_half_a_surrogate_pair_is_found_in_its_field(before: dict[str, Any], text: str):
    before.pop("the field", None)
    body = json.dumps(before | {"the field": [[text, "HERE"]], "after": "\\"}).replace("HERE", r"x\udc00")
    with pytest.raises(RequestError, match=r"\\udc00 is half of a surrogate pair") as raised:
        split(body.encode())
    assert raised.value.param == "the field"


def test_an_escaped_backslash_begins_no_surrogate():
    fields = split(rb'{"a": "\\ud800", "b": "\ud83d\ude00"}')
    assert [read_scalar(fields[name], name) for name in fields] == [r"\ud800", "😀"]
    with pytest.raises(RequestError, match="invalid character"):
        split(rb'{"a": "\\ud800", "b": x}')


@given(st.one_of(st.text(min_size=1), st.lists(st.text(min_size=1)), token_ids, st.lists(token_ids)))
def test_what_stands_in_for_a_value_is_of_its_form_and_small(value: Any):
    small = stand_in(value)
    assert type(small) is type(value)
    assert bool(small) == bool(value)
    assert len(small) <= 1
    assert [type(item) for item in small] == [type(item) for item in value[:1]]


def test_what_stands_in_tells_nothing_of_a_prompt():
    assert stand_in("a text") == stand_in("the other")
    assert stand_in([5, 6]) == stand_in([7, 6])
    assert stand_in([[5, 6], [7]]) == stand_in([[8]])
