"""Makes the token sequences of a request to `/v1/score` from prompts, continuations or conversations, and the passes
through the engine that score them."""

from collections import Counter
from itertools import islice
from typing import Any, cast

import numpy as np

from scoremode.wire.protocol import MAX_CANDIDATES, ScoreRequest
from scoremode_server.engine.sequence import EnginePass, TokenSequence
from scoremode_server.errors import RequestError, TooLargeError
from scoremode_server.rows import score_columns
from scoremode_server.scoring.core import Core
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.tokenizer import as_prompts
from scoremode_server.worker.sinks import Sink, sink_classes


async def read_sequences(request: ScoreRequest, core: Core) -> tuple[list[TokenSequence], list[EnginePass]]:
    """Read the sequences of a request, in the order of its prompts or conversations, and the pass that scores each.
    TooLargeError if texts with their continuations are too long in total."""
    if request.logprobs_from != 0 and (request.messages is not None or request.continuations is not None):
        raise RequestError("logprobs_from: leave it out with messages or continuations", "logprobs_from")
    if request.messages is not None:
        sequences = await _turns(request, core)
    elif request.prompt is None:
        raise RequestError("prompt or messages is required", "prompt")
    elif request.continuations is None:
        sequences = await _prompts(as_prompts(request.prompt), request, core)
    else:
        sequences = await _continued(as_prompts(request.prompt), request, core)
    _set_candidates(request, sequences, core.limits)
    _set_sinks(request, sequences)
    return sequences, _in_passes(request, sequences)


async def _turns(request: ScoreRequest, core: Core) -> list[TokenSequence]:
    """Make a sequence of each turn. The tokens before the turn are its context."""
    conversations = await core.conversations.sequences(request, ["prompt", "continuations"])
    sequences, counts = list[TokenSequence](), Counter[int]()
    for conversation in conversations:
        index, token_ids = conversation["conversation"], conversation["token_ids"]
        # The conversation's length, and the number of all turns, were checked when it was rendered.
        core.limits.check_vocabulary(token_ids, f"messages[{index}]")
        for turn in conversation["turns"]:
            sequences.append(
                TokenSequence(
                    context=token_ids,
                    first=turn["first"],
                    continuation=token_ids[turn["first"] : turn["end"]],
                    prompt_index=index,
                    continuation_index=counts[index],
                )
            )
            counts[index] += 1
    return sequences


def _in_passes(request: ScoreRequest, sequences: list[TokenSequence]) -> list[EnginePass]:
    """Assign a pass to each sequence. Continuations that differ only in their last token share one, with the last
    tokens as candidates in its last row. A row has the rank of one token, and maybe sinks' figures of that token, so
    with ranks or sinks each sequence has a pass of its own."""
    passes: list[EnginePass] = []
    pass_by_beginning: dict[Any, EnginePass] = {}
    can_share = request.continuations is not None and not request.return_ranks and not request.sinks
    for place, sequence in enumerate(sequences):
        last = sequence.last_token
        # Equal contexts are the same list.
        key: Any = (id(sequence.context), tuple(sequence.targets[:-1])) if can_share else place
        engine_pass = pass_by_beginning.get(key)
        # A pass computes its candidates in all its rows, not only in the last. Begin another if these are too many.
        if engine_pass is None or (
            last not in engine_pass.columns and (engine_pass.num_candidates + 1) * sequence.num_targets > MAX_CANDIDATES
        ):
            engine_pass = pass_by_beginning[key] = EnginePass(sequence, {last: 0})
        sequence.column = engine_pass.columns.setdefault(last, engine_pass.num_candidates + 1)
        passes.append(engine_pass)
    return passes


