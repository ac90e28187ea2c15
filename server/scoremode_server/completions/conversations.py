"""Conversations to score: rendered by vLLM as in `/v1/chat/completions`, and which of their tokens the model generates.

A turn of the assistant is what the template's `{% generation %}` marks contain. Without marks, and for other roles, it
is what a message adds to the conversation before it, which ends in the generation prompt. A turn that the template
renders in another way once more messages follow, such as without its reasoning, is a sequence of its own.
"""

import re
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.renderers import ChatParams, TokenizeParams
from vllm.renderers.hf import HfRenderer, resolve_chat_template, safe_apply_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.params import merge_kwargs

from scoremode.wire.protocol import Messages, MessagesFields, Tools, Turn, TurnSequence
from scoremode_server.errors import RequestError

MAX_MERGED = 8
"""Tokens at the end of a rendered conversation that may become others when a message follows: the tokenizer joins what
is on both sides."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THOUGHTS = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal", "thinking"}


class Conversations:
    """Renders with the served model's chat template, in the threads of vLLM's renderer."""

    def __init__(self, online: OnlineRenderer, model: ModelConfig) -> None:
        self.online = online
        self.model = model
        ends = model.try_get_generation_config().get("eos_token_id")
        self.ends = {*(ends if isinstance(ends, list) else [ends]), getattr(self.tokenizer, "eos_token_id", None)}
        """Tokens that end a turn."""

    @property
    def tokenizer(self) -> Any:
        return self.online.renderer.tokenizer

    async def sequences(self, request: MessagesFields) -> list[TurnSequence]:
        """Sequences of the conversations of a request, each of which has at least one turn to score."""
        if not isinstance(self.online.renderer, HfRenderer) or self.online.use_harmony or self.tokenizer is None:
            raise RequestError("messages: this server renders conversations without a Jinja template", "messages")
        refused = self.online.validate_chat_template(
            None, request.chat_template_kwargs, self.online.trust_request_chat_template
        )
        if refused is not None:
            raise RequestError(refused.error.message, "chat_template_kwargs")
        conversations, tools = request.conversations, request.tools or []
        is_shared = not tools or isinstance(tools[0], dict)
        if not is_shared and len(tools) != len(conversations):
            message = f"tools has lists for {len(tools)} conversations, and there are {len(conversations)}"
            raise RequestError(message, "tools")
        found = []
        for index, messages in enumerate(conversations):
            own: Any = tools if is_shared else tools[index]
            name = f"messages[{index}]"
            _check(name, messages)
            params = self._params(name, messages, own or None, request.chat_template_kwargs)
            found += await _Conversation(self, name, request.roles, params).sequences(index, messages)
        if not found:
            raise RequestError(f"messages has no turn of {' or '.join(request.roles)} to score", "messages")
        return found

    def _params(
        self, name: str, messages: Messages, own_tools: Tools | None, chat_template_kwargs: dict[str, Any] | None
    ) -> ChatParams:
        """What vLLM's `preprocess_chat` makes of a request, without a generation prompt."""
        try:
            request = ChatCompletionRequest(
                messages=messages,
                tools=own_tools,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=False,
            )
        except ValidationError as error:
            detail = error.errors()[0]
            field = "tools" if detail["loc"][:1] == ("tools",) else "messages"
            raise RequestError(f"{name}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}", field) from None
        except VLLMClientError as error:
            raise RequestError(f"{name}: {error}", "messages") from None
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(self.online.chat_template, self.online.chat_template_content_format)
        defaults = merge_kwargs(self.online.default_chat_template_kwargs, {"tools": tools, "tokenize": False})
        return params.with_defaults(defaults)


