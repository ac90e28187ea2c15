"""Scores of a server beside what they should be: the windows that are scored, and how far two scores lie apart."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from scoremode import ScoreClient
from scoremode.corpora import load_corpus

Windows = Sequence[Sequence[int]]
Logprobs = Sequence[np.ndarray]
"""One array a window: the logprobs (nats) of all its tokens but the first."""

CHARACTERS_PER_TOKEN = 8
"""More than English takes, so that a text cut to this is still long enough, and tokenized quickly."""


def windows_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark that has windows of TEXT scored by MODEL and keeps what servers say in LOGS."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text")
    parser.add_argument("logs", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2047, help="tokens a window")
    return parser


def cut_windows(text: str, tokenizer: Path, count: int, length: int) -> list[list[int]]:
    """The first `count` windows of `length` tokens of a text, a file or folder that `load_corpus` reads.

    Raises:
        ValueError: the text is shorter.
    """
    beginning = load_corpus(text).text[: CHARACTERS_PER_TOKEN * count * length]
    tokens = AutoTokenizer.from_pretrained(tokenizer)(beginning)["input_ids"]
    if len(tokens) < count * length:
        raise ValueError(f"{text} has {len(tokens):,} tokens, {count} windows of {length} need more")
    return [tokens[start : start + length] for start in range(0, count * length, length)]


def served_logprobs(url: str, windows: Windows) -> list[np.ndarray]:
    """What a server scores; every window computed anew.

    Raises:
        ValueError: a logprob is missing or not a number.
    """
    with ScoreClient(url, timeout=600) as client:
        scores = client.score([list(window) for window in windows], use_cache=False)
    results = [np.array(score.logprobs[1:], dtype=np.float64) for score in scores]
    for window, result in zip(windows, results, strict=True):
        if result.shape != (len(window) - 1,) or not np.isfinite(result).all():
            raise ValueError(f"{url} gave {result.shape} logprobs for {len(window)} tokens, not all of them finite")
    return results


def perplexity(logprobs: Logprobs) -> float:
    """Of all scored tokens."""
    values = np.concatenate(logprobs).astype(np.float64)
    return math.exp(-math.fsum(values) / len(values))


@dataclass(frozen=True, slots=True)
class Agreement:
    """|difference| of single tokens in nats, and perplexity against perplexity."""

    mean: float
    median: float
    largest: float
    perplexity_ratio: float
    """Less 1, so 0 where they are equal."""

    @classmethod
    def of(cls, ours: Logprobs, expected: Logprobs) -> "Agreement":
        """Compare token by token."""
        pairs = zip(ours, expected, strict=True)
        off = np.abs(np.concatenate([one.astype(np.float64) - other for one, other in pairs]))
        ratio = perplexity(ours) / perplexity(expected) - 1
        return cls(float(off.mean()), float(np.median(off)), float(off.max()), ratio)

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.2e}, median {self.median:.2e}, max {self.largest:.2e}, "
            f"perplexity {self.perplexity_ratio:+.3%}"
        )
