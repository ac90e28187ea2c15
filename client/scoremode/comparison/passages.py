"""Text in pieces that a page can draw at once, and which of them a report keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scoremode.comparison.run_file import RunFile

MAX_TOKENS = 1024
"""Of a passage."""
MAX_PASSAGES = 20_000
"""With more, neighbouring short windows share one, because what is kept of every passage has to fit too."""
NUM_LISTED = 50
"""Most divergent tokens of a run whose passages are kept before all others."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Passages:
    """Windows, long ones in pieces and very many short ones together: arrays of shape [passages]."""

    window: NDArray[np.int64]
    """The window that a passage is of, or begins with, from 0."""
    last_window: NDArray[np.int64]
    """Another only where a passage is of several whole windows."""
    first: NDArray[np.int64]
    """Its first token in the window, from 0."""
    start: NDArray[np.int64]
    """Its first token in the run's arrays."""
    size: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.size)

    def means(self, values: Floats) -> Floats:
        """[passages], of values of all tokens."""
        means: Floats = np.add.reduceat(values, self.start) / self.size
        return means

    def positions(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[n], the tokens of some passages."""
        return np.repeat(chosen, self.size)


def cut_passages(window_sizes: NDArray[np.int32]) -> Passages:
    """Windows without targets have none. Where there are more than `MAX_PASSAGES`, whole windows are joined."""
    pieces = -(-window_sizes.astype(np.int64) // MAX_TOKENS)
    window = np.repeat(np.arange(len(pieces)), pieces)
    number = np.arange(len(window)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = number * MAX_TOKENS
    size = np.minimum(window_sizes[window] - first, MAX_TOKENS)
    passages = Passages(window, window, first, np.cumsum(size) - size, size)
    return passages if len(passages) <= MAX_PASSAGES else _joined(passages, pieces[window] == 1)


def _joined(passages: Passages, is_whole: NDArray[np.bool_]) -> Passages:
    """Neighbours together while they are whole windows and no more than `MAX_TOKENS` tokens."""
    begins = []
    joined_size, joins = 0, False
    for index, (size, whole) in enumerate(zip(passages.size.tolist(), is_whole.tolist(), strict=True)):
        if joins and whole and joined_size + size <= MAX_TOKENS:
            joined_size += size
            continue
        begins.append(index)
        joined_size, joins = size, whole
    ends = np.array([*begins[1:], len(passages)]) - 1
    return Passages(
        passages.window[begins],
        passages.last_window[ends],
        passages.first[begins],
        passages.start[begins],
        np.add.reduceat(passages.size, begins),
    )


def divergence(run: RunFile, base: RunFile) -> Floats:
    """[n], how far the run is from the reference, or else from the base; the base itself by its NLL."""
    if run.kld is not None:
        return run.kld
    if run is base:
        return run.nlls
    # Infinity minus infinity counts as 0.
    with np.errstate(invalid="ignore"):
        return np.where(run.nlls == base.nlls, 0, np.abs(run.nlls - base.nlls))


def kept_passages(passages: Passages, runs: Sequence[RunFile], max_tokens: float) -> NDArray[np.bool_]:
    """[passages], those to keep where only `max_tokens` tokens can be.

    First come those with a token that is among the most divergent of a run, then those whose mean divergence is
    largest, each run's divided by its mean over all tokens so that no run decides alone.
    """
    compared = [run for run in runs if run.kld is not None] or runs[1:] or runs
    listed = np.zeros(len(passages), bool)
    score = np.zeros(len(passages))
    for run in compared:
        values = np.minimum(divergence(run, runs[0]), np.finfo(np.float32).max)
        top = np.argpartition(values, -min(NUM_LISTED, len(values)))[-NUM_LISTED:]
        listed[np.searchsorted(passages.start, top, side="right") - 1] = True
        score += passages.means(values) / (values.mean() or 1)
    order = np.lexsort((-score, ~listed))
    kept = np.zeros(len(passages), bool)
    kept[order[np.cumsum(passages.size[order]) <= max_tokens]] = True
    return kept
