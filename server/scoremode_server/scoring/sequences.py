"""The token sequences of a request to `/v1/score`: prompts, or continuations of them, and the passes through the engine
that score them."""

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scoremode.wire.protocol import MAX_CANDIDATES, ScoreRequest, TurnSequence
from scoremode_server.errors import RequestError
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.scorer import ScoredSequence
from scoremode_server.scoring.tokenizer import Tokenizer, as_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSequence(ScoredSequence):
    """A sequence to score, and its place in the request. `first` is `logprobs_from` or the continuation's start."""

    prompt_index: int
    """Or the index of its conversation."""
    continuation_index: int | None = None
    """Or the number of its turn, from 0, among those of its conversation."""
    pass_index: int = 0
    """Of the pass that scores it."""
    column: int = 0
    """The last token's in the last row of the pass; 0 if it is the pass's own last token."""

    @property
    def name(self) -> str:
        """Its place in the request, for error messages."""
        if self.continuation_index is None:
            return f"prompt[{self.prompt_index}]"
        return f"continuations[{self.continuation_index}] after prompt[{self.prompt_index}]"


async def read_sequences(
    request: ScoreRequest, conversations: list[TurnSequence] | None, tokenizer: Tokenizer, limits: Limits
) -> tuple[list[RequestedSequence], list[ScoredSequence]]:
    """The sequences of a request, in the order of its prompts or conversations, and the passes that score them."""
    if conversations is not None:
        sequences = _turns(request, conversations, limits)
    elif request.prompt is None:
        raise RequestError("prompt is required, or messages", "prompt")
    elif request.continuations is None:
        sequences = await _prompts(as_prompts(request.prompt), request, tokenizer, limits)
    else:
        prompts = as_prompts(request.prompt)
        continuations = _continuations(request, len(prompts))
        limits.check_num_sequences(sum(map(len, continuations)), "continuations")
        of_prompts = (
            _continued(prompt, index, own, request, tokenizer)
            for index, (prompt, own) in enumerate(zip(prompts, continuations, strict=True))
        )
        sequences = [sequence for of_prompt in await asyncio.gather(*of_prompts) for sequence in of_prompt]
    placed, passes = _in_passes(request, _with_candidates(request, sequences, limits))
    for sequence in placed if request.continuations is not None else ():
        if sequence.column:
            # The rest is that of its pass.
            limits.check_vocabulary(sequence.token_ids[-1:], sequence.name)
        else:
            limits.check_sequence(sequence.token_ids, sequence.name)
    return placed, passes


def _turns(request: ScoreRequest, conversations: list[TurnSequence], limits: Limits) -> list[RequestedSequence]:
    """Each turn after the tokens before it."""
    for field in ("prompt", "continuations"):
        if getattr(request, field) is not None:
            raise RequestError(f"{field} cannot be given with messages", field)
    if request.logprobs_from != 0:
        raise RequestError("logprobs_from: a turn's logprobs begin where it does", "logprobs_from")
    limits.check_num_sequences(sum(len(each["turns"]) for each in conversations), "messages")
    sequences, counts = list[RequestedSequence](), Counter[int]()
    for each in conversations:
        limits.check_sequence(each["token_ids"], f"messages[{each['conversation']}]")
        for turn in each["turns"]:
            index = each["conversation"]
            token_ids = each["token_ids"][: turn["end"]]
            sequences.append(
                RequestedSequence(
                    token_ids=token_ids, first=turn["first"], prompt_index=index, continuation_index=counts[index]
                )
            )
            counts[index] += 1
    return sequences


def _in_passes(
    request: ScoreRequest, sequences: list[RequestedSequence]
) -> tuple[list[RequestedSequence], list[ScoredSequence]]:
    """The sequences with their places, and the passes. Continuations that differ in their last token alone share a
    pass, as candidates of its last row. A row has one token's rank, so with ranks each has a pass of its own."""
    if request.continuations is None or request.return_ranks:
        return [replace(sequence, pass_index=index) for index, sequence in enumerate(sequences)], list(sequences)
    placed, passes, last_tokens = [], list[ScoredSequence](), list[dict[int, int]]()
    passes_by_beginning: dict[tuple[int, tuple[int, ...]], int] = {}
    for sequence in sequences:
        last = sequence.token_ids[-1]
        key = sequence.first, tuple(sequence.token_ids[:-1])
        index = passes_by_beginning.get(key, len(passes))
        if index < len(passes) and last not in last_tokens[index]:
            num_candidates = sequence.num_candidates + len(last_tokens[index])
            # All rows of a pass have the same candidates.
            if num_candidates * (len(sequence.token_ids) - sequence.first) > MAX_CANDIDATES:
                index = len(passes)
        if index == len(passes):
            passes_by_beginning[key] = index
            passes.append(sequence)
            last_tokens.append({last: 0})
        column = last_tokens[index].setdefault(last, sequence.num_candidates + len(last_tokens[index]))
        placed.append(replace(sequence, pass_index=index, column=column))
    for index, (_, *others) in enumerate(last_tokens):
        if others:
            shared = passes[index]
            candidates = [*([] if shared.candidates is None else shared.candidates), *others]
            # The two top tokens tell which token is the most likely one, and alone.
            passes[index] = replace(shared, candidates=np.array(candidates, np.int32), least_top=2)
    return placed, passes


