"""Conversations of a dataset, in OpenAI's shape or ShareGPT's, and what kind of text each of their tokens is."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.errors import CorpusError
from scoremode.windows import TOKEN_CLASSES

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}

_KINDS = {
    # The generation prompt may hold the opening tag.
    "reasoning": re.compile(r"(?:<think>|\A(?=(?:(?!<think>).)*?</think>)).*?(?:</think>|\Z)", re.DOTALL),
    "tool call": re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)|(?:\[TOOL_CALLS\]|<\|python_tag\|>).*\Z", re.DOTALL),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as `/v1/chat/completions` has them, and the tools that they may call."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def read_conversation(messages: Any, tools: Any, where: str) -> Conversation:
    """One row: lists, or JSON of lists."""
    try:
        messages, tools = (json.loads(each) if isinstance(each, str) and each else each for each in (messages, tools))
        return Conversation([_message(each) for each in messages], list(tools) if tools else None)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CorpusError(f"{where} is not a list of messages with role and content, or with from and value") from None


def _message(fields: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that other rows of a table have."""
    if "from" in fields:
        role = fields["from"]
        return {"role": _SHAREGPT_ROLES.get(role, role), "content": fields["value"]}
    known = {name: value for name, value in fields.items() if value is not None or name == "content"}
    return known | {"role": fields["role"]}


def token_classes(
    token_ids: NDArray[Any], window_sizes: Sequence[int], roles: Sequence[str], texts: Mapping[int, str]
) -> NDArray[np.uint8]:
    """The index in `TOKEN_CLASSES` of each of n targets, whose `token_ids` are in the order of windows.

    A window is one turn; other turns than the assistant's are `other`. `texts` has that of each token alone: tags are
    found in the joined texts of a turn.
    """
    classes = np.full(len(token_ids), TOKEN_CLASSES.index("other"), np.uint8)
    end = 0
    for size, role in zip(window_sizes, roles, strict=True):
        start, end = end, end + size
        if role != "assistant":
            continue
        parts = [texts.get(int(token), "") for token in token_ids[start:end]]
        begins = np.cumsum([0, *map(len, parts[:-1])])
        of_turn = np.full(size, TOKEN_CLASSES.index("text"), np.uint8)
        for name, kind in _KINDS.items():
            for found in kind.finditer("".join(parts)):
                of_turn[(begins >= found.start()) & (begins < found.end())] = TOKEN_CLASSES.index(name)
        classes[start:end] = of_turn
    return classes
