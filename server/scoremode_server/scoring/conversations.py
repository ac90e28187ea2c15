"""Conversations to score: rendered by vLLM as in `/v1/chat/completions`, and which of their tokens the model generates.

A turn of the assistant is what the template's `{% generation %}` marks contain. Without marks, and for other roles, it
is what a message adds to the conversation before it, which ends in the generation prompt. A turn that the template
renders in another way once more messages follow, such as without its reasoning, is a sequence of its own.
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
"""Messages of a conversation. Without marks, each turn takes up to three renderings of what comes before it."""

MAX_MERGED = 8
"""Tokens at the end of a rendered conversation that may become others when a message follows: the tokenizer joins what
is on both sides."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""The key of the text of each type of part."""


class Conversations:
    """Renders with the served model's chat template."""

    def __init__(self, online: OnlineRenderer, model: ModelConfig, limits: Limits, metrics: Metrics) -> None:
        self.online, self.model, self.limits, self.metrics = online, model, limits, metrics
        ends = model.try_get_generation_config().get("eos_token_id")
        ends = {*(ends if isinstance(ends, list) else [ends]), getattr(self.tokenizer, "eos_token_id", None)}
        self.ends = sorted(end for end in ends if end is not None and end >= 0)
        """Tokens after which vLLM stops, so that they end a turn."""
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
        """Sequences of the conversations of a request, each of which has at least one turn to score; or without turns,
        up to where the assistant answers. TooLargeError if they have too many tokens, BusyError if too many other
        requests have conversations. The fields `excluded` cannot be given with messages."""
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
        # Each conversation has a message, or is refused.
        self.limits.check_num_sequences(sum(map(len, conversations)), "messages")
        longest = max(map(len, conversations))
        if longest > MAX_MESSAGES:
            raise RequestError(
                f"messages: a conversation has {longest} messages, and can have at most {MAX_MESSAGES}", "messages"
            )
        roles = set[str]() if are_prompts else {*request.roles}
        return await self._threads.run(partial(self._rendered, request, roles))

    def _rendered(self, request: MessagesFields, roles: set[str], is_over: threading.Event) -> list[TurnSequence]:
        """The sequences of a request. For a thread, which ends once the request is over."""
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
                # Turns that are sequences of their own have the same beginnings.
                num_tokens += len(sequence["token_ids"])
                self.limits.check_num_values([num_tokens], "float", "messages")
        if not sequences:
            raise RequestError(f"messages has no turn of {' or '.join(request.roles)} to score", "messages")
        return sequences

    def _params(self, name: str, tools: Tools | None, chat_template_kwargs: dict[str, Any] | None) -> ChatParams:
        """Make the parameters that vLLM's `preprocess_chat` makes from a request, without a generation prompt. The
        template gets tools as they are given, to which vLLM adds null fields, and of which it drops others."""
        variables = dict(chat_template_kwargs or {})
        request = _chat_request(
            name,
            messages=[],
            tools=tools,
            # A template among the variables would come after the server's.
            chat_template=variables.pop("chat_template", None),
            chat_template_kwargs=variables,
            add_generation_prompt=False,
        )
        params = request.build_chat_params(self.online.chat_template, self.online.chat_template_content_format)
        defaults = merge_kwargs(self.online.default_chat_template_kwargs, {"tools": tools, "tokenize": False})
        return params.with_defaults(defaults)