async def _prompts(prompts: list[str | list[int]], request: ScoreRequest, core: Core) -> list[TokenSequence]:
    """Make a sequence of each prompt, with logprobs from the requested positions on."""
    core.limits.check_num_sequences(len(prompts), "prompt")
    start = request.logprobs_from
    firsts = start if isinstance(start, list) else [start] * len(prompts)
    if len(firsts) != len(prompts):
        raise RequestError(f"logprobs_from has {len(firsts)} positions for {len(prompts)} prompts", "logprobs_from")
    sequences = []
    for index, (prompt, first) in enumerate(zip(prompts, firsts, strict=True)):
        token_ids = await core.tokenizer.encode(prompt, request.add_special_tokens)
        name = f"prompt[{index}]"
        core.limits.check_sequence(token_ids, name)
        if first >= len(token_ids):
            raise RequestError(f"logprobs_from is {first}, but {name} has {len(token_ids)} tokens", "logprobs_from")
        sequences.append(TokenSequence(context=token_ids, first=first, prompt_index=index))
    return sequences


def _continuations(request: ScoreRequest, num_prompts: int) -> list[list[Any]]:
    continuations: Any = request.continuations
    if not continuations:
        raise RequestError("continuations is empty: leave it out to score the prompt", "continuations")
    if isinstance(continuations[0], str) or not continuations[0] or isinstance(continuations[0][0], int):
        return [continuations] * num_prompts
    if len(continuations) != num_prompts:
        raise RequestError(
            f"continuations has lists for {len(continuations)} prompts, and there are {num_prompts}", "continuations"
        )
    if [] in continuations:
        raise RequestError(
            f"continuations[{continuations.index([])}] is empty: each prompt needs at least one", "continuations"
        )
    return cast(list[list[Any]], continuations)


async def _continued(prompts: list[str | list[int]], request: ScoreRequest, core: Core) -> list[TokenSequence]:
    """Make a sequence of each continuation of each prompt. Sequences with equal contexts share one list.

    Texts are joined as in lm-eval: white space at a prompt's end goes to the continuation, both are encoded as one
    text, and the continuation begins after as many tokens as the prompt alone has.
    """
    limits, continuations = core.limits, _continuations(request, len(prompts))
    limits.check_num_sequences(sum(map(len, continuations)), "continuations")
    are_joined = isinstance(prompts[0], str) and isinstance(continuations[0][0], str)
    encode = _encode_joined if are_joined else _encode_apart
    encoded = await encode(prompts, continuations, request.add_special_tokens, core)
    sequences, contexts = list[TokenSequence](), dict[tuple[int, ...], list[int]]()
    for index, (alone, own) in enumerate(encoded):
        if not alone:
            raise RequestError(f"prompt[{index}] is empty: a continuation needs a token before it", "prompt")
        limits.check_sequence(alone, f"prompt[{index}]")
        first, shared = len(alone), contexts.setdefault(tuple(alone), alone)
        for place, token_ids in enumerate(own):
            context, targets = shared, token_ids
            if are_joined:
                # A tokenizer may encode the end of a prompt differently before a continuation.
                context, targets = token_ids[:first], token_ids[first:]
                context = contexts.setdefault(tuple(context), context)
            sequence = TokenSequence(
                context=context, first=first, continuation=targets, prompt_index=index, continuation_index=place
            )
            if not targets:
                raise RequestError(
                    f"{sequence.name} has no token of its own: it is empty, or merges with its prompt's last token",
                    "continuations",
                )
            limits.check_length(sequence.num_tokens, sequence.name)
            limits.check_vocabulary(targets, sequence.name)
            sequences.append(sequence)
    return sequences


async def _encode_joined(
    prompts: list[Any], continuations: list[Any], add_special_tokens: bool, core: Core
) -> list[tuple[list[int], list[list[int]]]]:
    """Encode each prompt alone, and the prompt joined with each of its continuations."""
    pairs = list(zip(prompts, continuations, strict=True))
    num_characters = sum(len(prompt) * len(own) + sum(map(len, own)) for prompt, own in pairs)
    if num_characters > core.limits.max_request_bytes:
        raise TooLargeError(
            f"continuations have {num_characters} characters with the prompts before them, more than "
            f"{core.limits.max_request_bytes} (--max-request-bytes): send fewer per request",
            "continuations",
        )
    texts = [text for prompt, own in pairs for text in (prompt.rstrip(), *(prompt + end for end in own))]
    encoded = iter(await core.tokenizer.encode_all(texts, add_special_tokens))
    return [(next(encoded), list(islice(encoded, len(own)))) for own in continuations]


