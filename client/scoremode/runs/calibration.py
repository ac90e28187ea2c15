"""Windows that share text with what a quantization was calibrated on: it has seen them, so they flatter it.

Two texts share what they have of the same 13 tokens in a row, by which training sets are searched for test sets
(GPT-3, arXiv 2005.14165, appendix C).
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from scoremode.client import AsyncScoreClient
from scoremode.kld import POSITION_DTYPES, KldPositions, statistics
from scoremode.metrics import Perplexity, perplexity
from scoremode.runs.corpora import read_rows
from scoremode.runs.plan import WindowNlls
from scoremode.wire.references import KldStatistics

NGRAM = 13
DEFAULT_THRESHOLD = 0.3
_AT_ONCE = 16
"""Texts that the server tokenizes."""

# A hash of an n-gram is the sum of its tokens times these, modulo 2**64.
_FACTORS = np.random.default_rng(NGRAM).integers(2**63, dtype=np.uint64, size=NGRAM) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a quantization was calibrated on."""

    name: str
    texts: list[str]

    @property
    def fingerprint(self) -> str:
        """sha256 of the texts in UTF-8."""
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """How much the windows of a run share with a calibration text."""

    calibration: Calibration
    num_tokens: int
    """Of the calibration text."""
    threshold: float
    shares: NDArray[np.float64]
    """[windows], of the n-grams of each window's targets; 0 where it has none."""

    @property
    def is_shared(self) -> NDArray[np.bool_]:
        """[windows], whether the share is more than the threshold."""
        return self.shares > self.threshold

    def record(self, without: object) -> dict[str, object]:
        """For a run's JSON, with the figures of the windows that share no more than the threshold."""
        text = {"name": self.calibration.name, "sha256": self.calibration.fingerprint, "num_tokens": self.num_tokens}
        windows = {"ngram": NGRAM, "threshold": self.threshold, "shares": self.shares.tolist()}
        return {"calibration": {**text, **windows, "without": without}}

    @property
    def in_words(self) -> str:
        """The text, and what windows share with it."""
        return (
            f"{self.calibration.name}, {self.num_tokens:,} tokens: {int(self.is_shared.sum()):,} of "
            f"{len(self.shares):,} windows share more than {self.threshold:.0%} of their {NGRAM}-grams with it, "
            f"{self.shares.max():.1%} at most"
        )


def load_calibration(path: Path, column: str) -> Calibration:
    """Read a parquet, jsonl or txt file.

    Raises:
        CorpusError: it cannot be read.
    """
    return Calibration(path.name, read_rows(path, column))


async def measure_overlap(
    client: AsyncScoreClient,
    calibration: Calibration,
    token_ids: Sequence[int] | NDArray[np.int32],
    window_sizes: Sequence[int],
    threshold: float = DEFAULT_THRESHOLD,
) -> Overlap:
    """What windows share with a calibration text.

    Args:
        client: Of a server whose tokenizer made the windows' tokens.
        calibration: The text.
        token_ids: Of the targets of all windows.
        window_sizes: Targets of each window.
        threshold: The share from which on a window counts as seen.
    """
    slots = asyncio.Semaphore(_AT_ONCE)

    async def tokens_of(text: str) -> list[int]:
        async with slots:
            return await client.tokenize(text, add_special_tokens=False)

    texts = await asyncio.gather(*map(tokens_of, calibration.texts))
    seen = np.unique(np.concatenate([_hashes(np.array(tokens, np.int64)) for tokens in texts]))
    windows = np.split(np.asarray(token_ids, np.int64), np.cumsum(window_sizes)[:-1])
    shares = [float(np.isin(hashes, seen).mean()) if len(hashes := _hashes(window)) else 0.0 for window in windows]
    return Overlap(calibration, sum(map(len, texts)), threshold, np.array(shares))


def perplexity_without(overlap: Overlap, windows: Sequence[WindowNlls]) -> Perplexity | None:
    """Of the windows that share no more than the threshold; None if there are none."""
    nlls = [nll for window in windows if not overlap.is_shared[window.index] for nll in window.nlls]
    return perplexity(nlls) if nlls else None


def statistics_without(overlap: Overlap, positions: KldPositions, window_sizes: Sequence[int]) -> KldStatistics | None:
    """As `perplexity_without`, for what compares with a reference."""
    kept, sizes = np.repeat(~overlap.is_shared, window_sizes), np.array(window_sizes)[~overlap.is_shared]
    if not kept.any():
        return None
    return statistics(
        KldPositions(**{name: getattr(positions, name)[kept] for name in POSITION_DTYPES}), sizes.tolist()
    )


def _hashes(token_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Of each n-gram, [tokens - n + 1]; none of fewer tokens."""
    if len(token_ids) < NGRAM:
        return np.empty(0, np.uint64)
    hashes: NDArray[np.uint64] = sliding_window_view(token_ids.astype(np.uint64), NGRAM) @ _FACTORS
    return hashes