@dataclass(slots=True)
class _Conversation:
    """Renders the beginnings of one conversation, without a generation prompt unless one is wanted."""

    shared: Conversations
    name: str
    messages: Messages
    """In vLLM's form, without calls of tools."""
    tool_calls: list[list[dict[str, Any]]]
    """The calls in each message."""
    roles: set[str]
    """Of the turns to score; none for a prompt, which ends where the assistant answers."""
    params: ChatParams
    is_over: threading.Event
    _parsed: list[Any] = field(init=False)
    """The messages as the template gets them."""
    _encoder: TextEncoder = field(init=False)
    """Of the whole conversation."""

    def sequences(self, index: int) -> Iterator[TurnSequence]:
        """The sequences with turns to score, or the prompt, with the conversation's index."""
        self._parsed = self._parse()
        tokenizer, has_marks = self.shared.tokenizer, self.roles == {"assistant"} and self._has_marks()
        marked = MarkedRendering(tokenizer)
        text = self._render_whole(marked if has_marks else tokenizer)
        self._encoder = TextEncoder(tokenizer, text, self.shared.metrics.encoded_characters.inc)
        whole = self._encoder.token_ids
        self.shared.limits.check_length(len(whole), self.name)
        turns = self._marked_turns(text, marked.spans)
        for place, message in enumerate(() if has_marks else self.messages):
            # Nothing prompts for a first message, so it is context if it is the assistant's.
            if message["role"] not in self.roles or (place == 0 and message["role"] == "assistant"):
                continue
            until = self._tokens(place + 1) if place + 1 < len(self.messages) else whole
            turn = self._turn(place, until)
            if whole[: turn["end"]] == until[: turn["end"]]:
                turns.append(turn)
            elif turn["first"] < turn["end"]:
                yield {"conversation": index, "token_ids": until[: turn["end"]], "turns": [turn]}
        # An empty message adds nothing.
        turns = [turn for turn in turns if turn["first"] < turn["end"]]
        if turns or not self.roles:
            yield {"conversation": index, "token_ids": whole, "turns": turns}

    def _marked_turns(self, text: str, spans: list[Span]) -> list[Turn]:
        """A turn for each span, if the assistant says what is in it."""
        said = [_texts_of(message) for message in self.messages if message["role"] == "assistant"]
        place = 0
        for start, end in spans:
            span = text[start:end]
            # Spans and messages come in the same order, so the search continues where the last one ended.
            places = chain(range(place, len(said)), range(place))
            place = next((at for at in places if any(each in span for each in said[at])), -1)
            if place < 0:
                raise RequestError(
                    f"{self.name} cannot be scored: the chat template marks {span[:MAX_NAME]!r} as "
                    "generated, which the assistant does not say",
                    "messages",
                )
        # Parts of one message follow each other.
        turns: list[Turn] = []
        for start, end in _merge_touching(spans) if len(spans) > len(said) else spans:
            first, last, is_merged = self._encoder.tokens_of((start, end))
            # The first token of a sequence has no logprob.
            turns.append({"role": "assistant", "first": max(1, first), "end": last, "is_merged": is_merged})
        return turns

    def _turn(self, place: int, until: list[int]) -> Turn:
        """The tokens that a message adds, given the conversation up to it."""
        role = self.messages[place]["role"]
        prompt = self._tokens(place, add_generation_prompt=role == "assistant") if place else []
        first, is_merged = _num_shared(prompt, until), False
        if first < len(prompt):
            # The generation prompt, or a part of it, is not kept; the conversation must be.
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
            # What the template adds after the token that ends a turn is not generated, not even another such token.
            end = next((at + 1 for at in range(first, end) if until[at] in self.shared.ends), end)
            if not _has_thoughts(self.shared.tokenizer.decode(until[first:end]), self.messages[place]):
                raise self._refused(place, "drops its reasoning, so it is not as it was generated")
        return {"role": role, "first": first, "end": end, "is_merged": is_merged}

    def _num_redivided(self, prompt_end: list[int], added: list[int]) -> int:
        """Leading tokens of what a message adds whose text ends the prompt: a tokenizer may divide line breaks one way
        at the end of a text, and another way before a word."""
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
                # vLLM makes an empty text of no content, by which templates tell a call from an answer.
                if for_template["content"] == "" and message.get("content") is None:
                    del for_template["content"]
                    for_template |= {name: None for name in message if name == "content"}
        return parsed

    def _tokens(self, num_messages: int, *, add_generation_prompt: bool = False) -> list[int]:
        """The tokens of a beginning of the conversation."""
        text = self._render(num_messages, self.shared.tokenizer, add_generation_prompt=add_generation_prompt)
        token_ids = self._encoder.encode(text)
        self.shared.limits.check_length(len(token_ids), self.name)
        return token_ids

    def _render_whole(self, tokenizer: Any) -> str:
        """The text of the whole conversation. If the template cannot render the arguments of calls as objects, it gets
        them as they are given from now on: it may add JSON to a text."""
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
        """The text of a beginning of the conversation."""
        if self.is_over.is_set():
            raise TimeoutError("the request has ended")
        self.shared.metrics.renderings.inc()
        kwargs = self.params.get_apply_chat_template_kwargs() | {"add_generation_prompt": add_generation_prompt}
        try:
            text = safe_apply_chat_template(self.shared.model, tokenizer, self._parsed[:num_messages], **kwargs)
            # Arguments in JSON may have half of a surrogate pair.
            text.encode()
        except (VLLMClientError, ValueError, TypeError, KeyError, TemplateError) as error:
            beginning = f"{self.name}: its first {num_messages} messages cannot be rendered"
            raise RequestError(f"{beginning}: {error}", "messages") from None
        most = self.shared.limits.max_model_len * self.shared.tokenizer.max_chars_per_token
        if len(text) > most:
            # Too long in any tokens, so it need not be encoded.
            raise RequestError(
                f"{self.name} has {len(text)} characters, and the model takes at most {most} of them", "messages"
            )
        return str(text)

    def _refused(self, place: int, reason: str) -> RequestError:
        return RequestError(f"{self.name}[{place}] cannot be scored: the chat template {reason}", "messages")


