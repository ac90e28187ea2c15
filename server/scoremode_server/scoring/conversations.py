"""Renders conversations to score, as vLLM does in `/v1/chat/completions`, and finds the tokens that the model
generates.

If only the assistant's turns are scored and the template has `{% generation %}` marks, a turn is the text within the
marks. Otherwise it is the text that a message adds to the messages before it, for the assistant after the generation
prompt. If the template renders a turn differently once more messages follow, such as without its reasoning, the turn is
a sequence of its own.
"""

import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.renderers import ChatParams
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import (
    HfRenderer,
    resolve_chat_template,
    resolve_chat_template_content_format,
    safe_apply_chat_template,
)
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.params import merge_kwargs

from scoremode.wire.protocol import Messages, MessagesFields, Tools, Turn, TurnSequence
from scoremode_server.errors import MAX_NAME, RequestError
from scoremode_server.metrics import Metrics
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.rendering import MarkedRendering, RenderingThreads, Span, TextEncoder

MAX_MESSAGES = 1024
"""Limit on messages of a conversation. Without marks, each turn takes up to three renderings of the conversation up to
it."""

MAX_MERGED = 8
"""Limit on tokens at the end of a rendered conversation that change when a message follows: the tokenizer merges text
from both sides."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""The key that has the text of a message's part, by type of part."""


class Conversations:
    """Renders conversations with the served model's chat template."""

    def __init__(self, online: OnlineRenderer, model: ModelConfig, limits: Limits, metrics: Metrics) -> None:
        self.online, self.model, self.limits, self.metrics = online, model, limits, metrics
        ends = model.try_get_generation_config().get("eos_token_id")
        ends = {*(ends if isinstance(ends, list) else [ends]), getattr(self.tokenizer, "eos_token_id", None)}
        self.ends = sorted(end for end in ends if end is not None and end >= 0)
        """Tokens that end a turn, because vLLM stops after them."""
        self._threads = RenderingThreads()

    @property
    def tokenizer(self) -> Any:
        return self.online.renderer.tokenizer

    @property
    def has_template(self) -> bool:
        """Whether a Jinja template renders conversations."""
        return (
            isinstance(self.online.renderer, HfRenderer) and not self.online.use_harmony and self.tokenizer is not None
        )

    def templates(self) -> list[Any] | None:
        """Everything that decides how a chat is rendered: the templates without and with tools, the server's variables
        for them, and the special tokens that they write. None if no template renders conversations."""
        if not self.has_template:
            return None
        templates = [
            resolve_chat_template(self.tokenizer, self.online.chat_template, tools, model_config=self.model)
            for tools in (None, list[dict[str, Any]]())
        ]
        variables = sorted(self.online.default_chat_template_kwargs.items())
        return [*templates, variables, self.tokenizer.bos_token, self.tokenizer.eos_token] if any(templates) else None

    async def sequences(
        self, request: MessagesFields, excluded: Sequence[str] = (), *, are_prompts: bool = False
    ) -> list[TurnSequence]:
        """Render a request's conversations to token sequences. Each has turns to score; with `are_prompts`, it has
        none, and ends where the assistant answers. RequestError if a conversation cannot be scored or a field in
        `excluded` is set, TooLargeError if there are too many tokens, BusyError if too many requests are being
        rendered."""
        for name in excluded:
            if getattr(request, name) is not None:
                raise RequestError(f"{name} cannot be given with messages", name)
        if not self.has_template:
            raise RequestError("messages: this server renders conversations without a Jinja template", "messages")
        refused = self.online.validate_chat_template(
            None, request.chat_template_kwargs, self.online.trust_request_chat_template
        )
        if refused is not None:
            raise RequestError(refused.error.message, "chat_template_kwargs")
        conversations, tools = request.conversations, request.tools or []
        if tools and not isinstance(tools[0], dict) and len(tools) != len(conversations):
            raise RequestError(
                f"tools has lists for {len(tools)} conversations, and there are {len(conversations)}", "tools"
            )
        # A conversation makes at most one sequence per message.
        self.limits.check_num_sequences(sum(map(len, conversations)), "messages")
        longest = max(map(len, conversations))
        if longest > MAX_MESSAGES:
            raise RequestError(
                f"messages: a conversation has {longest} messages, and can have at most {MAX_MESSAGES}", "messages"
            )
        roles = set[str]() if are_prompts else {*request.roles}
        return await self._threads.run(partial(self._rendered, request, roles))

    def _rendered(self, request: MessagesFields, roles: set[str], is_over: threading.Event) -> list[TurnSequence]:
        """Make the sequences of a request. Runs in a thread, and ends early once `is_over` is set."""
        tools: Any = request.tools or []
        is_shared = not tools or isinstance(tools[0], dict)
        shared = self._params("tools", tools or None, request.chat_template_kwargs) if is_shared else None
        sequences, num_tokens = list[TurnSequence](), 0
        for index, messages in enumerate(request.conversations):
            name = f"messages[{index}]"
            params = shared or self._params(name, tools[index], request.chat_template_kwargs)
            conversation = _Conversation(self, name, *_read(name, messages), roles, params, is_over)
            for sequence in conversation.sequences(index):
                sequences.append(sequence)
                # Each sequence counts in full, even if several sequences of a conversation begin alike.
                num_tokens += len(sequence["token_ids"])
                self.limits.check_num_values([num_tokens], "float", "messages")
        if not sequences:
            raise RequestError(f"messages has no turn of {' or '.join(request.roles)} to score", "messages")
        return sequences

    def _params(self, name: str, tools: Tools | None, chat_template_kwargs: dict[str, Any] | None) -> ChatParams:
        """Make the parameters that vLLM's `preprocess_chat` makes from a request, without a generation prompt. The
        template gets tools as the client sent them: vLLM would add null fields and drop others."""
        variables = dict(chat_template_kwargs or {})
        request = _chat_request(
            name,
            messages=[],
            tools=tools,
            # vLLM would use the server's own template instead of one among the variables.
            chat_template=variables.pop("chat_template", None),
            chat_template_kwargs=variables,
            add_generation_prompt=False,
        )
        params = request.build_chat_params(self.online.chat_template, self.online.chat_template_content_format)
        defaults = merge_kwargs(self.online.default_chat_template_kwargs, {"tools": tools, "tokenize": False})
        return params.with_defaults(defaults)


