"""Which token sequences a request to `/v1/score` asks for: prompts, or continuations behind them."""

import asyncio
from dataclasses import dataclass
from typing import Any

from scoremode.protocol import ScoreRequest
from scoremode_server.errors import RequestError
from scoremode_server.text import TextCodec, as_prompts


@dataclass(frozen=True, slots=True)
class Target:
    """A sequence to score, and from which token on it counts."""

    token_ids: list[int]
    first: int
    """0 for a whole prompt, whose first token has no logprob; else where the continuation starts."""
    prompt_index: int
    continuation_index: int | None = None

    @property
    def name(self) -> str:
        """Its place in the request, for error messages."""
        if self.continuation_index is None:
            return f"prompt[{self.prompt_index}]"
        return f"continuations[{self.continuation_index}] behind prompt[{self.prompt_index}]"


async def plan_targets(request: ScoreRequest, codec: TextCodec) -> list[Target]:
    """The sequences that a request asks for, prompts outermost.

    Raises:
        RequestError: there is no prompt or continuation, or an empty one.
    """
    prompts = as_prompts(request.prompt)
    if request.continuations is None:
        return [
            Target(await _encode(prompt, codec, request.add_special_tokens), 0, index)
            for index, prompt in enumerate(prompts)
        ]
    if not request.continuations:
        raise RequestError("continuations is empty: leave it out to score the prompt", "continuations")
    per_prompt = await asyncio.gather(*(_behind(prompt, index, request, codec) for index, prompt in enumerate(prompts)))
    return [target for targets in per_prompt for target in targets]


async def _encode(prompt: str | list[int], codec: TextCodec, add_special_tokens: bool) -> list[int]:
    return await codec.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt


async def _behind(prompt: str | list[int], index: int, request: ScoreRequest, codec: TextCodec) -> list[Target]:
    """The continuations of a request behind one prompt."""
    continuations: list[Any] = list(request.continuations or ())
    if isinstance(prompt, str) and isinstance(continuations[0], str):
        first, sequences = await codec.encode_behind(prompt, continuations, request.add_special_tokens)
    else:
        context = await _encode(prompt, codec, request.add_special_tokens)
        first = len(context)
        sequences = [context + await _encode(continuation, codec, False) for continuation in continuations]
    targets = [Target(token_ids, first, index, place) for place, token_ids in enumerate(sequences)]
    for target in targets:
        if first == 0:
            raise RequestError(f"prompt[{index}] is empty: a continuation needs a token before it", "prompt")
        if len(target.token_ids) <= first:
            raise RequestError(
                f"{target.name} has no token of its own: it is empty, or one token with the end of its prompt",
                "continuations",
            )
    return targets
