"""Defines the classes that declare commands, and the options, value types and checks that several commands share."""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn

from scoremode._texts import json_object, printable
from scoremode._version import __version__
from scoremode.errors import RunError
from scoremode.runs import (
    CATEGORIES,
    DEFAULT_CONCURRENCY,
    DEFAULT_THRESHOLD,
    MAX_CONCURRENCY,
    PRESETS,
    corpora,
    read_card,
    window_settings,
)
from scoremode.windows import METHODS, Method
from scoremode.wire import (
    API_KEY_VARIABLE,
    DEFAULT_TIMEOUT,
    FIRST_CONTACT_SECONDS,
    LANES,
    PATIENT_RETRY_FOR,
    REFERENCE_NAME,
    server_root,
)

DEFAULT_URL = "http://localhost:8000"
DEFAULT_METHOD: Method = "sliding"
SOURCES = ("dataset", "text", "text_file")
"""Options that name a text; a measurement needs exactly one of them, or none with `--preset categories`."""
_WIDTH = 80


class UsageError(Exception):
    """Options contradict one another, or name something that cannot be used."""


class Option:
    """An argument of a command.

    Args:
        name: The argument's name; if it takes a value, followed by a space and a placeholder for the value.
        help: The argument's line in the help.
        is_rare: Whether only `--help-all` shows the argument.
        **settings: Other arguments of `argparse.ArgumentParser.add_argument`.
    """

    def __init__(self, name: str, help: str, *, is_rare: bool = False, **settings: Any) -> None:
        self.name, _, metavar = name.partition(" ")
        self.is_rare = is_rare
        self.settings = {"help": help, **settings}
        if metavar:
            self.settings["metavar"] = metavar


