"""Settings of Scoremode's own, beside those of `vllm serve`."""

import os
import re
from argparse import ArgumentParser, Namespace

SCORE_CACHE_BYTES = 512 * 1024**2
SCORE_CACHE_VARIABLE = "SCOREMODE_SCORE_CACHE_BYTES"


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `scoremode serve`."""
    group = parser.add_argument_group("Scoremode")
    group.add_argument(
        "--score-cache-bytes",
        type=number_of_bytes,
        default=None,
        metavar="BYTES",
        help="Memory for logprobs of prefixes that come again, such as 512M or 2G; 0 turns the cache off. "
        f"Default: the environment's {SCORE_CACHE_VARIABLE}, else 512M.",
    )


def score_cache_bytes(arguments: Namespace) -> int:
    """Bytes for the logprob cache. A server that stock `vllm serve` started has no flag for it, only the environment.

    Raises:
        ValueError: the environment's value is no size.
    """
    given: int | None = getattr(arguments, "score_cache_bytes", None)
    if given is not None:
        return given
    setting = os.environ.get(SCORE_CACHE_VARIABLE)
    try:
        return SCORE_CACHE_BYTES if setting is None else number_of_bytes(setting)
    except ValueError as error:
        raise ValueError(f"{SCORE_CACHE_VARIABLE}: {error}") from None


def number_of_bytes(text: str) -> int:
    """Bytes of a number with an optional K, M or G, powers of 1,024.

    Raises:
        ValueError: it is none.
    """
    size = re.fullmatch(r"([0-9]+)([KMG]?)", text.upper())
    if size is None:
        raise ValueError(f"not a number of bytes: {text!r}")
    return int(size[1]) * _UNITS[size[2]]


_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
