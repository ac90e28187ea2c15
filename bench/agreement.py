"""Scores of a server and what they should be: the windows that are scored, and how far two scores are apart."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from loads import CHARACTERS_PER_TOKEN
from servers import benchmark_parser
from transformers import AutoTokenizer

from scoremode import KldPositions, ScoreClient
from scoremode.runs import load_corpus
from scoremode.wire import Lane

Windows = list[list[int]]
Logprobs = Sequence[np.ndarray]
"""One array per window: the logprobs (nats) of all its tokens but the first."""


def windows_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark that has windows of TEXT scored by MODEL and keeps the servers' logs in LOGS."""
    parser = benchmark_parser(description, model=Path, text=str, logs=Path)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2047, help="tokens of a window")
    return parser


def cut_windows(text: str, tokenizer: Path, count: int, length: int) -> Windows:
    """The first `count` windows of `length` tokens of a text that `load_corpus` reads.

    Raises:
        ValueError: the text is shorter.
    """
    beginning = load_corpus(text).text[: CHARACTERS_PER_TOKEN * count * length]
    tokens = AutoTokenizer.from_pretrained(tokenizer)(beginning)["input_ids"]
    if len(tokens) < count * length:
        raise ValueError(f"{text} has {len(tokens):,} tokens, {count} windows of {length} need more")
    return [tokens[start : start + length] for start in range(0, count * length, length)]


def served_logprobs(url: str, windows: Windows) -> list[np.ndarray]:
    """Have a server score windows, without its cache."""
    with ScoreClient(url, timeout=600) as client:
        return [score.logprob_array[1:] for score in client.score(windows, use_cache=False)]


def compared(url: str, reference: str, lane: Lane = "prefill") -> KldPositions:
    """All positions of a reference, compared with the served model in a lane."""
    with ScoreClient(url, timeout=600) as client:
        return KldPositions.concatenate([window.positions for window in client.kld(reference, lane=lane).data])


def perplexity(logprobs: Logprobs) -> float:
    """The perplexity of all scored tokens."""
    return math.exp(-np.concatenate(logprobs).mean(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Agreement:
    """|difference| of single tokens in nats, and perplexity compared with perplexity."""

    mean: float
    largest: float
    perplexity_ratio: float
    """Less 1, so 0 where they are equal."""

    @classmethod
    def between(cls, ours: Logprobs, expected: Logprobs) -> "Agreement":
        """Compare token by token."""
        pairs = zip(ours, expected, strict=True)
        off = np.abs(np.concatenate([one.astype(np.float64) - other for one, other in pairs]))
        ratio = perplexity(ours) / perplexity(expected) - 1
        return cls(float(off.mean()), float(off.max()), ratio)

    def __str__(self) -> str:
        return f"mean {self.mean:.2e}, max {self.largest:.2e}, perplexity {self.perplexity_ratio:+.3%}"