@dataclass(slots=True)
class _Conversation:
    """Renders one conversation, or its first messages, by default without a generation prompt."""

    shared: Conversations
    name: str
    messages: Messages
    """In vLLM's form, without tool calls."""
    tool_calls: list[list[dict[str, Any]]]
    """The tool calls of each message."""
    roles: set[str]
    """Roles of the turns to score; empty for a prompt, which ends where the assistant answers."""
    params: ChatParams
    is_over: threading.Event
    _parsed: list[Any] = field(init=False)
    """The messages as the template gets them."""
    _encoder: TextEncoder = field(init=False)
    """The encoder that has encoded the whole conversation."""

    def sequences(self, index: int) -> Iterator[TurnSequence]:
        """Yield the sequences with turns to score, or the prompt. `index` is the conversation's index in the
        request."""
        self._parsed = self._parse()
        tokenizer, has_marks = self.shared.tokenizer, self.roles == {"assistant"} and self._has_marks()
        marked = MarkedRendering(tokenizer)
        text = self._render_whole(marked if has_marks else tokenizer)
        self._encoder = TextEncoder(tokenizer, text, self.shared.metrics.encoded_characters.inc)
        whole = self._encoder.token_ids
        self.shared.limits.check_length(len(whole), self.name)
        turns = self._marked_turns(text, marked.spans)
        for place, message in enumerate(() if has_marks else self.messages):
            # An assistant's message that begins a conversation has no prompt before it, so it is only context.
            if message["role"] not in self.roles or (place == 0 and message["role"] == "assistant"):
                continue
            until = self._tokens(place + 1) if place + 1 < len(self.messages) else whole
            turn = self._turn(place, until)
            if whole[: turn["end"]] == until[: turn["end"]]:
                turns.append(turn)
            elif turn["first"] < turn["end"]:
                yield {"conversation": index, "token_ids": until[: turn["end"]], "turns": [turn]}
        # An empty message adds no tokens.
        turns = [turn for turn in turns if turn["first"] < turn["end"]]
        if turns or not self.roles:
            yield {"conversation": index, "token_ids": whole, "turns": turns}

    def _marked_turns(self, text: str, spans: list[Span]) -> list[Turn]:
        """Make turns from the marked spans of `text`. RequestError if a span contains no text of an assistant's
        message."""
        texts = [_texts_of(message) for message in self.messages if message["role"] == "assistant"]
        place = 0
        for start, end in spans:
            span = text[start:end]
            # Spans and messages come in the same order, so the search starts at the last span's message.
            places = chain(range(place, len(texts)), range(place))
            place = next((at for at in places if any(part in span for part in texts[at])), -1)
            if place < 0:
                raise RequestError(
                    f"{self.name} cannot be scored: the chat template marks {span[:MAX_NAME]!r} as "
                    "generated, but no message of the assistant says it",
                    "messages",
                )
        # If there are more spans than messages, spans that touch are parts of one message.
        turns: list[Turn] = []
        for start, end in _merge_touching(spans) if len(spans) > len(texts) else spans:
            first, last, is_merged = self._encoder.tokens_of((start, end))
            # The first token of a sequence has no logprob.
            turns.append({"role": "assistant", "first": max(1, first), "end": last, "is_merged": is_merged})
        return turns

    def _turn(self, place: int, until: list[int]) -> Turn:
        """Find the tokens that the message at `place` adds. `until` has all tokens up to the message's end."""
        role = self.messages[place]["role"]
        prompt = self._tokens(place, add_generation_prompt=role == "assistant") if place else []
        first, is_merged = _num_shared(prompt, until), False
        if first < len(prompt):
            # The message changes tokens before it. It may change the generation prompt, but not messages.
            plain = self._tokens(place)
            if _num_shared(plain, until) < len(plain) - MAX_MERGED:
                raise self._refused(place, "changes messages before it")
            prompt_end, added = prompt[first:], until[first:]
            num_redivided = self._num_redivided(prompt_end, added)
            first += num_redivided
            decode = self.shared.tokenizer.decode
            rest = decode(prompt_end).removeprefix(decode(added[:num_redivided]))
            is_merged = bool(rest) and decode(until[first : first + 1]).startswith(rest)
        first = max(1, first)
        end = len(until)
        if role == "assistant":
            # The turn ends with its first end token. Text that the template adds after that is not generated, even
            # another end token.
            end = next((at + 1 for at in range(first, end) if until[at] in self.shared.ends), end)
            if not _has_thoughts(self.shared.tokenizer.decode(until[first:end]), self.messages[place]):
                raise self._refused(place, "drops its reasoning, so it is not as it was generated")
        return {"role": role, "first": first, "end": end, "is_merged": is_merged}

    def _num_redivided(self, prompt_end: list[int], added: list[int]) -> int:
        """How many tokens at the start of `added` are still text of the prompt's end: a tokenizer may divide line
        breaks one way at the end of a text, and another way before a word."""
        decode, text = self.shared.tokenizer.decode, self.shared.tokenizer.decode(prompt_end)
        num = 0
        while num < len(added) and (beginning := decode(added[: num + 1])) and text.startswith(beginning):
            num += 1
        return num

    def _has_marks(self) -> bool:
        tokenizer, tools = self.shared.tokenizer, self.params.chat_template_kwargs.get("tools")
        template = resolve_chat_template(tokenizer, self.params.chat_template, tools, model_config=self.shared.model)
        return bool(tokenizer.is_fast and _MARKS.search(template or ""))

    def _parse(self) -> list[Any]:
        params, model = self.params, self.shared.model
        content_format = resolve_chat_template_content_format(
            params.chat_template,
            params.chat_template_kwargs.get("tools"),
            params.chat_template_content_format,
            self.shared.tokenizer,
            model_config=model,
        )
        try:
            parsed: list[Any] = parse_chat_messages(self.messages, model, content_format)[0]
        except (VLLMClientError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RequestError(f"{self.name} cannot be read: {error}", "messages") from None
        for message, tool_calls, for_template in zip(self.messages, self.tool_calls, parsed, strict=True):
            if tool_calls:
                for_template["tool_calls"] = [*map(_with_object, tool_calls)]
                # vLLM turns missing content into an empty text, but templates tell a tool call from an answer by
                # missing content.
                if for_template["content"] == "" and message.get("content") is None:
                    del for_template["content"]
                    for_template |= {name: None for name in message if name == "content"}
        return parsed

    def _tokens(self, num_messages: int, *, add_generation_prompt: bool = False) -> list[int]:
        """The tokens of the first `num_messages` messages."""
        text = self._render(num_messages, self.shared.tokenizer, add_generation_prompt=add_generation_prompt)
        token_ids = self._encoder.encode(text)
        self.shared.limits.check_length(len(token_ids), self.name)
        return token_ids

    def _render_whole(self, tokenizer: Any) -> str:
        """Render the whole conversation. If the template fails for tool calls whose arguments are objects, it gets the
        arguments as the client sent them from now on: it may join texts with JSON."""
        render = partial(self._render, len(self.messages), tokenizer, add_generation_prompt=not self.roles)
        try:
            return render()
        except RequestError:
            if not any(self.tool_calls):
                raise
            for for_template, tool_calls in zip(self._parsed, self.tool_calls, strict=True):
                for_template |= {"tool_calls": tool_calls} if tool_calls else {}
            return render()

    def _render(self, num_messages: int, tokenizer: Any, *, add_generation_prompt: bool = False) -> str:
        """Render the first `num_messages` messages."""
        if self.is_over.is_set():
            raise TimeoutError("the request has ended")
        self.shared.metrics.renderings.inc()
        kwargs = self.params.get_apply_chat_template_kwargs() | {"add_generation_prompt": add_generation_prompt}
        try:
            text = safe_apply_chat_template(self.shared.model, tokenizer, self._parsed[:num_messages], **kwargs)
            # JSON may have half of a surrogate pair, which cannot be encoded.
            text.encode()
        except (VLLMClientError, ValueError, TypeError, KeyError, TemplateError) as error:
            beginning = f"{self.name}: its first {num_messages} messages cannot be rendered"
            raise RequestError(f"{beginning}: {error}", "messages") from None
        most = self.shared.limits.max_model_len * self.shared.tokenizer.max_chars_per_token
        if len(text) > most:
            # The text is too long however it is tokenized, so do not encode it.
            raise RequestError(
                f"{self.name} has {len(text)} characters, and the model takes at most {most} of them", "messages"
            )
        return str(text)

    def _refused(self, place: int, reason: str) -> RequestError:
        return RequestError(f"{self.name}[{place}] cannot be scored: the chat template {reason}", "messages")


def _read(name: str, messages: Messages) -> tuple[Messages, list[list[dict[str, Any]]]]:
    """Check a conversation's messages, which must be text. Returns them in vLLM's form without tool calls, and the tool
    calls of each message."""
    if not messages:
        raise RequestError(f"{name} is empty: there is no message to score", "messages")
    for place, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{name}[{place}] must have a role", "messages")
        parts = message.get("content")
        for at, part in enumerate(parts if isinstance(parts, list) else ()):
            _check_part(f"{name}[{place}]", at, part)
    tool_calls = [
        _read_calls(f"{name}[{place}]", message.pop("tool_calls", None)) for place, message in enumerate(messages)
    ]
    # vLLM's model renames fields in place, so `messages` has vLLM's form then.
    _chat_request(name, messages=messages)
    return messages, tool_calls


def _read_calls(message: str, tool_calls: Any) -> list[dict[str, Any]]:
    """Check the tool calls of a message here, because vLLM's model would refuse calls without an id, and arguments that
    are objects."""
    if tool_calls is not None and not isinstance(tool_calls, list):
        raise RequestError(f"{message}.tool_calls must be a list", "messages")
    for at, call in enumerate(tool_calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{message}.tool_calls[{at}] must be a call of a function, such as "
                '{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}',
                "messages",
            )
    return tool_calls or []


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Copy a tool call with its JSON arguments as an object, as templates expect them. Arguments that are not a JSON
    object stay as they are; vLLM would drop them."""
    function = call["function"]
    try:
        arguments = json.loads("{}" if function["arguments"] == "" else function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _check_part(message: str, at: int, part: Any) -> None:
    """Refuse a part of a message's content that vLLM would not render as its text alone."""
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    is_text = key is not None and part.keys() == {"type", key} and isinstance(part[key], str)
    if not is_text and not isinstance(part, str):
        raise RequestError(
            f"{message} has a part of type {str(kind)[:MAX_NAME]!r} that is not a text, content[{at}]: give a string, "
            'or an object with nothing but its type and text, such as {"type": "text", "text": "Hello"}',
            "messages",
        )


def _chat_request(name: str, **fields: Any) -> ChatCompletionRequest:
    """Make vLLM's request from these fields. RequestError if one is invalid."""
    try:
        return ChatCompletionRequest(**fields)
    except ValidationError as error:
        detail, *others = error.errors()
        field = str(detail["loc"][0]) if detail["loc"] else "messages"
        if field == "messages":
            # There is an error for each type of message. The error for the type that allows any role tells what is
            # wrong.
            detail = next((other for other in others if "CustomChatCompletionMessageParam" in other["loc"]), detail)
            _, place, _, part, *_ = detail["loc"]
            raise RequestError(f"{name}[{place}].{part}: {detail['msg']}", field) from None
        field = "chat_template_kwargs" if field == "chat_template" else field
        raise RequestError(f"{name}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}", field) from None
    except VLLMClientError as error:
        raise RequestError(f"{name}: {error}", "messages") from None


def _texts_of(message: dict[str, Any]) -> list[str]:
    """List the texts that a template may render of a message: reasoning, thoughts between `<think>` tags, and the
    answer."""
    texts = [message[name] for name in ("reasoning", "content") if isinstance(message.get(name), str)]
    return [part.rpartition("<think>")[2].strip() for text in texts for part in text.split("</think>")] or [""]


def _merge_touching(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, end))
    return joined


def _has_thoughts(text: str, message: dict[str, Any]) -> bool:
    """Whether a text contains a message's reasoning: first the field `reasoning`, then thoughts between `<think>`
    tags."""
    content = message.get("content")
    *thoughts, _ = _texts_of({**message, "content": content if isinstance(content, str) else ""})
    at = 0
    for thought in thoughts:
        at = text.find(thought, at)
        if at < 0:
            return False
    return True


def _num_shared(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences have in common at the start."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, yours) in enumerate(pairs) if mine != yours), min(len(one), len(other)))