@dataclass(frozen=True, slots=True)
class Group:
    """Options under a title."""

    title: str
    options: Sequence[Option]
    is_exclusive: bool = False
    """Whether at most one of the options may be given."""


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, without the usage that argparse would print before it."""

    hint = ""
    """Text that is added to every error message."""

    def error(self, message: str) -> NoReturn:
        """End the process with a message."""
        self.exit(2, f"{self.prog}: error: {printable(message)}{self.hint} (see {self.prog} --help)\n")


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    description: str
    groups: Sequence[Group]
    run: Callable[[argparse.Namespace], int | None]
    """Returns the exit status; None for 0."""
    check: Callable[[argparse.Namespace], None] | None = None
    """Raises UsageError if options contradict one another, and fills in defaults that depend on other options."""
    success: str = "every window was scored and the output is written"
    """The condition for exit status 0, which the help shows."""
    if_interrupted: str = ""
    """How to resume, for the message after Ctrl-C. Empty if the command cannot resume, or its errors say how."""
    example: str = ""
    """A command line that works as it is if a server runs."""
    rest: str = ""
    """Name of the parsed options' attribute for the words after `--`; empty if the command takes none."""

    @property
    def options(self) -> list[str]:
        """The names of the command's arguments."""
        return [option.name for group in self.groups for option in group.options]

    def parser(self, prog: str, usage: str | None = None, more: str = "", *, with_rare: bool = False) -> Parser:
        """Make the parser of the command's options. `with_rare` shows rare options in the help too."""
        status = f"exit status: 0 if {self.success}, 1 on failure, 2 on wrong usage, 130 on Ctrl-C"
        parser = Parser(
            prog=prog,
            usage=usage or self._usage(),
            description=fill(self.description, _WIDTH) + more,
            epilog=f"example:\n  {self.example}\n\n{fill(status, _WIDTH)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_arguments(parser, with_rare=with_rare)
        return parser

    def _usage(self) -> str:
        """Format the usage with required arguments only. argparse's usage lists all options, in lines that are too
        long."""
        options = [(option.name, option.settings) for group in self.groups for option in group.options]
        needed = [f"{name} {settings['metavar']}" for name, settings in options if settings.get("required")]
        words = [settings["metavar"] + " ..." * ("nargs" in settings) for name, settings in options if name[0] != "-"]
        return " ".join(["%(prog)s", *needed, "[options]", *words])

    def add_arguments(self, parser: argparse.ArgumentParser, *, with_rare: bool) -> None:
        parser.add_argument("--version", action="version", version=f"ppl-client {__version__}")
        if any(option.is_rare for group in self.groups for option in group.options):
            parser.add_argument("--help-all", action="help", help="show this and the options that are rarely needed")
        for group in self.groups:
            target: Any = parser.add_argument_group(group.title) if group.title else parser
            if group.is_exclusive:
                target = target.add_mutually_exclusive_group()
            for option in group.options:
                hidden = {"help": argparse.SUPPRESS} if option.is_rare and not with_rare else {}
                target.add_argument(option.name, **option.settings | hidden)


def value(convert: Callable[[str], Any], is_allowed: Callable[[Any], object], wanted: str) -> Callable[[str], Any]:
    """Make a function for argparse's `type`, which converts a text and refuses values that are not allowed. `wanted`
    describes allowed values in its error."""

    def checked(text: str) -> Any:
        with suppress(ValueError):
            if is_allowed(converted := convert(text)):
                return converted
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")

    return checked


def at_least(least: int, convert: Callable[[str], float] = int) -> Callable[[str], Any]:
    return value(convert, lambda number: number >= least, f"at least {least}")


NAME = value(str, bool, "a name")
REFERENCE = value(
    str, re.compile(REFERENCE_NAME).fullmatch, "up to 128 letters, digits, '.', '_' and '-', a letter or digit first"
)
MORE_THAN_0 = value(float, lambda number: number > 0, "more than 0")
COUNT = at_least(1)
FILE = value(Path, Path.exists, "an existing file")


def _url(text: str) -> str:
    try:
        return server_root(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


API_KEY_HELP = f"default: the environment's {API_KEY_VARIABLE}"
QUIET = Option("--quiet", "no progress bar", action="store_true")


def _server(url_help: str) -> Group:
    retry_for_help = (
        "how long each request waits for a server that is down or busy; default: "
        f"{PATIENT_RETRY_FOR:g}, and {FIRST_CONTACT_SECONDS:g} for a server that has not answered yet"
    )
    return Group(
        "server",
        [
            Option("--url URL", f"{url_help}; default: {DEFAULT_URL}", dest="urls", type=_url, action="append"),
            Option("--model NAME", "default: the served model", type=NAME, is_rare=True),
            Option("--api-key KEY", API_KEY_HELP),
            Option(
                "--timeout SECONDS",
                "give up after this long without a byte from the server; default: %(default)g",
                type=MORE_THAN_0,
                default=DEFAULT_TIMEOUT,
                is_rare=True,
            ),
            Option("--retry-for SECONDS", retry_for_help, type=at_least(0, float), is_rare=True),
        ],
    )


ONE_SERVER = _server("address of the server, with or without /v1")
SEVERAL_SERVERS = _server(
    "address of a server, with or without /v1; may be repeated, to spread the work over servers of the same model"
)
TEXT = Group(
    "text",
    [
        Option(
            "--dataset NAME|PATH",
            "wikitext, pydoc (Python's own manual), a name on the Hugging Face hub, a local folder laid out like the "
            "hub's, or a parquet, jsonl or txt file",
        ),
        Option("--text", "the text itself"),
        Option("--text-file FILE", "a file that holds the text, UTF-8", type=Path),
    ],
    is_exclusive=True,
)
DATASET = Group(
    "dataset",
    [
        Option(
            "--dataset-config NAME",
            "configuration of the dataset; default for wikitext: wikitext-2-raw-v1",
            is_rare=True,
        ),
        Option("--split", "default: %(default)s", default=corpora.DEFAULT_SPLIT, is_rare=True),
        Option("--text-column NAME", "default: %(default)s", default=corpora.DEFAULT_COLUMN, is_rare=True),
        Option("--num-samples N", "the first N rows only", type=COUNT),
        Option(
            "--messages COLUMN",
            "column of the dataset with conversations; the assistant's turns are scored",
            type=NAME,
        ),
        Option(
            "--chat-template-kwargs JSON",
            "arguments of the chat template of conversations",
            type=value(json_object, lambda value: value is not None, "a JSON object"),
            is_rare=True,
        ),
        Option(
            "--by COLUMN",
            "column with a label for each row, to group figures by; rows are then not joined",
            type=NAME,
            is_rare=True,
        ),
    ],
)
WINDOWS = [
    Option(
        "--preset",
        "join rows and cut windows as a published tool does, for figures comparable with its own (llama.cpp, "
        "exl3 and gptq are not checked against the tools); or categories: texts that come with Scoremode",
        choices=PRESETS,
    ),
    Option("--method", f"default: {DEFAULT_METHOD}", choices=METHODS, is_rare=True),
    Option("--context-length N", "default: 2048 or what the model takes, or the preset's", type=COUNT),
    Option("--stride N", "default: a quarter of the context where the method takes a stride", type=COUNT, is_rare=True),
    Option("--max-tokens N", "the first N tokens of the text only", type=COUNT),
    Option(
        "--max-windows N",
        "the first N windows of a preset only; the figures are then comparable with no others",
        type=COUNT,
        is_rare=True,
    ),
]
PACE = [
    Option(
        "--concurrency N",
        "windows in flight at once at each server; default: as many sequences as it runs at once, "
        f"{MAX_CONCURRENCY} at most, or {DEFAULT_CONCURRENCY} where it does not say",
        type=COUNT,
        is_rare=True,
    ),
    Option(
        "--lane LANE",
        "tokens of a window per engine step: prefill, as many as fit; decode, one as in generation; verify, as in "
        "speculative decoding; both: prefill, then decode, and whether they agree; default: %(default)s",
        choices=(*LANES, "both"),
        default="prefill",
    ),
    Option(
        "--decode-batch N",
        "windows in flight at once, like --concurrency, for lanes other than prefill",
        type=COUNT,
        is_rare=True,
    ),
]
CALIBRATION = Group(
    "calibration",
    [
        Option(
            "--calibration FILE",
            "the text that a quantization was calibrated on (parquet, jsonl or txt): print which windows share text "
            "with it, and the figures without them",
            type=Path,
            is_rare=True,
        ),
        Option("--calibration-column NAME", "default: %(default)s", default=corpora.DEFAULT_COLUMN, is_rare=True),
        Option(
            "--calibration-share SHARE",
            "leave out a window when more than this share of its 13-grams is in the calibration text; default: "
            "%(default)g",
            type=value(float, lambda share: 0 <= share < 1, "at least 0 and less than 1"),
            default=DEFAULT_THRESHOLD,
            is_rare=True,
        ),
    ],
)


def output_options(help: str) -> list[Option]:
    """Make the options of a run's output. `help` describes the file of `--output`."""
    return [
        Option("--output FILE", help, type=Path),
        Option(
            "--resume",
            "resume from the journal that an unfinished run left next to --output",
            action="store_true",
        ),
        Option("--force", "replace an earlier --output", action="store_true"),
        QUIET,
    ]


def given(options: argparse.Namespace, names: Iterable[str]) -> Iterator[str]:
    """Yield the options in `names` that were given, as users spell them. 0 and an empty text count as given."""
    for name in names:
        if (content := getattr(options, name)) is not None and content is not False and content != []:
            yield f"--{name.replace('_', '-')}"


def refuse(options: argparse.Namespace, names: Iterable[str], other: str, why: str) -> None:
    """Raise UsageError if an option in `names` is given together with `other`."""
    for together in given(options, [other]):
        for name in given(options, names):
            raise UsageError(f"{name} does not work with {together}{why}")


def require(options: argparse.Namespace, names: Iterable[str], needed: str, why: str = "") -> None:
    """Raise UsageError if an option in `names` is given without `needed`."""
    for name in given(options, names):
        if getattr(options, needed) is None:
            raise UsageError(f"{name} needs --{needed}{why}")


def check_report(options: argparse.Namespace) -> None:
    """Raise UsageError, before any work, if the report or the card could not be written."""
    if options.write_card is not None and options.write_card.suffix != ".md":
        raise UsageError(f"--write-card: {options.write_card} must end in .md")
    for path in filter(None, (options.html, options.write_card)):
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is not a folder, so {path.name} cannot be written there")
    try:
        if options.write_card is not None:
            read_card(options.write_card)
    except RunError as error:
        raise UsageError(f"--write-card: {error}") from error


def check_servers(options: argparse.Namespace) -> None:
    """Fill in the default server. UsageError if a server is named twice."""
    options.urls = options.urls or [DEFAULT_URL]
    if len(set(options.urls)) < len(options.urls):
        raise UsageError("--url names a server twice")


def check_one_server(options: argparse.Namespace, subject: str, why: str) -> None:
    check_servers(options)
    if len(options.urls) > 1:
        raise UsageError(f"{subject} takes one --url: that server {why}")


def check_source(options: argparse.Namespace) -> None:
    """Refuse options for a text if the preset comes with its own text."""
    if options.preset == CATEGORIES:
        others = (*SOURCES, "dataset_config", "num_samples", "messages", "chat_template_kwargs", "by")
        refuse(options, [name for name in others if name in options], "preset", " categories, which has its own text")


def check_text(options: argparse.Namespace) -> None:
    """Check the options for text and windows, and fill in the preset's settings, or the default method."""
    check_source(options)
    if options.preset != CATEGORIES and not [*given(options, SOURCES)]:
        raise UsageError("give one of --dataset, --text, --text-file and --preset categories")
    refuse(options, ("method", "stride"), "preset", ", which sets it")
    refuse(options, ("max_tokens", "num_samples"), "preset", ", whose tool measures the whole text")
    require(options, ("num_samples", "messages", "by"), "dataset")
    require(options, ("max_windows",), "preset")
    refuse(options, ("preset", "method", "stride", "max_tokens"), "messages", ": each turn is a window")
    refuse(options, ("by",), "preset", ", which joins rows")
    options.add_special_tokens = None
    options.method = options.method or DEFAULT_METHOD
    if options.preset is not None:
        vars(options).update(window_settings(options.preset, options.context_length, options.max_windows))


def check_measurement(options: argparse.Namespace) -> None:
    """Check a measurement's options for its lane and its output."""
    if options.decode_batch is not None and (options.concurrency is not None or options.lane == "prefill"):
        raise UsageError("--decode-batch needs --lane decode, verify or both, and replaces --concurrency")
    require(options, ("resume",), "output", ": the journal is next to it")
