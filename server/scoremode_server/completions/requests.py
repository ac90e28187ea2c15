"""Reading the completion requests that benchmarks send: prompts of thousands of token ids, by the thousand."""

from copy import copy
from functools import lru_cache
from types import NoneType
from typing import Any

import orjson
from pydantic import ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.utils import random_uuid


def is_scoring(request: CompletionRequest) -> bool:
    """Whether a request wants logprobs of its prompt, all at once, from the top k: what is written from arrays.

    Streams, beam search, whole-vocabulary logprobs and chosen token ids stay vLLM's.
    """
    return bool(
        request.echo
        and request.logprobs is not None
        and request.logprobs >= 0
        and (request.prompt_logprobs is None or request.prompt_logprobs >= 0)
        and request.max_tokens in (0, 1)
        and request.prompt_embeds is None
        and not (request.stream or request.use_beam_search or request.logprob_token_ids)
    )


class ScoringRequestReader:
    """Reads bodies, and remembers settings that were valid: a benchmark's requests differ in their prompts only."""

    def __init__(self) -> None:
        self._validated = lru_cache(maxsize=64)(_validated)

    def read(self, body: bytes) -> CompletionRequest | None:
        """A valid scoring request whose prompts are token ids; None for everything else, which FastAPI reads.

        FastAPI tries each of a prompt's four shapes on every token id. Here the tokens are checked at once, and vLLM's
        model sees the other fields; docs/decisions.md has the time that it saves.
        """
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(fields, dict) or not fields.get("echo") or fields.get("logprobs") is None:
            return None
        prompt = fields.pop("prompt", None)
        stand_in = _stand_in(prompt)
        if stand_in is None or not all(isinstance(value, _SCALARS) for value in fields.values()):
            return None
        request = self._validated(orjson.dumps({**fields, "prompt": stand_in}))
        if request is None or not is_scoring(request):
            return None
        own = {name: copy(getattr(request, name)) for name in _LISTS}
        return request.model_copy(
            update={"prompt": prompt, "request_id": fields.get("request_id", random_uuid()), **own}
        )


_SCALARS = (str, int, float, bool, NoneType)

_LISTS = [name for name, field in CompletionRequest.model_fields.items() if isinstance(field.default, list)]
"""Fields whose default is a list, of which each request has its own."""


def _validated(body: bytes) -> CompletionRequest | None:
    try:
        return CompletionRequest.model_validate(orjson.loads(body))
    except ValidationError:
        return None


def _stand_in(prompt: Any) -> list[Any] | None:
    """As many prompts of one token each; None for prompts that are not token ids."""
    if _are_token_ids(prompt):
        return [0]
    if isinstance(prompt, list) and prompt and all(map(_are_token_ids, prompt)):
        return [[0]] * len(prompt)
    return None


def _are_token_ids(prompt: Any) -> bool:
    """Whether this is a list of numbers that may be token ids, and at least one."""
    return isinstance(prompt, list) and set(map(type, prompt)) == {int} and min(prompt) >= 0
