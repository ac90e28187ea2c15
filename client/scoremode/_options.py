"""The options of `ppl-client`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from scoremode import corpora
from scoremode._compare_options import add_compare_options, compare_contradiction
from scoremode._corpus_options import add_corpus_options
from scoremode._sweep_options import add_sweep_options
from scoremode._version import __version__
from scoremode.client import API_KEY_VARIABLE, DEFAULT_TIMEOUT, server_root
from scoremode.corpus.documents import REQUESTS_IN_FLIGHT
from scoremode.pool import DEFAULT_CONCURRENCY, MAX_CONCURRENCY
from scoremode.presets import PRESETS, window_settings
from scoremode.windows import METHODS, Method

DEFAULT_URL = "http://localhost:8000"
DEFAULT_RETRY_FOR = 600.0
FIRST_CONTACT_SECONDS = 30.0
"""For which a server that has not answered yet is waited for, unless --retry-for says how long."""
DEFAULT_METHOD: Method = "sliding"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends the process with status 2 where it is wrong.

    `command` is the first argument where that names a command, and else `perplexity`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    is_named = bool(arguments) and not arguments[0].startswith("-")
    command = arguments[0] if is_named else "perplexity"
    make_parser, contradiction = _COMMANDS.get(command, _COMMANDS["perplexity"])
    parser = make_parser()
    if command not in _COMMANDS:
        nearest = get_close_matches(command, _COMMANDS, n=1)
        parser.error(f"no command {command}{f'; did you mean {nearest[0]}?' if nearest else ''}")
    options = parser.parse_args(arguments[1:] if is_named else arguments)
    options.command = command
    if "urls" in options:
        options.urls = options.urls or [DEFAULT_URL]
    if message := _common_contradiction(options) or contradiction(options):
        parser.error(message)
    if "preset" in options:
        _set_windows(options)
    return options


def _common_contradiction(options: argparse.Namespace) -> str | None:
    if "urls" in options and len(set(options.urls)) < len(options.urls):
        return "--url names a server twice"
    if "num_samples" in options and options.num_samples is not None and options.dataset is None:
        return "--num-samples needs --dataset"
    if "preset" in options and options.preset is not None:
        for name in ("method", "stride", "max_tokens", "num_samples"):
            if getattr(options, name) is not None:
                return f"--{name.replace('_', '-')} does not work with --preset, which sets it"
    if "resume" in options and options.resume and options.output is None:
        return "--resume needs --output: the journal is beside it"
    return None


def _set_windows(options: argparse.Namespace) -> None:
    """Those of a preset, or the default method."""
    options.add_special_tokens = None
    if options.preset is None:
        options.method = options.method or DEFAULT_METHOD
    else:
        vars(options).update(window_settings(options.preset, options.context_length))


def _record_contradiction(options: argparse.Namespace) -> str | None:
    if len(options.urls) > 1:
        return "record takes one --url: that server records all windows"
    return None


def _kld_contradiction(options: argparse.Namespace) -> str | None:
    if not options.floor:
        return None
    if options.resume:
        return "--resume does not work with --floor, which is one request"
    if len(options.urls) > 1:
        return "--floor takes one --url: that server compares all windows"
    if options.concurrency is not None:
        return "--concurrency does not work with --floor: the server decides"
    return None


def _perplexity_parser() -> argparse.ArgumentParser:
    parser = _new_parser(
        "ppl-client",
        "Perplexity of a text on a Scoremode server, from exact log-probabilities.",
        more="five more commands: `ppl-client record` records a model's distributions over a text, `ppl-client kld` "
        "measures another model's KL divergence from them, `ppl-client compare` shows finished runs beside each other, "
        "`ppl-client sweep` does all of it for the models of a plan, `ppl-client corpus` scores every document of "
        "files; each has its own --help. ",
    )
    parser.usage = f"%(prog)s [{' | '.join(_COMMANDS)}] [options]"
    _add_text(parser)
    measure = parser.add_argument_group("measurement")
    _add_windows(measure)
    _add_concurrency(measure)
    _add_server(parser, _SEVERAL_SERVERS)
    output = parser.add_argument_group("output")
    _add_output(output, "write the result and all NLLs as JSON, and the values of every token beside it as safetensors")
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _record_parser() -> argparse.ArgumentParser:
    parser = _new_parser(
        "ppl-client record",
        "Record a served model's distributions over a text on its server, for `ppl-client kld` to compare other models "
        "with. The same command again goes on with an interrupted recording.",
    )
    _add_text(parser)
    measure = parser.add_argument_group("recording")
    _add_reference(measure, "name to record under: letters, digits, '.', '_' and '-'")
    _add_windows(measure)
    _add_server(parser, f"of the server, with or without /v1; default: {DEFAULT_URL}")
    parser.add_argument_group("output").add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _kld_parser() -> argparse.ArgumentParser:
    parser = _new_parser(
        "ppl-client kld",
        "KL divergence of a served model from a recorded reference, over the whole vocabulary, in llama.cpp's tables.",
    )
    measure = parser.add_argument_group("measurement")
    _add_reference(measure, "the reference to compare with, which every server must have")
    measure.add_argument(
        "--floor",
        action="store_true",
        help="compare the reference with its own model, in other batches, and keep the result as its noise floor",
    )
    _add_concurrency(measure)
    _add_server(parser, _SEVERAL_SERVERS)
    output = parser.add_argument_group("output")
    _add_output(output, "write the result as JSON, and the values of every token beside it as safetensors")
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = _new_parser(
        "ppl-client compare",
        "Several finished runs beside each other, from the files that `ppl-client` and `ppl-client kld` wrote with "
        "--output: their figures, each with two errors, and for every pair whether a difference is shown.",
        success="the runs were compared and all is written",
    )
    add_compare_options(parser)
    return parser


def _sweep_parser() -> argparse.ArgumentParser:
    parser = _new_parser(
        "ppl-client sweep",
        "Serve each model of a plan in turn, measure its perplexity and its KL divergence from the first, "
        "and compare them. What was measured before is not measured again.",
        success="every model was measured",
    )
    add_sweep_options(parser)
    return parser


def _corpus_parser() -> argparse.ArgumentParser:
    parser = _new_parser(
        "ppl-client corpus",
        "Perplexity of every document of parquet and jsonl files: the same rows, with num_tokens, nll, perplexity and "
        "bits_per_byte.",
        success="every file is written",
    )
    add_corpus_options(parser)
    measure = parser.add_argument_group("scoring")
    measure.add_argument(
        "--context-length",
        type=_count,
        metavar="N",
        help="longer documents are cut into windows of so many tokens; default: what the model takes",
    )
    measure.add_argument(
        "--concurrency",
        type=_count,
        metavar="N",
        help=f"requests in flight at once at each server, each of some 8,000 tokens; default: {REQUESTS_IN_FLIGHT}",
    )
    _add_server(parser, _SEVERAL_SERVERS)
    return parser


_COMMANDS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[argparse.Namespace], str | None]]] = {
    "perplexity": (_perplexity_parser, lambda options: None),
    "record": (_record_parser, _record_contradiction),
    "kld": (_kld_parser, _kld_contradiction),
    "compare": (_compare_parser, compare_contradiction),
    "sweep": (_sweep_parser, lambda options: None),
    "corpus": (_corpus_parser, lambda options: None),
}
"""The parser of each command, and what finds options that are each right and contradict one another.

