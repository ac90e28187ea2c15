"""Presets: how each tool that publishes perplexities joins a text's rows and cuts it into windows.

The preset `categories` is for the texts that come with the package. docs/methods.md has each preset's source and check.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from scoremode.windows import Method, WindowError, WindowSettings
from scoremode.wire import CorpusInfo

Preset = Literal["llama.cpp", "exl3", "gptq", "lm-eval", "hf", "categories"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
CATEGORIES: Preset = "categories"
CATEGORIES_VERSION = 1
"""Version of the texts in the folder `categories`. Add 1 when a byte of them changes, because figures then differ."""


@dataclass(frozen=True, slots=True)
class _Tool:
    publishes: str
    """The published figure, as a phrase with a placeholder for the context length."""
    method: Method
    context_length: int
    strides: int = 1
    """Strides per window."""
    max_windows: int | None = None
    adds_special_tokens: bool | None = None
    is_checked: bool = False
    """Whether our figures were compared with the tool's own."""


_TOOLS: dict[str, _Tool] = {
    "llama.cpp": _Tool("llama-perplexity -c {}", "llama.cpp", 512),
    "exl3": _Tool("ExLlamaV3's eval/ppl.py -l {}", "disjoint", 2048, max_windows=100, adds_special_tokens=False),
    "gptq": _Tool("GPTQ's and AWQ's perplexity with sequences of {}", "disjoint", 2048),
    "lm-eval": _Tool("word_perplexity of lm-eval's wikitext with max_length={}", "rolling", 2048, is_checked=True),
    "hf": _Tool(
        "Hugging Face's perplexity of fixed-length models with max_length={}", "sliding", 1024, 2, is_checked=True
    ),
    CATEGORIES: _Tool("other runs of --preset categories with windows of {}", "sliding", 4096, 4, is_checked=True),
}


def window_settings(preset: Preset, context_length: int | None, max_windows: int | None = None) -> WindowSettings:
    """Arguments with which `evaluate` and `record_reference` cut windows as a tool does. The tool's context length is
    the default. WindowError for `max_windows` with a preset that measures whole documents."""
    tool = _TOOLS[preset]
    if max_windows is not None and preset in ("lm-eval", CATEGORIES):
        raise WindowError(
            f"max_windows does not work with the preset {preset}, which measures whole documents", "max_windows"
        )
    length = context_length or tool.context_length
    stride = max(1, length // tool.strides)
    # `disjoint` cuts a window only if a token follows it. This one token makes no further window.
    most = min((number for number in (tool.max_windows, max_windows) if number is not None), default=None)
    return {
        "method": tool.method,
        "context_length": length,
        "stride": stride,
        "max_tokens": None if most is None else (most - 1) * stride + length + (1 if stride == length else 0),
        "add_special_tokens": tool.adds_special_tokens,
    }


def comparable_with(corpus: CorpusInfo | None, context_length: int) -> str:
    """Say which published figures a measurement can be compared with, as the end of a sentence."""
    tool = None if corpus is None or corpus.preset is None else _TOOLS.get(corpus.preset)
    if corpus is None or tool is None:
        return "not comparable with published figures (no --preset)"
    publishes = tool.publishes.format(context_length)
    if corpus.max_windows is not None:
        return f"first {corpus.max_windows:,} windows of {publishes}: not comparable with published figures"
    checked = "" if tool.is_checked else " (not checked against the tool)"
    return f"comparable with {publishes} on this text{checked}"


def as_lines(rows: Sequence[str]) -> str:
    """Restore the file whose lines are the rows of a dataset, such as WikiText-2's `wiki.test.raw`."""
    # On the hub, a row is empty if its line in the file is a space.
    lines = [(row or " ").removesuffix("\n") for row in rows]
    ends = not rows[-1] or rows[-1].endswith("\n")
    return "\n".join([*lines, ""] if ends else lines)


def lm_eval_pages(text: str) -> list[str]:
    """Split WikiText-2's file into articles, as in the dataset of lm-eval's task `wikitext`."""
    lines = text.split("\n")
    # An article's title is ` = Title = `; titles of sections have more equals signs.
    stripped = [line.replace("= = =", "===").replace("= =", "==").strip() for line in lines]
    titles = [at for at, line in enumerate(stripped) if line.startswith("= ") and line.endswith(" =")]
    starts = [0, *titles, len(lines)]
    pages = ["\n".join(lines[start:end]) for start, end in pairwise(starts)]
    return [page for page in pages if page.strip()]


def detokenized(page: str) -> str:
    for pattern, replacement in _BEFORE:
        page = re.sub(pattern, replacement, page)
    for marks in ("()", "[]", "{}", '""', "''"):
        page = _stripped(page, *marks)
    for words, replacement in _AFTER:
        page = page.replace(words, replacement)
    return page


def _stripped(page: str, first: str, last: str) -> str:
    """Strip white space around the text between each pair of marks. A regular expression would take cubic time for long
    white space without a second mark."""
    parts, done = [], 0
    while (start := page.find(first, done) + 1) and (end := page.find(last, start)) >= 0:
        parts += [page[done:start], page[start:end].strip(), last]
        done = end + 1
    return "".join([*parts, page[done:]])


_BEFORE = [
    ("s '", "s'"),
    # lm-eval has this fault too: it inserts the pattern's own characters.
    ("/' [0-9]/", "/'[0-9]/"),
    *[(f" @{mark}@ ", mark.replace("\\", "")) for mark in ("-", ",", r"\.")],
    *[(f" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"],
]
_AFTER = [
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]
"""Replacements in the order in which they are applied: `_BEFORE` has patterns, `_AFTER` literal text."""