@dataclass(frozen=True, slots=True)
class _Conversation:
    """Renders the beginnings of one conversation."""

    shared: Conversations
    name: str
    roles: list[str]
    params: ChatParams
    """Without a generation prompt."""

    async def sequences(self, index: int, messages: Messages) -> list[TurnSequence]:
        whole, turns = await self._marked(messages) if self.roles == ["assistant"] else (None, [])
        own: list[TurnSequence] = []
        if whole is None:
            whole = await self._render(messages)
            for place, message in enumerate(messages):
                # Nothing prompts for a first message, so it is context if it is the assistant's.
                if message["role"] not in self.roles or (place == 0 and message["role"] == "assistant"):
                    continue
                until = whole if place + 1 == len(messages) else await self._render(messages[: place + 1])
                turn = await self._turn(messages, place, until)
                if whole[: turn["end"]] == until[: turn["end"]]:
                    turns.append(turn)
                else:
                    own.append({"conversation": index, "token_ids": until[: turn["end"]], "turns": [turn]})
        both: list[TurnSequence] = [*own, {"conversation": index, "token_ids": whole, "turns": turns}]
        for sequence in both:
            # An empty message adds nothing.
            sequence["turns"] = [turn for turn in sequence["turns"] if turn["first"] < turn["end"]]
        return [sequence for sequence in both if sequence["turns"]]

    async def _turn(self, messages: Messages, place: int, until: list[int]) -> Turn:
        """The tokens that a message adds, given the conversation up to it."""
        role, before = messages[place]["role"], messages[:place]
        prompt = await self._render(before, add_generation_prompt=role == "assistant") if before else []
        first = _num_shared(prompt, until)
        if first < len(prompt):
            # The generation prompt, or a part of it, is not kept; the conversation must be.
            plain = await self._render(before)
            if _num_shared(plain, until) < len(plain) - MAX_MERGED:
                raise self._refused(place, "changes messages before it")
            first += self._num_redivided(prompt[first:], until[first:])
        # The first token of a sequence has no logprob.
        first = max(1, first)
        end = len(until)
        if role == "assistant":
            # What the template adds after the token that ends a turn is not generated, not even another such token.
            end = next((at + 1 for at in range(first, end) if until[at] in self.shared.ends), end)
            generated = self.shared.tokenizer.decode(until[first:end])
            if not all(thought.strip() in generated for thought in _thoughts(messages[place])):
                raise self._refused(place, "drops its reasoning, so it is not as it was generated")
        return {"role": role, "first": first, "end": end}

    def _num_redivided(self, prompt_end: list[int], added: list[int]) -> int:
        """Leading tokens of what a message adds whose text ends the prompt: a tokenizer may divide line breaks one way
        at the end of a text, and another way before a word."""
        decode, text = self.shared.tokenizer.decode, self.shared.tokenizer.decode(prompt_end)
        num = 0
        while num < len(added) and (beginning := decode(added[: num + 1])) and text.startswith(beginning):
            num += 1
        return num

    async def _marked(self, messages: Messages) -> tuple[list[int] | None, list[Turn]]:
        """The tokens of a conversation and its turns, of a template that marks them; else None."""
        params, tokenizer = self.params, self.shared.tokenizer
        template = resolve_chat_template(
            tokenizer, params.chat_template, params.chat_template_kwargs.get("tools"), model_config=self.shared.model
        )
        if template is None or not _MARKS.search(template) or not tokenizer.is_fast:
            return None, []
        token_ids, conversation = await self._rendered(messages, params)
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        options = {**params.get_apply_chat_template_kwargs(), **options}
        marked: Any = safe_apply_chat_template(self.shared.model, tokenizer, conversation, **options)
        if list(marked["input_ids"]) != token_ids:
            raise RequestError(f"{self.name}: vLLM and the template's marks disagree on its tokens", "messages")
        turns: list[Turn] = []
        for is_generated, run in groupby(range(len(token_ids)), lambda at: bool(marked["assistant_masks"][at])):
            if is_generated:
                places = list(run)
                turns.append({"role": "assistant", "first": max(1, places[0]), "end": places[-1] + 1})
        return token_ids, turns

    async def _render(self, messages: Messages, *, add_generation_prompt: bool = False) -> list[int]:
        kwargs = self.params.chat_template_kwargs | {"add_generation_prompt": add_generation_prompt}
        return (await self._rendered(messages, replace(self.params, chat_template_kwargs=kwargs)))[0]

    async def _rendered(self, messages: Messages, params: ChatParams) -> tuple[list[int], Any]:
        """Token ids, and the messages as the template gets them."""
        renderer = self.shared.online.renderer
        try:
            # A deep copy: vLLM decodes the arguments of tool calls in place.
            conversation, prompt = await renderer.render_messages_async(deepcopy(messages), params)
            (tokens,) = await renderer.tokenize_prompts_async(
                [prompt], TokenizeParams(max_total_tokens=None, add_special_tokens=False)
            )
        except (VLLMClientError, ValueError, TypeError, KeyError, TemplateError, TimeoutError) as error:
            beginning = f"{self.name}: its first {len(messages)} messages cannot be rendered"
            raise RequestError(f"{beginning}: {error}", "messages") from None
        return list(tokens["prompt_token_ids"]), conversation

    def _refused(self, place: int, reason: str) -> RequestError:
        return RequestError(f"{self.name}[{place}] cannot be scored: the chat template {reason}", "messages")


def _check(name: str, messages: Messages) -> None:
    if not messages:
        raise RequestError(f"{name} is empty: there is no message to score", "messages")
    for place, each in enumerate(messages):
        if not isinstance(each.get("role"), str):
            raise RequestError(f"{name}[{place}] must have a role", "messages")
        parts = each.get("content")
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS:
                raise RequestError(
                    f"{name}[{place}] has a part of type {part.get('type')!r}: only text is scored", "messages"
                )


def _thoughts(message: dict[str, Any]) -> list[str]:
    """The reasoning of a message, in a field of its own or between tags."""
    field, content = message.get("reasoning") or message.get("reasoning_content"), message.get("content")
    between_tags = _THOUGHTS.findall(content) if isinstance(content, str) else []
    return [field, *between_tags] if isinstance(field, str) else between_tags


def _num_shared(one: list[int], other: list[int]) -> int:
    """Tokens that two sequences begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, yours) in enumerate(pairs) if mine != yours), min(len(one), len(other)))
