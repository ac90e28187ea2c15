"""Decodes each field of a JSON body separately, so that an error names the field."""

from typing import Any

import msgspec
import numpy as np

from scoremode_server.errors import MAX_NAME, RequestError

MAX_FIELDS = 1000
"""Limit on the fields of a body. A pydantic model makes an error for each unknown field."""

MAX_LISTS = 2**18
"""Limit on lists and objects in one field. Requests need three per entry of `answers`, or one per position of a long
context. Python's garbage collector goes through all of them repeatedly, so a million would stop the server for
seconds."""

LONG_LISTS = {"prompt", "texts", "continuations", "candidate_token_ids", "logprobs_from", "token_ids", "answers"}
"""Fields that may have any number of values: their validation stops at the first wrong value."""

MAX_VALUES = 500_000
"""Limit on values in a field other than `LONG_LISTS`; no vocabulary has as many tokens. vLLM's models make an error for
each wrong value. In `LONG_LISTS` it limits the names in objects instead, because all models make an error for each
unknown name."""


class _Name(str):
    """The name of a field, equal only to itself, so that a dictionary holds two fields of one name."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


_FIELDS = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=lambda _, name: _Name(name))

_MARKS = b'"[{,:'
_NOT_MARKS = bytes(byte for byte in range(256) if byte not in _MARKS)


def read_fields(body: bytes) -> dict[str, Any]:
    """Decode the fields of a JSON object."""
    try:
        named = _FIELDS.decode(body)
    except msgspec.ValidationError:
        raise RequestError("the body must be a JSON object", None) from None
    except (ValueError, RecursionError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise RequestError(f"the body is not valid JSON: {reason}", None) from None
    _check_count(len(named), MAX_FIELDS, "fields", "the body", None)
    fields: dict[str, Any] = {}
    for name, raw in named.items():
        field, content = str(name), bytes(raw)
        if field in fields:
            raise RequestError(f"{field[:MAX_NAME]} is given more than once", field[:MAX_NAME])
        # A shorter field cannot exceed a limit.
        if len(content) > MAX_LISTS and content.startswith((b"[", b"{")):
            marks = _outside_texts(content)
            _check_count(marks.count(b"[") + marks.count(b"{"), MAX_LISTS, "lists and objects", field, field)
            separator, things = (b":", "names") if field in LONG_LISTS else (b",", "values")
            _check_count(marks.count(separator) + 1, MAX_VALUES, things, field, field)
        try:
            fields[field] = msgspec.json.decode(content)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{field[:MAX_NAME]}: {error}", field[:MAX_NAME]) from None
    return fields


def _outside_texts(content: bytes) -> bytes:
    """The opening brackets, commas and colons of JSON outside its strings, and its closing quotes."""
    # Without escapes, each quote begins or ends a string.
    marks = content.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_MARKS)
    values = np.frombuffer(marks, np.uint8)
    return bytes(values[~np.logical_xor.accumulate(values == ord('"'))])


def _check_count(count: int, most: int, things: str, name: str, field: str | None) -> None:
    if count > most:
        raise RequestError(
            f"{name[:MAX_NAME]} has {count} {things}, but a request can have at most {most}", field and field[:MAX_NAME]
        )
