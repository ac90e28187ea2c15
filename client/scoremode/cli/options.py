"""The options of `ppl-client` and its commands, and which of them contradict one another."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from scoremode._version import __version__
from scoremode.corpus.documents import REQUESTS_IN_FLIGHT
from scoremode.results import NUM_TOP
from scoremode.runs import corpora
from scoremode.runs.calibration import DEFAULT_THRESHOLD
from scoremode.runs.pool import DEFAULT_CONCURRENCY, MAX_CONCURRENCY
from scoremode.runs.presets import PRESETS, window_settings
from scoremode.windows import METHODS, Method
from scoremode.wire.protocol import LANES
from scoremode.wire.requests import API_KEY_VARIABLE, DEFAULT_TIMEOUT, server_root
from scoremode.wire.retries import FIRST_CONTACT_SECONDS, PATIENT_RETRY_FOR

DEFAULT_URL = "http://localhost:8000"
DEFAULT_METHOD: Method = "sliding"
MIN_RESAMPLES = 100

Options = dict[str, dict[str, Any]]
"""Names, each with what stands for its value, and what `argparse.add_argument` takes for each."""


def _value(convert: Callable[[str], Any], is_allowed: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """What argparse takes for the type of an option."""

    def value(text: str) -> Any:
        with suppress(ValueError):
            if is_allowed(converted := convert(text)):
                return converted
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")

    return value


def _at_least(least: int, convert: Callable[[str], float] = int) -> Callable[[str], Any]:
    return _value(convert, lambda number: number >= least, f"at least {least}")


_MORE_THAN_0 = _value(float, lambda number: number > 0, "more than 0")
_SHARE = _value(float, lambda share: 0 <= share < 1, "at least 0 and less than 1")
_OBJECT = _value(json.loads, lambda value: isinstance(value, dict), "a JSON object")
_NAMED = _value(lambda text: text.partition("=")[::2], all, "NAME=FILE")
_NAMES = partial(str.split, sep=",")


def _url(text: str) -> str:
    try:
        return server_root(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _option(help: str, **settings: Any) -> dict[str, Any]:
    return {"help": help, **settings}


def _number(help: str, least: int = 1, default: int | None = None) -> dict[str, Any]:
    return _option(help, type=_at_least(least), default=default)


def _path(help: str, **settings: Any) -> dict[str, Any]:
    return _option(help, type=Path, **settings)


def _flag(help: str) -> dict[str, Any]:
    return _option(help, action="store_true")


def _server(url_help: str) -> Options:
    retry_for_help = (
        "how long each request waits for a server that is down or busy; default: "
        f"{PATIENT_RETRY_FOR:g}, and {FIRST_CONTACT_SECONDS:g} for a server that has not answered yet"
    )
    timeout_help = "without a byte from the server; default: %(default)g"
    return {
        "--url URL": _option(url_help, dest="urls", type=_url, action="append"),
        "--model NAME": _option("default: the served model"),
        "--api-key KEY": _option(_API_KEY_HELP),
        "--timeout SECONDS": _option(timeout_help, type=_MORE_THAN_0, default=DEFAULT_TIMEOUT),
        "--retry-for SECONDS": _option(retry_for_help, type=_at_least(0, float)),
    }


def _output(help: str) -> Options:
    return {
        "--output FILE": _path(help),
        "--resume": _flag("resume from the journal that an unfinished run left next to --output"),
        "--force": _flag("replace an earlier --output"),
        "--quiet": _QUIET,
    }


_API_KEY_HELP = f"default: the environment's {API_KEY_VARIABLE}"
_QUIET = _flag("no progress bar")
_SEVERAL_SERVERS = _server(
    "with or without /v1; several times for several servers of the same model, over which the windows are spread; "
    f"default: {DEFAULT_URL}"
)
_ONE_SERVER = {
    "server": _server(f"of the server, with or without /v1; default: {DEFAULT_URL}"),
    "output": {"--quiet": _QUIET},
}
_TEXT: Options = {
    "--dataset NAME|PATH": _option(
        "wikitext, pydoc (the Python language reference, on every machine), a name on the Hugging Face hub, a local "
        "folder laid out like the hub's, or a parquet, jsonl or txt file"
    ),
    "--text": _option("the text itself"),
    "--text-file FILE": _path("a file that holds the text, UTF-8"),
}
_DATASET: Options = {
    "--dataset-config NAME": _option("configuration of the dataset; default for wikitext: wikitext-2-raw-v1"),
    "--split": _option("default: %(default)s", default=corpora.DEFAULT_SPLIT),
    "--text-column NAME": _option("default: %(default)s", default=corpora.DEFAULT_COLUMN),
    "--num-samples N": _number("the first N rows only"),
    "--messages COLUMN": _option("column of the dataset with conversations, of which the assistant's turns are scored"),
    "--chat-template-kwargs JSON": _option("for the chat template of conversations", type=_OBJECT),
    "--by COLUMN": _option("column with a label of each row, for tables by it; rows are then not joined"),
}
_WINDOWS: Options = {
    "--preset": _option(
        "join the rows of the text and cut windows the way a published tool does, for figures that are comparable with "
        "its own: llama.cpp, exl3, gptq (these not checked against the tools), lm-eval, hf",
        choices=PRESETS,
    ),
    "--method": _option(f"default: {DEFAULT_METHOD}", choices=METHODS),
    "--context-length N": _number("default: 2048 or what the model takes, or the preset's"),
    "--stride N": _number("default: a quarter of the context where the method takes a stride"),
    "--max-tokens N": _number("the first N tokens of the text only"),
}
_CALIBRATION: Options = {
    "--calibration FILE": _path(
        "what a quantization was calibrated on (parquet, jsonl or txt): say which windows share text with it, and the "
        "figures without them"
    ),
    "--calibration-column NAME": _option("default: %(default)s", default=corpora.DEFAULT_COLUMN),
    "--calibration-share SHARE": _option(
        "leave out a window when more than this share of its 13-grams is in the calibration text; default: %(default)g",
        type=_SHARE,
        default=DEFAULT_THRESHOLD,
    ),
}
_PACE: Options = {
    "--concurrency N": _number(
        "windows in flight at once at each server; default: as many sequences as it runs at once, "
        f"{MAX_CONCURRENCY} at most, or {DEFAULT_CONCURRENCY} where it does not say"
    ),
    "--lane LANE": _option(
        "tokens of a window per engine step: prefill, as many as fit; decode, one as in generation; verify, as many as "
        "in speculative decoding; both: prefill, then decode, each with its own output, and whether they agree; "
        "default: %(default)s",
        choices=(*LANES, "both"),
        default="prefill",
    ),
    "--decode-batch N": _number("with another lane than prefill: windows in flight at once, as --concurrency"),
}


@dataclass(frozen=True, slots=True)
class _Command:
    description: str
    groups: dict[str, Options]
    """Options by the title of their group; without a title, what the command is about."""
    success: str = "every window was scored and the output is written"


_ONLY_ONE = {"text": True, "table": False}
"""Groups of which one option may be given, and whether it must be."""

_COMMANDS = {
    "perplexity": _Command(
        "Perplexity of a text on a Scoremode server, from exact log-probabilities.",
        {
            "text": _TEXT,
            "dataset": _DATASET,
            "measurement": _WINDOWS | _PACE,
            "calibration": _CALIBRATION,
            "server": _SEVERAL_SERVERS,
            "output": _output(
                "write the result and all NLLs as JSON, and the values of every token next to it as safetensors"
            ),
        },
    ),
    "record": _Command(
        "Record a served model's distributions over a text on its server, for `ppl-client kld` to compare other models "
        "with. The same command again resumes an interrupted recording.",
        {
            "text": _TEXT,
            "dataset": _DATASET,
            "recording": {
                "--reference NAME": _option("name to record under: letters, digits, '.', '_' and '-'", required=True),
                **_WINDOWS,
            },
            **_ONE_SERVER,
        },
    ),
    "kld": _Command(
        "KL divergence of a served model from a recorded reference, over the whole vocabulary, in llama.cpp's tables.",
        {
            "measurement": {
                "--reference NAME": _option(
                    "the reference to compare with, which every server must have", required=True
                ),
                "--floor": _flag(
                    "compare the reference with its own model, in other batches, and keep the result as its noise floor"
                ),
                **_PACE,
            },
            "calibration": _CALIBRATION,
            "server": _SEVERAL_SERVERS,
            "output": {
                **_output("write the result as JSON, and the values of every token next to it as safetensors"),
                "--top-logprobs N": _number("top tokens in --output; default: %(default)s", 0, NUM_TOP),
            },
        },
    ),
    "export": _Command(
        "Write a reference for another engine: `llama-perplexity --kl-divergence --kl-divergence-base FILE` then "
        "measures a GGUF file on the same tokens, against the same model. The same command again resumes.",
        {
            "export": {
                "--reference NAME": _option("a reference that was recorded with --method llama.cpp", required=True),
                "--llama-cpp FILE": _path(
                    "the base file; two bytes a token of the vocabulary and position", required=True
                ),
                "--force": _flag("replace an earlier FILE"),
            },
            **_ONE_SERVER,
        },
        success="the file is written",
    ),
    "compare": _Command(
        "Several finished runs next to each other, from the files that `ppl-client` and `ppl-client kld` wrote with "
        "--output: their figures, each with two errors, and for every pair whether a difference is shown.",
        {
            "": {
                "runs RUN.json": _path(
                    "finished runs on the same text and windows, the base first; one run of `ppl-client kld` is "
                    "compared with its reference",
                    nargs="*",
                ),
                "--labels A,B,...": _option(
                    "the names of the runs, in their order; default: the models' names, or the files' where they are "
                    "equal",
                    type=_NAMES,
                ),
            },
            "other engines": {
                "--llama-cpp NAME=LOG": _option(
                    "what `llama-perplexity` printed, with --kl-divergence or without, on the same text and windows: a "
                    "row of its own, without intervals; several times",
                    type=_NAMED,
                    action="append",
                    default=[],
                ),
                "--qbench RESULTS": _option(
                    "the `results` that ExLlamaV3's eval/qbench.py wrote, on the same text: a row for each of its "
                    "models; several times",
                    action="append",
                    default=[],
                ),
            },
            "tasks": {
                "--tasks [NAME=]DIR": _option(
                    "accuracies on tasks, question by question: the folders that lm-eval wrote with --log_samples "
                    "--output_path, one per model, the base first; without names, in the order of the runs",
                    nargs="+",
                ),
                "--task-metric A,B,...": _option(
                    "which metrics judge the answers: the first that a task has; needed where a task has several",
                    type=_NAMES,
                    default=[],
                ),
                "--task-filter A,B,...": _option("which of lm-eval's filters, likewise", type=_NAMES, default=[]),
                "--smallest-difference POINTS": _option(
                    "in points: with fewer questions than could show it the verdict is 'too few questions'; default: "
                    "%(default)g",
                    type=_MORE_THAN_0,
                    default=1.0,
                ),
            },
            "table": {
                "--markdown": _flag("print tables as GitHub shows them"),
                "--card": _flag(
                    "print the table that is published with a quantized model, where its figures are from, and the "
                    "YAML of a Hugging Face model card"
                ),
                "--csv": _flag("print one line per figure, in full precision"),
            },
            "output": {
                "--html FILE": _path("write a report, one file that loads nothing"),
                "--plots DIR": _path("write the plots as SVG and PNG"),
            },
            "intervals": {
                "--resamples N": _number("of the text; default: %(default)s", MIN_RESAMPLES, 4000),
                "--seed N": _number("of the resamples; default: %(default)s", 0, 0),
            },
        },
        success="the runs were compared and all is written",
    ),
    "sweep": _Command(
        "Serve the models of a plan one after another, measure each one's perplexity and its KL divergence from the "
        "first, and compare them. Earlier results are kept.",
        {
            "": {
                "plan PLAN": _path("a YAML file; docs/compare.md describes its fields"),
                "--api-key KEY": _option(f"of all servers; {_API_KEY_HELP}"),
                "--quiet": _QUIET,
            }
        },
        success="every model was measured",
    ),
    "corpus": _Command(
        "Perplexity of every document of parquet and jsonl files: the same rows, with num_tokens, nll, perplexity and "
        "bits_per_byte.",
        {
            "": {
                "inputs IN": _path(
                    "a .parquet, .jsonl, .jsonl.zst or .jsonl.gz file, or a folder with such files at any depth",
                    nargs="+",
                ),
                "--text-column NAME": _option("the documents; default: %(default)s", default="text"),
            },
            "output": {
                "--output DIR": _path(
                    "every input becomes a parquet file here, with the same rows in their order", required=True
                ),
                "--resume": _flag(
                    "resume an earlier run: finished files stay as they are, others are continued where they ended"
                ),
                "--per-token": _flag("add token_ids and token_logprobs too"),
                "--column-prefix TEXT": _option(
                    "put before the names of the added columns, where a file has them from another model", default=""
                ),
                "--quiet": _QUIET,
            },
            "scoring": {
                "--context-length N": _number(
                    "longer documents are cut into windows of so many tokens; default: what the model takes"
                ),
                "--concurrency N": _number(
                    "requests in flight at once at each server, each of some 8,000 tokens; default: "
                    f"{REQUESTS_IN_FLIGHT}"
                ),
            },
            "server": _SEVERAL_SERVERS,
        },
        success="every file is written",
    ),
}
"""`cli.main` runs them."""
_MORE = (
    "six more commands: `ppl-client record` records a model's distributions over a text, `ppl-client kld` measures "
    "another model's KL divergence from them, `ppl-client export` writes them for llama.cpp, `ppl-client compare` "
    "compares finished runs, `ppl-client sweep` does all of it for the models of a plan, `ppl-client corpus` scores "
    "every document of files; each has its own --help. "
)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends the process with status 2 where it is wrong.

    `command` is the first argument where that names a command, and else `perplexity`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    is_named = bool(arguments) and not arguments[0].startswith("-")
    command = arguments[0] if is_named else "perplexity"
    parser = _parser(command if command in _COMMANDS else "perplexity")
    if command not in _COMMANDS:
        nearest = get_close_matches(command, _COMMANDS, n=1)
        parser.error(f"no command {command}{f'; did you mean {nearest[0]}?' if nearest else ''}")
    options = parser.parse_args(arguments[1:] if is_named else arguments)
    options.command = command
    if "urls" in options:
        options.urls = options.urls or [DEFAULT_URL]
    if message := _contradiction(options):
        parser.error(message)
    if "preset" in options:
        options.add_special_tokens = None
        options.method = options.method or DEFAULT_METHOD
        if options.preset is not None:
            vars(options).update(window_settings(options.preset, options.context_length))
    return options


def _parser(name: str) -> argparse.ArgumentParser:
    command, is_first = _COMMANDS[name], name == "perplexity"
    parser = argparse.ArgumentParser(
        prog="ppl-client" if is_first else f"ppl-client {name}",
        description=command.description,
        epilog=f"{_MORE if is_first else ''}exit status: 0 if {command.success}, 1 on failure, 2 on wrong usage, 130 "
        "on Ctrl-C",
    )
    if is_first:
        parser.usage = f"%(prog)s [{' | '.join(_COMMANDS)}] [options]"
    parser.add_argument("--version", action="version", version=f"ppl-client {__version__}")
    for title, options in command.groups.items():
        group: Any = parser.add_argument_group(title) if title else parser
        if title in _ONLY_ONE:
            group = group.add_mutually_exclusive_group(required=_ONLY_ONE[title])
        for option, settings in options.items():
            name, _, value = option.partition(" ")
            group.add_argument(name, **settings, **({"metavar": value} if value else {}))
    return parser


def _contradiction(options: argparse.Namespace) -> str | None:
    """What is wrong with options that are each right."""
    if options.command == "compare":
        return _compare_contradiction(options)
    given = {name: value for name, value in vars(options).items() if value not in (None, False)}
    urls = given.get("urls", ())
    if len(set(urls)) < len(urls):
        return "--url names a server twice"
    for name in ("method", "stride", "max_tokens", "num_samples"):
        if "preset" in given and name in given:
            why = "which sets it" if name in ("method", "stride") else "whose tool measures the whole text"
            return f"--{name.replace('_', '-')} does not work with --preset, {why}"
    for name in ("num_samples", "messages", "by"):
        if name in given and "dataset" not in given:
            return f"--{name.replace('_', '-')} needs --dataset"
    for name in ("preset", "method", "stride", "max_tokens"):
        if "messages" in given and name in given:
            return f"--{name.replace('_', '-')} does not work with --messages: each turn is a window"
    if "preset" in given and "by" in given:
        return "--by does not work with --preset, which joins rows"
    if "decode_batch" in given and ("concurrency" in given or given["lane"] == "prefill"):
        return "--decode-batch needs --lane decode, verify or both, and takes the place of --concurrency"
    if "resume" in given and "output" not in given:
        return "--resume needs --output: the journal is next to it"
    if options.command in ("record", "export") and len(urls) > 1:
        return f"{options.command} takes one --url: that server has all windows"
    if "floor" in given:
        if "resume" in given:
            return "--resume does not work with --floor, which is one request"
        if len(urls) > 1:
            return "--floor takes one --url: that server compares all windows"
        for name in given.keys() & {"concurrency", "decode_batch"}:
            return f"--{name.replace('_', '-')} does not work with --floor: the server decides"
    return None


def _compare_contradiction(options: argparse.Namespace) -> str | None:
    runs, tasks = options.runs, options.tasks or []
    if not runs and not tasks:
        return "give finished runs, or --tasks"
    if (options.llama_cpp or options.qbench) and not runs:
        return "--llama-cpp and --qbench need a finished run to be compared with"
    if len({path.resolve() for path in runs}) < len(runs):
        return "a run is named twice"
    if options.labels is not None:
        if len(options.labels) != len(runs):
            return f"--labels has {len(options.labels)} names for {len(runs)} runs"
        if not all(options.labels) or len(set(options.labels)) < len(runs):
            return "--labels needs another name for every run"
    if len(tasks) == 1:
        return "--tasks needs a folder for the base and one per other model"
    if any("=" not in each for each in tasks) and len(tasks) != len(runs):
        return f"--tasks has {len(tasks)} folders for {len(runs)} runs: give names to them (NAME=DIR)"
    for name in ("card", "html", "plots"):
        if getattr(options, name) and not runs:
            return f"--{name} needs runs"
    return None
