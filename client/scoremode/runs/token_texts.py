"""The texts of tokens: of all that occur in a run, and of the most divergent positions with what is before them."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.client import AsyncScoreClient
from scoremode.errors import ScoremodeError
from scoremode.kld import KldPositions
from scoremode.metrics import exp
from scoremode.windows import EXHAUSTIVE_METHODS, Method
from scoremode.wire.protocol import DivergentPosition

_log = logging.getLogger(__name__)

NUM_TOKENS_BEFORE = 16


async def texts_of_occurring(client: AsyncScoreClient, *token_ids: Collection[int] | NDArray[Any]) -> dict[int, str]:
    """Look up the text of every token id that occurs in some arrays, by the tokenizer of a server.

    A server that fails, or is older than the route, costs the texts, not the run: the log says so, and there are none.
    """
    occurring = np.unique(np.concatenate([np.asarray(ids) for ids in token_ids])).tolist()
    try:
        return await client.token_texts(occurring)
    except ScoremodeError as error:
        _log.warning("the run is kept without the texts of its tokens: %s", error)
        return {}


@dataclass(frozen=True, slots=True)
class DivergentToken:
    """A position with one of the largest KL divergences. Texts are None where the server did not give them."""

    index: int
    """Among the positions of all windows, in order, from 0."""
    window: int
    """Index of its window in the reference."""
    kld: float | None
    """Nats; None for infinity."""
    token_id: int
    reference_probability: float
    """Of the text's token."""
    probability: float
    reference_top_token_id: int
    """The top token of the reference."""
    reference_confidence: float
    """The reference's probability of it."""
    top_token_id: int
    """The top token of the served model."""
    text_before: str | None
    """Of the targets before it, sixteen at most."""
    token: str | None
    reference_top_token: str | None
    top_token: str | None


async def divergent_tokens(
    client: AsyncScoreClient,
    most_divergent: Sequence[DivergentPosition],
    positions: KldPositions,
    window_sizes: Sequence[int],
    method: Method,
) -> list[DivergentToken]:
    """Look up the texts of positions, by the tokenizer of a server.

    A server that fails costs the texts, not the comparison: the log says so.
    """
    if method in EXHAUSTIVE_METHODS:
        # Targets follow one another through the whole text, with the other methods within a window.
        starts = np.zeros(len(positions), np.intp)
    else:
        starts = np.repeat(np.cumsum([0, *window_sizes[:-1]]), window_sizes)
    places = [entry["index"] for entry in most_divergent]
    before = [tuple(positions.token_ids[max(starts[at], at - NUM_TOKENS_BEFORE) : at].tolist()) for at in places]
    shown = (positions.token_ids, positions.reference_top_token_ids, positions.top_token_ids)
    tokens = [[int(ids[at]) for ids in shown] for at in places]
    texts = await _texts(client, {*before, *((token,) for of_place in tokens for token in of_place)})
    return [
        DivergentToken(
            index=at,
            window=entry["window"],
            kld=entry["kld"],
            token_id=token,
            reference_probability=exp(float(positions.reference_logprobs[at])),
            probability=exp(float(positions.logprobs[at])),
            reference_top_token_id=reference_top,
            reference_confidence=float(positions.reference_confidence[at]),
            top_token_id=top,
            text_before=texts.get(before_it),
            token=texts.get((token,)),
            reference_top_token=texts.get((reference_top,)),
            top_token=texts.get((top,)),
        )
        for entry, at, before_it, (token, reference_top, top) in zip(
            most_divergent, places, before, tokens, strict=True
        )
    ]


async def _texts(client: AsyncScoreClient, sequences: set[tuple[int, ...]]) -> dict[tuple[int, ...], str]:
    texts: dict[tuple[int, ...], str] = {(): ""}
    try:
        # One by one, over one connection: they are few and short.
        for sequence in sequences - {()}:
            texts[sequence] = await client.detokenize(sequence)
    except ScoremodeError as error:
        _log.warning("the most divergent tokens are shown without their text: %s", error)
        return {}
    return texts