`cli.main` runs the command.
"""


def _new_parser(
    prog: str, description: str, *, more: str = "", success: str = "every window was scored and the output is written"
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"{more}exit status: 0 if {success}, 1 on failure, 2 on wrong usage, 130 on Ctrl-C",
    )
    parser.add_argument("--version", action="version", version=f"ppl-client {__version__}")
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("text").add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--dataset",
        metavar="NAME|PATH",
        help="wikitext, pydoc (the Python language reference, always at hand), a name on the Hugging Face hub, "
        "a local folder laid out like the hub's, or a parquet, jsonl or txt file",
    )
    source.add_argument("--text", help="the text itself")
    source.add_argument("--text-file", type=Path, metavar="FILE", help="a file that holds the text, UTF-8")

    dataset = parser.add_argument_group("dataset")
    dataset.add_argument("--dataset-config", metavar="NAME", help="wikitext: wikitext-2-raw-v1")
    dataset.add_argument("--split", default=corpora.DEFAULT_SPLIT, help="default: %(default)s")
    dataset.add_argument("--text-column", default=corpora.DEFAULT_COLUMN, metavar="NAME", help="default: %(default)s")
    dataset.add_argument("--num-samples", type=_count, metavar="N", help="the first N rows only")


def _add_reference(group: argparse._ArgumentGroup, help: str) -> None:
    group.add_argument("--reference", required=True, metavar="NAME", help=help)


def _add_windows(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset",
        choices=PRESETS,
        help="join the rows of the text and cut windows as a tool does whose figures are published, for figures that "
        "are comparable with them: llama.cpp, exl3, gptq (these not checked against the tools), lm-eval, hf",
    )
    group.add_argument("--method", choices=METHODS, help=f"default: {DEFAULT_METHOD}")
    group.add_argument(
        "--context-length", type=_count, metavar="N", help="default: 2048 or what the model takes, or the preset's"
    )
    group.add_argument(
        "--stride", type=_count, metavar="N", help="default: a quarter of the context where the method takes a stride"
    )
    group.add_argument("--max-tokens", type=_count, metavar="N", help="the first N tokens of the text only")


def _add_concurrency(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        type=_count,
        metavar="N",
        help="windows in flight at once at each server; default: as many sequences as it runs at once, "
        f"{MAX_CONCURRENCY} at most, or {DEFAULT_CONCURRENCY} where it does not say",
    )


_SEVERAL_SERVERS = (
    "with or without /v1; several times for several servers of the same model, over which the windows are "
    f"spread; default: {DEFAULT_URL}"
)


def _add_server(parser: argparse.ArgumentParser, url_help: str) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", dest="urls", type=_url, action="append", metavar="URL", help=url_help)
    server.add_argument("--model", metavar="NAME", help="default: the served model")
    server.add_argument("--api-key", metavar="KEY", help=f"default: the environment's {API_KEY_VARIABLE}")
    server.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="without a byte from the server; default: %(default)g",
    )
    server.add_argument(
        "--retry-for",
        type=_seconds_or_zero,
        metavar="SECONDS",
        help="how long each request waits for a server that is down or busy; default: "
        f"{DEFAULT_RETRY_FOR:g}, and {FIRST_CONTACT_SECONDS:g} for a server that has not answered yet",
    )


def _add_output(group: argparse._ArgumentGroup, help: str) -> None:
    group.add_argument("--output", type=Path, metavar="FILE", help=help)
    group.add_argument(
        "--resume", action="store_true", help="go on from the journal that an unfinished run left beside --output"
    )
    group.add_argument("--force", action="store_true", help="replace an earlier --output")


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _seconds(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def _seconds_or_zero(text: str) -> float:
    if not (value := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def _url(text: str) -> str:
    try:
        return server_root(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