async def _prompts(
    prompts: list[str | list[int]], request: ScoreRequest, tokenizer: Tokenizer, limits: Limits
) -> list[RequestedSequence]:
    """The prompts, from their first positions on."""
    limits.check_num_sequences(len(prompts), "prompt")
    each = request.logprobs_from
    firsts = each if isinstance(each, list) else [each] * len(prompts)
    if len(firsts) != len(prompts):
        raise RequestError(f"logprobs_from has {len(firsts)} positions for {len(prompts)} prompts", "logprobs_from")
    if min(firsts, default=0) < 0:
        raise RequestError(f"logprobs_from is {min(firsts)}: positions count from 0", "logprobs_from")
    sequences = []
    for index, (prompt, first) in enumerate(zip(prompts, firsts, strict=True)):
        token_ids = await tokenizer.encode(prompt, request.add_special_tokens)
        sequence = RequestedSequence(token_ids=token_ids, first=first, prompt_index=index)
        limits.check_sequence(token_ids, sequence.name)
        if first >= len(token_ids):
            raise RequestError(
                f"logprobs_from is {first}, but {sequence.name} has {len(token_ids)} tokens", "logprobs_from"
            )
        sequences.append(sequence)
    return sequences


def _continuations(request: ScoreRequest, num_prompts: int) -> list[list[Any]]:
    given: Any = request.continuations
    if request.logprobs_from != 0:
        raise RequestError("logprobs_from: a continuation's logprobs begin where it does", "logprobs_from")
    if not given:
        raise RequestError("continuations is empty: leave it out to score the prompt", "continuations")
    if isinstance(given[0], str) or not given[0] or isinstance(given[0][0], int):
        return [given] * num_prompts
    if len(given) != num_prompts:
        message = f"continuations has lists for {len(given)} prompts, and there are {num_prompts}"
        raise RequestError(message, "continuations")
    if [] in given:
        message = f"continuations[{given.index([])}] is empty: each prompt needs at least one"
        raise RequestError(message, "continuations")
    per_prompt: list[list[Any]] = given
    return per_prompt


async def _continued(
    prompt: str | list[int], index: int, continuations: list[Any], request: ScoreRequest, tokenizer: Tokenizer
) -> list[RequestedSequence]:
    if isinstance(prompt, str) and isinstance(continuations[0], str):
        first, sequences = await tokenizer.encode_continuations(prompt, continuations, request.add_special_tokens)
    else:
        context = await tokenizer.encode(prompt, request.add_special_tokens)
        first = len(context)
        sequences = [context + await tokenizer.encode(continuation, False) for continuation in continuations]
    if first == 0:
        raise RequestError(f"prompt[{index}] is empty: a continuation needs a token before it", "prompt")
    requested = [
        RequestedSequence(token_ids=token_ids, first=first, prompt_index=index, continuation_index=place)
        for place, token_ids in enumerate(sequences)
    ]
    for sequence in requested:
        if len(sequence.token_ids) <= first:
            raise RequestError(
                f"{sequence.name} has no token of its own: it is empty, or one token with the end of its prompt",
                "continuations",
            )
    return requested


def _with_candidates(
    request: ScoreRequest, sequences: list[RequestedSequence], limits: Limits
) -> list[RequestedSequence]:
    """The sequences with the candidates of their positions."""
    given: Any = request.candidate_token_ids
    if given is None:
        return sequences
    if not given or isinstance(given[0], int):
        shared = _table(given, 1, limits)
        return [replace(sequence, candidates=shared) for sequence in sequences]
    if request.continuations is not None:
        message = "candidate_token_ids: with continuations, give one list for all positions"
        raise RequestError(message, "candidate_token_ids")
    own = given if given[0] and isinstance(given[0][0], list) else [given]
    if len(own) != len(sequences):
        message = f"candidate_token_ids has candidates for {len(own)} prompts, and there are {len(sequences)}"
        raise RequestError(message, "candidate_token_ids")
    with_own = []
    for sequence, lists in zip(sequences, own, strict=True):
        num_positions = len(sequence.token_ids) - sequence.first
        if len(lists) != num_positions:
            raise RequestError(
                f"candidate_token_ids has {len(lists)} lists for the {num_positions} positions of {sequence.name}",
                "candidate_token_ids",
            )
        with_own.append(replace(sequence, candidates=_table(lists, 2, limits)))
    return with_own


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
    if table.shape[-1] > MAX_CANDIDATES:
        message = f"candidate_token_ids has {table.shape[-1]} tokens for a position, of at most {MAX_CANDIDATES}"
        raise RequestError(message, "candidate_token_ids")
    limits.check_vocabulary([int(table.min()), int(table.max())], "candidate_token_ids")
    return table
