"""From negative log-likelihoods to perplexity and its error bars. Natural logarithms (nats), sums by `math.fsum`."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scoremode.windows import EXHAUSTIVE_METHODS, Method


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of `num_scored` tokens; standard errors are None below two tokens."""

    num_scored: int
    nll_sum: float
    """Nats."""
    nll_mean: float
    """Nats per token."""
    nll_stderr: float | None
    perplexity: float
    perplexity_stderr: float | None


def perplexity(nlls: Iterable[float]) -> Perplexity:
    """Perplexity exp(mean NLL) of per-token NLLs in nats.

    The standard error of the mean is s / sqrt(n) with the sample deviation s; that of the perplexity follows by the
    delta method, ppl * s / sqrt(n), which is the ± of llama-perplexity. Both take tokens as independent.

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
    """A text's likelihood, independent of the tokens that it was cut into: comparable across tokenizers."""

    bits_per_byte: float | None
    """None for a text without a byte."""
    word_perplexity: float | None
    """exp(NLL / words)."""


def text_metrics(result: Perplexity, method: Method, *, num_tokens: int, num_bytes: int, num_words: int) -> TextMetrics:
    """Bits per byte and word perplexity of the text that `result` was measured on.

    `num_tokens`, `num_bytes` (UTF-8) and `num_words` (`count_words`) are those of the text used, after any truncation;
    `num_tokens` includes special tokens that the tokenizer added. A method that scores every token once gives the
    text's NLL as its sum; the others score a part of the tokens, or some twice, and give the mean times `num_tokens`.
    """
    nll = result.nll_sum if method in EXHAUSTIVE_METHODS else result.nll_mean * num_tokens
    # Words are what lies between white space, as lm-eval counts them. Conversations have no number of either.
    word_perplexity = exp(nll / num_words) if num_words else None
    return TextMetrics(bits_per_byte(nll, num_bytes) if num_bytes else None, word_perplexity)


def bits_per_byte(nll: float, num_bytes: int) -> float:
    """NLL of a text in nats, as bits per UTF-8 byte: NLL / (ln 2 * bytes)."""
    return nll / (math.log(2) * num_bytes)


def count_words(text: str) -> int:
    """Words of a text as lm-eval's wikitext task counts them: pieces between white space, `re.split(r"\\s+", text)`.

    White space at an end leaves an empty piece there, which counts.
    """
    return len(re.split(r"\s+", text))


def exp(value: float) -> float:
    """e**value, infinite where a float overflows, and NaN of NaN."""
    # That of the largest float is 709.8.
    return math.inf if value >= 709 else math.exp(value)


def finite_or_none(value: Any) -> Any:
    """Replace infinities and NaN in a figure, or in several, by None, because JSON lacks them; numpy's floats become
    Python's."""
    if isinstance(value, dict):
        return {name: finite_or_none(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite_or_none(part) for part in value]
    if not isinstance(value, float):
        return value
    return float(value) if math.isfinite(value) else None