def _read(name: str, messages: Messages) -> tuple[Messages, list[list[dict[str, Any]]]]:
    """The messages of a conversation in vLLM's form, all of whose content is text, and the calls of tools in each."""
    if not messages:
        raise RequestError(f"{name} is empty: there is no message to score", "messages")
    for place, each in enumerate(messages):
        if not isinstance(each.get("role"), str):
            raise RequestError(f"{name}[{place}] must have a role", "messages")
        parts = each.get("content")
        for at, part in enumerate(parts if isinstance(parts, list) else ()):
            _check_part(f"{name}[{place}]", at, part)
    tool_calls = [_read_calls(f"{name}[{place}]", each.pop("tool_calls", None)) for place, each in enumerate(messages)]
    # vLLM's model renames fields in the messages themselves.
    _chat_request(name, messages=messages)
    return messages, tool_calls


def _read_calls(message: str, tool_calls: Any) -> list[dict[str, Any]]:
    """The calls of tools in a message. vLLM's model refuses those without an id, and arguments that are objects."""
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
    """A call of a tool with an object for arguments in JSON, as templates expect them. Other texts stay as they are,
    for which vLLM has no arguments."""
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
    """vLLM's request with these fields."""
    try:
        return ChatCompletionRequest(**fields)
    except ValidationError as error:
        detail, *others = error.errors()
        field = str(detail["loc"][0]) if detail["loc"] else "messages"
        if field == "messages":
            # Of all types of messages, the one of any role tells what is wrong.
            detail = next((each for each in others if "CustomChatCompletionMessageParam" in each["loc"]), detail)
            _, place, _, part, *_ = detail["loc"]
            raise RequestError(f"{name}[{place}].{part}: {detail['msg']}", field) from None
        field = "chat_template_kwargs" if field == "chat_template" else field
        raise RequestError(f"{name}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}", field) from None
    except VLLMClientError as error:
        raise RequestError(f"{name}: {error}", "messages") from None


def _texts_of(message: dict[str, Any]) -> list[str]:
    """The texts that a template may render of a message: reasoning, thoughts between tags, and the answer."""
    texts = [message[name] for name in ("reasoning", "content") if isinstance(message.get(name), str)]
    return [part.rpartition("<think>")[2].strip() for text in texts for part in text.split("</think>")] or [""]


def _merge_touching(spans: list[Span]) -> list[Span]:
    """Spans, of which those that touch are one."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, end))
    return joined


def _has_thoughts(text: str, message: dict[str, Any]) -> bool:
    """Whether a text has a message's reasoning: in a field of its own or between tags, in this order."""
    content = message.get("content")
    *thoughts, _ = _texts_of({**message, "content": content if isinstance(content, str) else ""})
    at = 0
    for thought in thoughts:
        at = text.find(thought, at)
        if at < 0:
            return False
    return True


def _num_shared(one: list[int], other: list[int]) -> int:
    """Tokens that two sequences begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, yours) in enumerate(pairs) if mine != yours), min(len(one), len(other)))
