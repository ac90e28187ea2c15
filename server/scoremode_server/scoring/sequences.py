"""The token sequences of a request to `/v1/score`: prompts, or continuations of them."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scoremode.wire.protocol import ScoreRequest
from scoremode_server.errors import RequestError
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.scorer import ScoredSequence
from scoremode_server.scoring.tokenizer import Tokenizer, as_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSequence(ScoredSequence):
    """A sequence to score, and its place in the request. `first` is `logprobs_from` or the continuation's start."""

    prompt_index: int
    continuation_index: int | None = None

    @property
    def name(self) -> str:
        """Its place in the request, for error messages."""
        if self.continuation_index is None:
            return f"prompt[{self.prompt_index}]"
        return f"continuations[{self.continuation_index}] after prompt[{self.prompt_index}]"


async def read_sequences(request: ScoreRequest, tokenizer: Tokenizer, limits: Limits) -> list[RequestedSequence]:
    """The sequences of a request, in the order of its prompts."""
    prompts = as_prompts(request.prompt)
    limits.check_num_sequences(len(prompts), None if request.continuations is None else len(request.continuations))
    sequences = await _sequences(prompts, request, tokenizer)
    for sequence in sequences:
        limits.check_sequence(sequence.token_ids, sequence.name)
        if sequence.first >= len(sequence.token_ids):
            raise RequestError(
                f"logprobs_from is {sequence.first}, but {sequence.name} has {len(sequence.token_ids)} tokens",
                "logprobs_from",
            )
    return _with_candidates(request, sequences, limits)


async def _sequences(
    prompts: list[str | list[int]], request: ScoreRequest, tokenizer: Tokenizer
) -> list[RequestedSequence]:
    if request.continuations is None:
        firsts = _firsts(request, len(prompts))
        return [
            RequestedSequence(
                token_ids=await _encode(prompt, tokenizer, request.add_special_tokens),
                first=first,
                only_from_first=True,
                prompt_index=index,
            )
            for index, (prompt, first) in enumerate(zip(prompts, firsts, strict=True))
        ]
    if request.logprobs_from != 0:
        raise RequestError("logprobs_from: a continuation's logprobs begin where it does", "logprobs_from")
    if not request.continuations:
        raise RequestError("continuations is empty: leave it out to score the prompt", "continuations")
    per_prompt = await asyncio.gather(
        *(_continued(prompt, index, request, tokenizer) for index, prompt in enumerate(prompts))
    )
    return [sequence for sequences in per_prompt for sequence in sequences]


def _firsts(request: ScoreRequest, num_prompts: int) -> list[int]:
    """The position from which each prompt's logprobs are wanted."""
    each = request.logprobs_from
    firsts = each if isinstance(each, list) else [each] * num_prompts
    if len(firsts) != num_prompts:
        raise RequestError(f"logprobs_from has {len(firsts)} positions for {num_prompts} prompts", "logprobs_from")
    if min(firsts, default=0) < 0:
        raise RequestError(f"logprobs_from is {min(firsts)}: positions count from 0", "logprobs_from")
    return firsts


def _with_candidates(
    request: ScoreRequest, sequences: list[RequestedSequence], limits: Limits
) -> list[RequestedSequence]:
    """The sequences with the candidates of their positions."""
    given: Any = request.candidate_token_ids
    if given is None:
        return sequences
    if not given or isinstance(given[0], int):
        limits.check_num_candidates(len(given))
        shared = _table(given, 1, limits)
        return [replace(sequence, candidates=shared) for sequence in sequences]
    if request.continuations is not None:
        raise RequestError(
            "candidate_token_ids: with continuations, give one list for all positions", "candidate_token_ids"
        )
    own = given if given[0] and isinstance(given[0][0], list) else [given]
    if len(own) != len(sequences):
        raise RequestError(
            f"candidate_token_ids has candidates for {len(own)} prompts, and there are {len(sequences)}",
            "candidate_token_ids",
        )
    return [_with_own(sequence, lists, limits) for sequence, lists in zip(sequences, own, strict=True)]


def _with_own(sequence: RequestedSequence, lists: Any, limits: Limits) -> RequestedSequence:
    num_positions = len(sequence.token_ids) - sequence.first
    if len(lists) != num_positions:
        raise RequestError(
            f"candidate_token_ids has {len(lists)} lists for the {num_positions} positions of {sequence.name}",
            "candidate_token_ids",
        )
    limits.check_num_candidates(max(map(len, lists)))
    return replace(sequence, candidates=_table(lists, 2, limits))


def _table(lists: Any, num_dimensions: int, limits: Limits) -> np.ndarray:
    """Candidates as int32, one or more per position."""
    try:
        table = np.array(lists, np.int32)
    except (ValueError, OverflowError):
        table = np.empty(0, np.int32)
    if table.ndim != num_dimensions or table.size == 0:
        raise RequestError(
            "candidate_token_ids must be one or more token ids, the same number at each position", "candidate_token_ids"
        )
    limits.check_vocabulary([int(table.min()), int(table.max())], "candidate_token_ids")
    return table


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
    requested = [
        RequestedSequence(token_ids=token_ids, first=first, prompt_index=index, continuation_index=place)
        for place, token_ids in enumerate(sequences)
    ]
    for sequence in requested:
        if first == 0:
            raise RequestError(f"prompt[{index}] is empty: a continuation needs a token before it", "prompt")
        if len(sequence.token_ids) <= first:
            raise RequestError(
                f"{sequence.name} has no token of its own: it is empty, or one token with the end of its prompt",
                "continuations",
            )
    return requested
