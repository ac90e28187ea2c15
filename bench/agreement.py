"""Scores of a server and what they should be: the windows that are scored, and how far two scores are apart."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from loads import CHARACTERS_PER_TOKEN
from transformers import AutoTokenizer

from scoremode import ScoreClient
from scoremode.runs.corpora import load_corpus

Windows = Sequence[Sequence[int]]
Logprobs = Sequence[np.ndarray]
"""One array per window: the logprobs (nats) of all its tokens but the first."""


def windows_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark that has windows of TEXT scored by MODEL and keeps the servers' logs in LOGS."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text")
    parser.add_argument("logs", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2047, help="tokens of a window")
    return parser


def cut_windows(text: str, tokenizer: Path, count: int, length: int) -> list[list[int]]:
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
    """What a server scores, without its cache.

    Raises:
        ValueError: a logprob is missing or not finite.
    """
    with ScoreClient(url, timeout=600) as client:
        scores = client.score([list(window) for window in windows], use_cache=False)
    results = [np.array(score.logprobs[1:], dtype=np.float64) for score in scores]
    for window, result in zip(windows, results, strict=True):
        if result.shape != (len(window) - 1,) or not np.isfinite(result).all():
            raise ValueError(f"{url} gave {result.shape} logprobs for {len(window)} tokens, not all of them finite")
    return results


def record_windows(url: str, name: str, windows: Windows) -> None:
    """Record the served model as a reference over these windows, which are of one length."""
    # `disjoint` leaves out a window that ends with the text.
    tokens = [token for window in windows for token in window] + [windows[0][0]]
    with ScoreClient(url, timeout=600) as client:
        reference = client.record_reference(name, tokens, method="disjoint", context_length=len(windows[0]))
    if reference.num_windows != len(windows):
        raise ValueError(f"{reference.num_windows} windows of {len(windows)} were recorded")


def compared(url: str, reference: str) -> tuple[np.ndarray, Mapping[str, float | None]]:
    """KL(reference||served) and KL(served||reference) of all positions, [positions, 2] nats; and statistics."""
    with ScoreClient(url, timeout=600) as client:
        result = client.kld(reference)
    positions = [window.positions for window in result.data]
    return np.concatenate([np.column_stack([each.kld, each.reverse_kld]) for each in positions]), result.statistics


def perplexity(logprobs: Logprobs) -> float:
    """Of all scored tokens."""
    values = np.concatenate(logprobs).astype(np.float64)
    return math.exp(-math.fsum(values) / len(values))


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
