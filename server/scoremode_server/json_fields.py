"""The fields of a JSON body, each decoded in its own form, so that decoding ends at the first wrong value."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec

from scoremode_server.errors import MAX_NAME, RequestError

MAX_LISTS = 100_000
"""Lists in one field. Python's garbage collector goes through all of them repeatedly: a million stop the server for
seconds."""

MAX_VALUES = 500_000
"""Values in a field that is not a prompt or a text; more than any vocabulary has tokens."""

Fields = dict[str, msgspec.Raw]
"""The JSON of each field of a body, without white space around it."""


class _Name(str):
    """The name of a field, equal only to itself, so that a dictionary holds two fields of one name."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


_OBJECT = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=lambda _, name: _Name(name))
_ANYTHING = msgspec.json.Decoder()
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_TOKEN_IDS = msgspec.json.Decoder(list[int])
_TOKEN_LISTS = msgspec.json.Decoder(list[list[int]])
_TEXT_LISTS = msgspec.json.Decoder(list[list[str]])
_NESTED_TOKEN_LISTS = msgspec.json.Decoder(list[list[list[int]]])

PROMPTS = {'"': _TEXT, '["': _TEXTS, "[[": _TOKEN_LISTS, "[": _TOKEN_IDS}
"""Decoders by how a field's JSON begins: a text, texts, lists of token ids, token ids."""
CONTINUATIONS = {'[["': _TEXT_LISTS, "[[[": _NESTED_TOKEN_LISTS, '["': _TEXTS, "[": _TOKEN_LISTS}
ONE_PROMPT = {'"': _TEXT, "[": _TOKEN_IDS}
TEXTS = {"[": _TEXTS}
TOKENS = {"[": _TOKEN_IDS}
CANDIDATES = {"[[[": _NESTED_TOKEN_LISTS, "[[": _TOKEN_LISTS, "[": _TOKEN_IDS}

_BEGINNING = re.compile(rb'"|\{|\[[ \t\n\r]*(?:(")|(\[)[ \t\n\r]*(["\[]?))?')
_NAMES = {
    "int": "a token id",
    "float": "a float",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list of token ids",
    "object": "an object",
}


def split(body: bytes) -> tuple[Fields, list[str]]:
    """The fields of a JSON object, not decoded yet, and the names that occur twice, where the last field counts."""
    try:
        named = _OBJECT.decode(body)
    except msgspec.ValidationError:
        raise RequestError("the body must be a JSON object", None) from None
    except (RecursionError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {_reason(error, len(body))}", None) from None
    fields = {str(name): raw for name, raw in named.items()}
    return fields, _repeated(map(str, named)) if len(fields) < len(named) else []


def check_names(fields: Fields, repeated: Iterable[str] = ()) -> None:
    """Refuse names that are `repeated`, and those that occur twice in an object within a field. Fields must have been
    decoded before."""
    for name in repeated:
        raise _given_twice(name, name)
    for field, raw in fields.items():
        if _is_container(raw) and b"{" in (content := bytes(raw)):
            try:
                json.loads(content, object_pairs_hook=partial(_check_object, field))
            except RecursionError:
                raise _too_deep(field) from None


def _check_object(field: str, pairs: list[tuple[str, Any]]) -> None:
    for name in _repeated(name for name, _ in pairs):
        raise _given_twice(f"{field}.{name}", field)


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _given_twice(name: str, field: str) -> RequestError:
    return RequestError(f"{name[:MAX_NAME]} is given more than once", field[:MAX_NAME])


def _is_container(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) in (b"[", b"{")


def _too_deep(field: str) -> RequestError:
    return RequestError(f"{field} is nested too deep", field)


def _reason(error: Exception, num_bytes: int) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return "the name of a field is not UTF-8"
    reason = str(error).removeprefix("JSON is malformed: ")
    return reason if "(byte " in reason else f"it is cut off after {num_bytes} bytes, or has half of a surrogate pair"


def read_list(raw: msgspec.Raw, field: str, forms: dict[str, Any]) -> Any:
    """A field that may hold many values in one of several forms, such as `PROMPTS`, or of any other."""
    beginning = _BEGINNING.match(raw)
    if beginning is None:
        return _decode(raw, field, _ANYTHING)
    opening = (beginning[0][:1] + b"".join(filter(None, beginning.groups()))).decode()
    decoder = next((forms[opening[:length]] for length in (3, 2, 1) if opening[:length] in forms), None)
    if decoder is None:
        return read_anything(raw, field)
    if decoder in (_TOKEN_LISTS, _TEXT_LISTS, _NESTED_TOKEN_LISTS) and len(raw) > MAX_LISTS:
        _check_count(bytes(raw).count(b"[") - 1, MAX_LISTS, "lists", field)
    return _decode(raw, field, decoder)


def read_anything(raw: msgspec.Raw, field: str) -> Any:
    """A field of any form."""
    if len(raw) > MAX_VALUES and _is_container(raw):
        _check_count(bytes(raw).count(b",") + 1, MAX_VALUES, "values", field)
    return _decode(raw, field, _ANYTHING)


def stand_in(value: Any) -> Any:
    """A short value of the same form, for a model to validate in its place."""
    match value:
        case str():
            return "x" * bool(value)
        case [int(), *_]:
            return [0]
        case list():
            return [stand_in(item) for item in value[:1]]
    return value


def _check_count(count: int, most: int, things: str, field: str) -> None:
    if count > most:
        raise RequestError(f"{field} has {count} {things}, but a request can have at most {most}", field)


def _decode(raw: msgspec.Raw, field: str, decoder: Any) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise RequestError(_explain(str(error), field), field) from None
    except RecursionError:
        raise _too_deep(field) from None
    except UnicodeDecodeError:
        raise RequestError(f"{field} is not valid UTF-8", field) from None


def _explain(error: str, field: str) -> str:
    """An error of msgspec, such as "Expected `int`, got `float` - at `$[17]`", in the API's words."""
    reason, _, place = error.partition(" - at `$")
    name = field + place.removesuffix("`")
    expected = re.fullmatch("Expected `(.*)`, got `(.*)`", reason)
    if expected is None:
        return f"{name}: number too large"
    got = {"array": "a list", "int": "a number"}.get(expected[2]) or _NAMES.get(expected[2], expected[2])
    wanted = "a position" if field == "logprobs_from" and expected[1] == "int" else _NAMES[expected[1]]
    return f"{name} must be {wanted}, not {got}"
