"""The texts of the tokens that occur in a run, for whoever shows it token by token."""

import logging
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.client import AsyncScoreClient
from scoremode.errors import ScoremodeError

_log = logging.getLogger(__name__)


async def texts_of_occurring(client: AsyncScoreClient, *token_ids: Collection[int] | NDArray[Any]) -> dict[int, str]:
    """Look up the text of every token id that occurs in some arrays, by the tokenizer of a server.

    A server that fails, or is older than the route, costs the texts, not the run: that is said in the log, and there
    are none.
    """
    occurring = np.unique(np.concatenate([np.asarray(ids) for ids in token_ids])).tolist()
    try:
        return await client.token_texts(occurring)
    except ScoremodeError as error:
        _log.warning("the run is kept without the texts of its tokens: %s", error)
        return {}
