"""Reads a dataset's conversations, in OpenAI's format or ShareGPT's, and classifies their tokens."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode._texts import valid_text
from scoremode.errors import CorpusError
from scoremode.windows import TOKEN_CLASSES

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of media, which placeholders in the messages refer to."""
OPTIONAL_COLUMNS = ("tools", "system", *MEDIA)
"""Columns that a row may have in addition to its messages."""
_PLACEHOLDER = re.compile("<(?:image|video|audio)>")

_NAMES = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human", "input", "prompter"),
    "assistant": (
        "assistant",
        "gpt",
        "chatgpt",
        "bing",
        "bard",
        "bot",
        "model",
        "output",
        # Messages of these two roles have tool calls as text.
        "function_call",
        "tool_call",
    ),
    "tool": ("tool", "function", "observation", "function_response", "tool_response", "ipython"),
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}
"""Maps the role names in datasets for LLaMA-Factory, axolotl, FastChat, Unsloth and ms-swift to OpenAI's roles."""
RENDERED = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "task", "tools"}
"""The fields of a message that vLLM passes to the chat template."""

# All patterns take linear time: no attempt to match scans text that an earlier attempt has scanned.
_KINDS = {
    # The opening tag may be part of the generation prompt.
    "reasoning": re.compile(r"(?:<think>|\A(?=(?:(?!<think>).)*?</think>)).*?(?:</think>|\Z)", re.DOTALL),
    "tool call": re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)|(?:\[TOOL_CALLS\]|<\|python_tag\|>).*\Z", re.DOTALL),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as in `/v1/chat/completions`, and the tools that they may call."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    where: str = field(default="", compare=False)
    """The conversation's row in the dataset, as error messages name it."""


def read_conversation(row: Mapping[str, Any], column: str, where: str, *, is_prompt: bool = False) -> Conversation:
    """Read the messages and tools of a dataset's row, which are lists or JSON of lists. If `is_prompt`, a last
    message of the assistant is left out.

    CorpusError, which names the row by `where`, if they have another format, there is nothing of the assistant to score
    or nothing to answer, or the messages refer to images, video or audio.
    """
    try:
        cells: list[Any] = [row.get(column), row.get("tools")]
        messages, tools = (json.loads(cell) if isinstance(cell, str) and cell else cell for cell in cells)
        messages = [_message(message, f"{where}, message {number}") for number, message in enumerate(messages, 1)]
        # Some datasets have only the function, without its type.
        tools = [
            {"type": "function", "function": tool} if tool.get("name") else tool
            for tool in ([tools] if isinstance(tools, dict) else tools or ())
        ]
        content = json.dumps([messages, tools], ensure_ascii=False)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CorpusError(
            f"{where} is not a list of messages with role and content, or with from and value, or has other tools "
            "than a list of functions"
        ) from None
    valid_text(content, where)
    if is_prompt and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if is_prompt and not messages:
        raise CorpusError(f"{where} has no message before the assistant's answer")
    if not is_prompt and not any(item["role"] == "assistant" and _has_content(item) for item in messages):
        raise CorpusError(f"{where} has no answer of the assistant to score")
    if any(row.get(name) for name in MEDIA) and (match := _PLACEHOLDER.search(content)):
        raise CorpusError(f"{where} has {match[0]} in its messages: only text is scored")
    if row.get("system") and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": valid_text(row["system"], f"{where}: column 'system'")})
    return Conversation(messages, tools or None, where)


def _message(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert a message to OpenAI's format. Null fields, which only fill a table's row, are left out."""
    message = {name: value for name, value in fields.items() if value is not None}
    name = message.pop("from") if "from" in message else message["role"]
    role = _ROLES.get(str(name).lower().replace("-", "_"))
    if role is None:
        raise CorpusError(f"{where} is of role {name!r}, which is not one of {', '.join(_ROLES)}")
    content = message.pop("value") if "value" in message else fields.get("content")
    message |= {"role": role}
    if content is not None or "content" in fields:
        # Templates distinguish a tool call without content from a tool call with null as its content.
        message["content"] = content
    if not isinstance(content, str | list) and (content is not None or not _has_content(message)):
        raise CorpusError(f"{where} has no text: its content is {json.dumps(content, default=str)}")
    return message


def _has_content(message: Mapping[str, Any]) -> bool:
    return any(message.get(name) for name in ("content", "tool_calls", "reasoning", "reasoning_content"))


def token_classes(
    token_ids: NDArray[Any], window_sizes: Sequence[int], roles: Sequence[str], texts: Mapping[int, str]
) -> NDArray[np.uint8]:
    """Classify n targets, whose `token_ids` are in the order of windows: returns indices in `TOKEN_CLASSES`.

    A window is one turn, and every token of a turn that is not the assistant's is `other`. Tags are searched in a
    turn's joined `texts`, which has the text of each token by its id.
    """
    classes = np.full(len(token_ids), TOKEN_CLASSES.index("other"), np.uint8)
    end = 0
    for size, role in zip(window_sizes, roles, strict=True):
        start, end = end, end + size
        if role != "assistant":
            continue
        parts = [texts.get(int(token), "") for token in token_ids[start:end]]
        begins = np.cumsum([0, *map(len, parts[:-1])])
        turn_classes = np.full(size, TOKEN_CLASSES.index("text"), np.uint8)
        for name, kind in _KINDS.items():
            for match in kind.finditer("".join(parts)):
                first, last = np.searchsorted(begins, match.span())
                turn_classes[first:last] = TOKEN_CLASSES.index(name)
        classes[start:end] = turn_classes
    return classes
