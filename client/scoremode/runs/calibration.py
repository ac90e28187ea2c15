"""Finds windows that share text with a quantization's calibration data. Such windows make the quantization
look better than it is.

Overlap is measured in common 13-grams (13 consecutive tokens), as GPT-3's authors searched training sets for test sets
(arXiv 2005.14165, appendix C).
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from scoremode.metrics import Perplexity, finite_or_none
from scoremode.runs.divergence import KldMeasurement
from scoremode.runs.evaluate import Evaluation

FinishedRun = Evaluation | KldMeasurement
NGRAM = 13
DEFAULT_THRESHOLD = 0.3

# The hash of an n-gram is the sum of its tokens times these factors, modulo 2**64.
_FACTORS = np.random.default_rng(NGRAM).integers(2**63, dtype=np.uint64, size=NGRAM) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True, slots=True)
class Calibration:
    name: str
    texts: list[str]
    token_ids: list[list[int]]
    """Token ids of each text, by the measured model's tokenizer."""
    threshold: float
    """A window with a larger share of common n-grams counts as seen."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """How much the windows of a run share with the calibration texts."""

    calibration: Calibration
    shares: NDArray[np.float64]
    """[windows], share of each window's n-grams that the calibration texts have too; 0 for a window without n-grams."""
    without: Any
    """Figures, from the run's `figures_of`, over the windows that do not count as seen; None if all do."""

    @property
    def is_shared(self) -> NDArray[np.bool_]:
        """[windows], whether each window counts as seen."""
        return self.shares > self.calibration.threshold

    def record(self) -> dict[str, object]:
        """The overlap's part of a run's JSON."""
        rest, text = self.without, self.calibration
        return {
            "calibration": {
                "name": text.name,
                "sha256": hashlib.sha256("\0".join(text.texts).encode()).hexdigest(),
                "num_tokens": text.num_tokens,
                "ngram": NGRAM,
                "threshold": text.threshold,
                "shares": self.shares.tolist(),
                "without": finite_or_none(asdict(rest) if isinstance(rest, Perplexity) else rest),
            }
        }

    @property
    def in_words(self) -> str:
        """The calibration texts and the overlap, as a phrase."""
        text, num_shared = self.calibration, int(self.is_shared.sum())
        return (
            f"{text.name}, {text.num_tokens:,} tokens: {num_shared:,} of {len(self.shares):,} windows "
            f"share more than {text.threshold:.0%} of their {NGRAM}-grams with it, {self.shares.max():.1%} at most"
        )


def measure_overlap(calibration: Calibration | None, run: FinishedRun) -> Overlap | None:
    """Measure how much the windows of a run share with the calibration texts; None without such texts."""
    if calibration is None:
        return None
    seen = np.unique(np.concatenate([_hashes(np.array(tokens, np.int64)) for tokens in calibration.token_ids]))
    windows = np.split(np.asarray(run.target_ids, np.int64), np.cumsum(run.window_sizes)[:-1])
    shares = np.array([np.isin(hashes, seen).mean() if len(hashes := _hashes(window)) else 0.0 for window in windows])
    unseen = shares <= calibration.threshold
    return Overlap(calibration, shares, run.figures_of(unseen) if unseen.any() else None)


def _hashes(token_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The hash of each n-gram, [tokens - n + 1]; empty if there are fewer than n tokens."""
    if len(token_ids) < NGRAM:
        return np.empty(0, np.uint64)
    return np.asarray(sliding_window_view(token_ids.astype(np.uint64), NGRAM) @ _FACTORS)
