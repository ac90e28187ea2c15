"""Fields of a JSON body: in which form each is decoded, and where it goes wrong."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode_server.json_fields import CONTINUATIONS, PROMPTS, TEXTS, read_anything, read_list, split

token_ids = st.lists(st.integers())
texts = st.lists(st.text())


def read(value: Any, forms: dict[str, Any] = PROMPTS) -> Any:
    return read_list(split(json.dumps({"field": value}, indent=1).encode())[0]["field"], "field", forms)


@settings(max_examples=30)
@given(st.one_of(st.none(), st.text(), texts, token_ids, st.lists(token_ids)), texts)
def test_prompts_and_texts_of_any_form_are_what_json_says(prompt, several):
    assert read(prompt) == prompt
    assert read(several, TEXTS) == read(several, CONTINUATIONS) == several


def test_brackets_and_commas_in_texts_are_not_counted():
    assert read(["[" * 200_000]) == ["[" * 200_000]
    text = "," * 600_000
    assert read_anything(split(json.dumps({"a": text}).encode())[0]["a"], "a") == text
