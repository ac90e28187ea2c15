"""Settings of Scoremode's own, beside those of `vllm serve`."""

import os
from argparse import ArgumentParser, Namespace

SCORE_CACHE_BYTES = 512 * 1024**2
SCORE_CACHE_VARIABLE = "SCOREMODE_SCORE_CACHE_BYTES"


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `scoremode serve`."""
    group = parser.add_argument_group("Scoremode")
    group.add_argument(
        "--score-cache-bytes",
        type=_size,
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
    return SCORE_CACHE_BYTES if setting is None else _size(setting)


def _size(text: str) -> int:
    """Bytes of a number with an optional K, M or G, powers of 1,024."""
    number, unit = (text[:-1], text[-1]) if text[-1:].upper() in _UNITS else (text, "")
    if not number.isdecimal():
        raise ValueError(f"not a number of bytes: {text!r}")
    return int(number) * _UNITS[unit.upper()]


_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
