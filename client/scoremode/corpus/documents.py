"""Scores whole documents, short and long, on the servers of a pool. Knows no files.

A document's figures are those of `rolling` windows: each of its tokens is scored once, the first after the model's
prefix token. A document that fits the context is one window: many of these are sent in one request as texts. A longer
document is tokenized first, then cut into windows.
"""

import math
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import compress
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from scoremode._tasks import Result, results_of
from scoremode.client import AsyncScoreClient
from scoremode.errors import APIStatusError, CorpusError, ResponseError, ScoremodeError
from scoremode.metrics import bits_per_byte, exp
from scoremode.results import Score
from scoremode.runs import Pool
from scoremode.windows import Window, WindowError, cut_windows, resolve_context_length
from scoremode.wire import INTERNAL_ERROR, Statistic

_REQUEST_BYTES = 32_768
"""Bytes of text in a request of several documents: some 8,000 tokens, one step of the engine."""
REQUESTS_IN_FLIGHT = 32
"""Requests in flight per server: more text than a server passes to its engine at once, but less than it queues."""
_REFUSED = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY})

Figure = Literal["entropy", "min_k", "min_k++", "fast_detect"]
FIGURE_COLUMNS: dict[Figure, str] = {
    "entropy": "entropy",
    "min_k": "min_k",
    "min_k++": "min_k_plus_plus",
    "fast_detect": "fast_detect",
}
"""The optional figures and their columns; docs/corpora.md has formulas and sources."""
_STATISTICS: list[Statistic] = ["entropy", "std_logprob"]
_NO_STATISTICS = (
    f"the server did not return the statistics {' and '.join(_STATISTICS)}, which all figures but min_k need: upgrade "
    "its Scoremode"
)
_ONE_OF = 5
"""Min-K% and Min-K%++ average the lowest fifth of the tokens' values, so k is 20 %."""


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ScoredDocument:
    """A scored document's figures. Logarithms are natural."""

    num_bytes: int
    num_tokens: int
    nll: float
    """Nats, summed over all tokens."""
    token_ids: NDArray[np.int32]
    token_scores: NDArray[np.float32]
    """[1 or 3, num_tokens] in nats: each token's logprob and, if a figure needs them, the entropy H of the
    distribution at its position and the standard deviation of ln p under this distribution."""

    @property
    def perplexity(self) -> float:
        return exp(self.nll / self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.nll, self.num_bytes)

    @property
    def token_logprobs(self) -> NDArray[np.float32]:
        logprobs: NDArray[np.float32] = self.token_scores[0]
        return logprobs

    @property
    def entropy(self) -> float:
        """Mean of H over the tokens, in nats."""
        return float(self.token_scores[1].mean(dtype=np.float64))

    @property
    def min_k(self) -> float:
        """Min-K% Prob: the mean of the lowest 20 % of the logprobs."""
        return _mean_of_lowest(self.token_logprobs)

    @property
    def min_k_plus_plus(self) -> float:
        """Min-K%++: the mean of the lowest 20 % of (logprob + H) / deviation. A token counts as 0 if its deviation is
        0: all tokens that can follow are then equally likely, so each one's logprob is the mean."""
        above_mean, deviations = self._spread()
        return _mean_of_lowest(np.divide(above_mean, deviations, out=np.zeros_like(above_mean), where=deviations > 0))

    @property
    def fast_detect(self) -> float:
        """Fast-DetectGPT's analytic score; 0 if every deviation is 0."""
        above_mean, deviations = self._spread()
        deviation = math.sqrt(np.square(deviations).sum())
        return float(above_mean.sum() / deviation) if deviation else 0.0

    def _spread(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """For each token, its logprob minus the mean of ln p, which is -H, and the standard deviation of ln p."""
        logprobs, entropies, deviations = self.token_scores.astype(np.float64)
        return logprobs + entropies, deviations


def _mean_of_lowest(values: NDArray[Any]) -> float:
    count = max(1, len(values) // _ONE_OF)
    return float(np.sort(values)[:count].mean(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class UnscoredDocument:
    error: str
    num_bytes: ClassVar[int] = 0


AnyDocument = Document | UnscoredDocument
DocumentResult = ScoredDocument | UnscoredDocument


def cut_into_requests(documents: Sequence[AnyDocument]) -> Iterator[tuple[int, int]]:
    """Cut documents into consecutive groups, each about as long as a request. Yield (first, last + 1) of each group."""
    first = num_bytes = 0
    for index, document in enumerate(documents):
        num_bytes += document.num_bytes
        if num_bytes >= _REQUEST_BYTES or index + 1 - first >= 256:
            yield first, index + 1
            first, num_bytes = index + 1, 0
    if first < len(documents):
        yield first, len(documents)


class DocumentScorer:
    def __init__(self, pool: Pool, *, context_length: int | None = None, figures: Sequence[Figure] = ()) -> None:
        if unknown := set(figures) - FIGURE_COLUMNS.keys():
            raise CorpusError(f"figures: {min(unknown)!r} is not one of {', '.join(FIGURE_COLUMNS)}")
        self._statistics = _STATISTICS if set(figures) - {"min_k"} else None
        max_model_len = pool.info.max_model_len
        self.context_length = resolve_context_length("rolling", context_length or max_model_len - 1, max_model_len)
        prefix_token_id = pool.info.prefix_token_id
        if prefix_token_id is None:
            raise WindowError("the model has neither a BOS nor an EOS token to put before a text", "method")
        self.prefix_token_id: int = prefix_token_id
        self.pool = pool

    async def score(self, documents: Sequence[AnyDocument]) -> list[DocumentResult]:
        """Score any number of documents, many per request if they fit the context. A document that a server refuses
        gets no figures."""
        with_text = [document for document in documents if isinstance(document, Document)]
        # A document with up to three bytes per token of the context probably fits, and is sent as text. If it is too
        # long after all, the server refuses the request. A longer one is tokenized first, in a request of its own.
        limit = 3 * self.context_length
        short, long = await results_of(
            [
                self._score_texts([document for document in with_text if document.num_bytes <= limit]),
                results_of(self._tokenize_and_score(document) for document in with_text if document.num_bytes > limit),
            ]
        )
        results = {True: iter(short), False: iter(long)}
        return [
            document if isinstance(document, UnscoredDocument) else next(results[document.num_bytes <= limit])
            for document in documents
        ]

    async def _score_texts(self, documents: Sequence[Document]) -> list[DocumentResult]:
        parts = await results_of(
            self._score_request(documents[first:last]) for first, last in cut_into_requests(documents)
        )
        return [result for part in parts for result in part]

    async def _score_request(self, documents: Sequence[Document]) -> list[DocumentResult]:
        try:
            answers = await self.pool.ask(
                [document.text for document in documents],
                lambda client, texts: _answer(
                    client, client.score([[self.prefix_token_id]], texts, statistics=self._statistics)
                ),
            )
        except _RefusalError:
            if len(documents) == 1:
                return [await self._tokenize_and_score(documents[0])]
            # Either a document is at fault, perhaps too long, or the whole request is too long.
            half = len(documents) // 2
            first, second = await results_of(map(self._score_request, (documents[:half], documents[half:])))
            return first + second
        too_long = [len(answer.token_ids) > self.context_length for answer in answers]
        pairs = list(zip(documents, answers, strict=True))
        # Only documents that are too long get a task: one task per document would take longer than reading the answers.
        again = (
            self._score_tokens(answer.token_ids, document.num_bytes) for document, answer in compress(pairs, too_long)
        )
        cut = iter(await results_of(again))
        return [next(cut) if is_long else self._scored(*pair) for pair, is_long in zip(pairs, too_long, strict=True)]

    def _scored(self, document: Document, answer: Score) -> ScoredDocument:
        if not answer.num_scored == len(answer.token_ids) > 0:
            raise ResponseError(f"the server scored {answer.num_scored} of {len(answer.token_ids)} tokens")
        token_ids = np.array(answer.token_ids, np.int32)
        scores = self._token_scores(answer)
        return ScoredDocument(document.num_bytes, answer.num_scored, -answer.sum_logprob, token_ids, scores)

    async def _tokenize_and_score(self, document: Document) -> DocumentResult:
        try:
            tokens = await self.pool.ask(
                document.text, lambda client, text: _answer(client, client.tokenize(text, add_special_tokens=False))
            )
        except _RefusalError as error:
            return UnscoredDocument(str(error))
        if not tokens:
            return UnscoredDocument("the text has no token")
        return await self._score_tokens(tokens, document.num_bytes)

    async def _score_tokens(self, tokens: list[int], num_bytes: int) -> DocumentResult:
        windows = cut_windows(len(tokens), "rolling", self.context_length, prefix_token_id=self.prefix_token_id)
        in_request = max(1, 8_192 // self.context_length)
        try:
            parts = await results_of(
                self._score_windows(tokens, windows[first : first + in_request])
                for first in range(0, len(windows), in_request)
            )
        except _RefusalError as error:
            return UnscoredDocument(str(error))
        scores = np.concatenate([window for part in parts for window in part], axis=1)
        nll = -math.fsum(scores[0].tolist())
        return ScoredDocument(num_bytes, len(tokens), nll, np.array(tokens, np.int32), scores)

    async def _score_windows(self, tokens: list[int], windows: Sequence[Window]) -> list[NDArray[np.float32]]:
        """Return the scores of each window's targets."""
        answers = await self.pool.ask(
            [window.token_ids(tokens) for window in windows],
            lambda client, sequences: _answer(client, client.score(sequences, statistics=self._statistics)),
        )
        return [
            self._token_scores(answer, window.first_scored) for answer, window in zip(answers, windows, strict=True)
        ]

    def _token_scores(self, answer: Score, first: int = 0) -> NDArray[np.float32]:
        """Return an answer's `token_scores`, as in `ScoredDocument`, from position `first` on."""
        columns = [answer.columns.get(name, np.array(None)) for name in self._statistics or ()]
        if any(column.ndim != 1 for column in columns):
            raise ResponseError(_NO_STATISTICS)
        scores: NDArray[np.float32] = np.stack([answer.logprob_array, *columns])[:, first:]
        if not np.isfinite(scores).all():
            raise ResponseError("a token's score in the server's answer is infinite or NaN")
        return scores


class _RefusalError(ScoremodeError):
    """A healthy server refuses to score a text."""


async def _answer(client: AsyncScoreClient, answer: Awaitable[Result]) -> Result:
    try:
        return await answer
    except APIStatusError as error:
        if error.param == "statistics":
            raise ResponseError(_NO_STATISTICS) from error
        # Still 500 after retrying for `retry_for`: a dead engine would have exited, so this text itself fails (NaN).
        is_error_of_text = error.status_code == INTERNAL_ERROR and client.retries.retry_for is not None
        if error.status_code in _REFUSED or is_error_of_text:
            raise _RefusalError(str(error)) from error
        raise
