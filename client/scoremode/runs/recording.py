"""Records a corpus as a reference on a server, for `ppl-client record` and for Python."""

import logging
import math
import time
from dataclasses import dataclass
from typing import Unpack

from scoremode.client import AsyncScoreClient
from scoremode.errors import BadRequestError, NotFoundError, RateLimitError, ServerError, TransportError
from scoremode.runs.corpora import Corpus
from scoremode.runs.run import OnProgress, Progress
from scoremode.windows import WindowSettings
from scoremode.wire import OnWindow, PerplexityWindow, Reference

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recording:
    corpus: Corpus
    reference: Reference
    num_resumed: int
    """Windows that the server had already recorded."""
    seconds: float


async def record_reference(
    client: AsyncScoreClient,
    corpus: Corpus,
    name: str,
    *,
    layers: bool = False,
    routes: bool = False,
    on_progress: OnProgress | None = None,
    on_window: OnWindow | None = None,
    **windows: Unpack[WindowSettings],
) -> Recording:
    """Record the served model's distributions over a corpus, so that `measure_kld` can compare other models with it.

    The server cuts the windows. If the recording is interrupted, call this again with the same arguments to resume it.

    Args:
        client: Client of one server, which must have a folder for references.
        corpus: The text.
        name: Name of the reference.
        layers: Record the residual stream at the boundaries of the decoder layers too, for `measure_layers`. The log
            says how much disk space this takes; a ScoremodeError if there is not enough.
        routes: Record the experts that mixture-of-experts layers choose too, for `routes` of `measure_kld`.
        on_progress: Called for each window.
        on_window: Called with each window too, including its logprobs and ranks.
        **windows: Fields of `WindowSettings`, which set how the text is cut into windows.

    Raises:
        ScoremodeError: an attempt fails before the server records another window, the server refuses the windows, or it
            has another reference with that name.
    """
    try:
        num_resumed = (await client.reference(name)).num_recorded
    except NotFoundError:
        num_resumed = 0
    if layers:
        await _say_space(client, name, windows.get("max_tokens"))
    num_new = tokens_before = 0

    def take(window: PerplexityWindow) -> None:
        nonlocal num_new, tokens_before
        if not num_new:
            tokens_before = window.total_scored - window.num_scored
        num_new += 1
        if on_window is not None:
            on_window(window)
        if on_progress is not None:
            done = min(num_resumed + num_new, window.num_windows)
            mean = math.log(window.perplexity)
            seconds = time.perf_counter() - started
            on_progress(Progress(done, window.num_windows, window.total_scored, mean, tokens_before, seconds))

    if corpus.conversations and corpus.answers is None:
        windows = {"context_length": windows.get("context_length")}
    started = time.perf_counter()
    while True:
        num_before = num_new
        try:
            reference = await client.record_reference(
                name,
                **corpus.prompt,
                labels=corpus.labels or None,
                corpus=corpus.info,
                return_ranks=on_window is not None,
                layers=layers,
                routes=routes,
                on_window=take,
                **windows,
            )
        except BadRequestError as error:
            raise corpus.named(error) from error
        except (TransportError, ServerError, RateLimitError):
            # Try again if the server has recorded a window since the last attempt.
            if num_new == num_before:
                raise
        else:
            if corpus.conversations or len(corpus.documents) > 1:
                corpus.warn_of_unscored((await client.reference_windows(name)).documents)
            return Recording(corpus, reference, num_resumed, time.perf_counter() - started)


async def _say_space(client: AsyncScoreClient, name: str, max_tokens: int | None) -> None:
    """Log how much disk space the layers of a text take, at most, in disjoint windows. The server, which knows the
    text's length, checks the space before it records anything."""
    served, info = await client.layers(), await client.info()
    token_bytes = served.token_bytes(info.dtype)
    needed, free = f"{token_bytes / 2**20:.2f} MiB per token", f"{served.free_bytes / 2**30:,.1f} GiB"
    if max_tokens is not None:
        needed = f"{max_tokens * token_bytes / 2**30:,.2f} GiB"
    _log.info("the layers of %s take at most %s on the server's disk, which has %s free", name, needed, free)