async def _encode_apart(
    prompts: list[Any], continuations: list[Any], add_special_tokens: bool, core: Core
) -> list[tuple[list[int], list[list[int]]]]:
    """Encode each prompt and each of its continuations separately, because prompts or continuations are token ids."""
    shared = {id(own): own for own in continuations}
    encoded = {key: [await core.tokenizer.encode(text, False) for text in own] for key, own in shared.items()}
    return [
        (await core.tokenizer.encode(prompt, add_special_tokens), encoded[id(own)])
        for prompt, own in zip(prompts, continuations, strict=True)
    ]


def _set_candidates(request: ScoreRequest, sequences: list[TokenSequence], limits: Limits) -> None:
    """Set the candidates of each sequence from `candidate_token_ids`."""
    candidates: Any = request.candidate_token_ids
    if candidates is None:
        return
    if not candidates or isinstance(candidates[0], int):
        shared = _table(candidates, 1, limits)
        for sequence in sequences:
            sequence.candidates = shared
        return
    if request.continuations is not None:
        raise RequestError(
            "candidate_token_ids: with continuations, give one list for all positions", "candidate_token_ids"
        )
    own = candidates if candidates[0] and isinstance(candidates[0][0], list) else [candidates]
    if len(own) != len(sequences):
        raise RequestError(
            f"candidate_token_ids has candidates for {len(own)} prompts, and there are {len(sequences)}",
            "candidate_token_ids",
        )
    for sequence, lists in zip(sequences, own, strict=True):
        num_positions = sequence.num_targets
        if len(lists) != num_positions:
            raise RequestError(
                f"candidate_token_ids has {len(lists)} lists for the {num_positions} positions of {sequence.name}",
                "candidate_token_ids",
            )
        sequence.candidates = _table(lists, 2, limits)


def _set_sinks(request: ScoreRequest, sequences: list[TokenSequence]) -> None:
    """Set the sequences' sinks, and the columns that the sinks add."""
    wanted: dict[str, Any] = dict(request.sinks)
    if request.statistics:
        wanted["statistics"] = request.statistics
    sinks = {name: make_sink(name, data) for name, data in wanted.items()}
    columns = tuple(column for sink in sinks.values() for column in sink.columns)
    counts = Counter(column.name for column in (*score_columns(1), *columns))
    if duplicates := [name for name, count in counts.items() if count > 1]:
        raise RequestError(f"sinks: two columns have the name {duplicates[0]!r}", "sinks")
    may_be_cached = all(sink.may_be_cached for sink in sinks.values())
    for sequence in sequences:
        sequence.sinks, sequence.sink_columns, sequence.may_be_cached = wanted, columns, may_be_cached


def make_sink(name: str, data: Any) -> Sink:
    """Make a sink as workers will, to check its data and to read its columns."""
    classes = sink_classes()
    if name not in classes:
        raise RequestError(f"sinks: this server has {', '.join(classes)}, not {name!r}", "sinks")
    try:
        return classes[name](data)
    except ValueError as error:
        raise RequestError(f"sinks: {name}: {error}", "statistics" if name == "statistics" else "sinks") from None


def _table(lists: Any, num_dimensions: int, limits: Limits) -> np.ndarray:
    """Convert candidates to int32, [m] or [positions, m], and check them."""
    try:
        table = np.array(lists, np.int32)
    except (ValueError, OverflowError):
        table = np.empty(0, np.int32)
    if table.ndim != num_dimensions or table.size == 0:
        raise RequestError(
            "candidate_token_ids must be one or more token ids, the same number at each position", "candidate_token_ids"
        )
    if table.shape[-1] > MAX_CANDIDATES:
        raise RequestError(
            f"candidate_token_ids has {table.shape[-1]} tokens for a position, more than {MAX_CANDIDATES}",
            "candidate_token_ids",
        )
    limits.check_vocabulary([int(table.min()), int(table.max())], "candidate_token_ids")
    return table
