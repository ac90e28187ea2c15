"""Which token sequences a request to `/v1/score` asks for: prompts, or continuations of them."""

import asyncio
from dataclasses import dataclass
from typing import Any

from scoremode.protocol import ScoreRequest
from scoremode_server.errors import RequestError
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.tokenizer import Tokenizer, as_prompts


@dataclass(frozen=True, slots=True)
class RequestedSequence:
    """A sequence to score, and from which token on it is asked for."""

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
        return f"continuations[{self.continuation_index}] after prompt[{self.prompt_index}]"


async def read_sequences(request: ScoreRequest, tokenizer: Tokenizer, limits: Limits) -> list[RequestedSequence]:
    """The sequences that a request asks for, prompts outermost.

    Raises:
        RequestError: there is no prompt or continuation, an empty one, or too many.
    """
    prompts = as_prompts(request.prompt)
    limits.check_num_sequences(len(prompts), None if request.continuations is None else len(request.continuations))
    if request.continuations is None:
        return [
            RequestedSequence(await _encode(prompt, tokenizer, request.add_special_tokens), 0, index)
            for index, prompt in enumerate(prompts)
        ]
    if not request.continuations:
        raise RequestError("continuations is empty: leave it out to score the prompt", "continuations")
    per_prompt = await asyncio.gather(
        *(_continued(prompt, index, request, tokenizer) for index, prompt in enumerate(prompts))
    )
    return [sequence for sequences in per_prompt for sequence in sequences]


async def _encode(prompt: str | list[int], tokenizer: Tokenizer, add_special_tokens: bool) -> list[int]:
    return await tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt


async def _continued(
    prompt: str | list[int], index: int, request: ScoreRequest, tokenizer: Tokenizer
) -> list[RequestedSequence]:
    """One prompt with each continuation of a request."""
    continuations: list[Any] = list(request.continuations or ())
    if isinstance(prompt, str) and isinstance(continuations[0], str):
        first, sequences = await tokenizer.encode_continuations(prompt, continuations, request.add_special_tokens)
    else:
        context = await _encode(prompt, tokenizer, request.add_special_tokens)
        first = len(context)
        sequences = [context + await _encode(continuation, tokenizer, False) for continuation in continuations]
    requested = [RequestedSequence(token_ids, first, index, place) for place, token_ids in enumerate(sequences)]
    for sequence in requested:
        if first == 0:
            raise RequestError(f"prompt[{index}] is empty: a continuation needs a token before it", "prompt")
        if len(sequence.token_ids) <= first:
            raise RequestError(
                f"{sequence.name} has no token of its own: it is empty, or one token with the end of its prompt",
                "continuations",
            )
    return requested
