"""Computes perplexity and its error bars from negative log-likelihoods, in nats. Sums are exact (`math.fsum`)."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scoremode.windows import EXHAUSTIVE_METHODS, Method


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of `num_scored` tokens; standard errors are None for a single token."""

    num_scored: int
    nll_sum: float
    """In nats."""
    nll_mean: float
    """Nats per token."""
    nll_stderr: float | None
    perplexity: float
    perplexity_stderr: float | None


def perplexity(nlls: Iterable[float]) -> Perplexity:
    """Perplexity exp(mean NLL) of per-token NLLs in nats.

    The standard error of the mean is s / sqrt(n) with the sample standard deviation s. The delta method gives
    the perplexity's standard error, ppl * s / sqrt(n), which llama-perplexity shows after ±. Both treat tokens as
    independent.

    Raises:
        ValueError: no NLLs, or one is NaN.
    """
    values = list(nlls)
    count = len(values)
    if not count:
        raise ValueError("no tokens were scored")
    total = math.fsum(values)
    if math.isnan(total):
        raise ValueError("an NLL is NaN")
    mean = total / count
    ppl = exp(mean)
    stderr = None
    if count > 1:
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        stderr = math.sqrt(variance / count)
    return Perplexity(count, total, mean, stderr, ppl, None if stderr is None else ppl * stderr)


@dataclass(frozen=True, slots=True)
class TextMetrics:
    """Likelihood of a text per byte and per word, which can be compared across tokenizers."""

    bits_per_byte: float | None
    """None for a text without a byte."""
    word_perplexity: float | None
    """exp(NLL / words)."""


def text_metrics(result: Perplexity, method: Method, *, num_tokens: int, num_bytes: int, num_words: int) -> TextMetrics:
    """Compute bits per byte and word perplexity of the text that `result` was measured on.

    `num_tokens`, `num_bytes` (UTF-8) and `num_words` (`count_words`) describe the measured text, after any truncation;
    `num_tokens` includes special tokens. If the method scores every token once, the text's NLL is the sum of the NLLs.
    Other methods score only some tokens, or some twice, so the NLL is the mean times `num_tokens`.
    """
    nll = result.nll_sum if method in EXHAUSTIVE_METHODS else result.nll_mean * num_tokens
    # Conversations have neither bytes nor words.
    word_perplexity = exp(nll / num_words) if num_words else None
    return TextMetrics(bits_per_byte(nll, num_bytes) if num_bytes else None, word_perplexity)


def bits_per_byte(nll: float, num_bytes: int) -> float:
    """NLL of a text in nats, as bits per UTF-8 byte: NLL / (ln 2 * bytes)."""
    return nll / (math.log(2) * num_bytes)


def count_words(text: str) -> int:
    """Words of a text as lm-eval's wikitext task counts them: pieces between white space, `re.split(r"\\s+", text)`.

    White space at the beginning or end of the text adds an empty piece, which counts.
    """
    return len(re.split(r"\s+", text))


def exp(value: float) -> float:
    """Compute e**value: infinity instead of an overflow, NaN for NaN."""
    # math.exp overflows above 709.78.
    return math.inf if value >= 709 else math.exp(value)


def finite_or_none(value: Any) -> Any:
    """Replace infinities and NaN in nested figures with None, because JSON lacks them. numpy floats become Python's."""
    if isinstance(value, dict):
        return {name: finite_or_none(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite_or_none(part) for part in value]
    if not isinstance(value, float):
        return value
    return float(value) if math.isfinite(value) else None
