"""Runs `ppl-client`: parses the command line, runs the command, and turns errors into messages and exit statuses."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from scoremode._texts import printable
from scoremode.cli import compare, corpus, example, export, kld, layers, parity, paths, perplexity, quick, record, sweep
from scoremode.cli.options import Command, UsageError
from scoremode.cli.progress import lines_on_stderr
from scoremode.errors import ScoremodeError
from scoremode.windows import WindowError

COMMANDS = {
    command.name: command
    for command in (
        perplexity.COMMAND,
        record.COMMAND,
        kld.COMMAND,
        layers.COMMAND,
        export.COMMAND,
        compare.COMMAND,
        quick.COMMAND,
        example.COMMAND,
        sweep.COMMAND,
        paths.COMMAND,
        parity.COMMAND,
        corpus.COMMAND,
    )
}
_COMMANDS = """

commands, each with its own --help:
  perplexity  the perplexity of a text; the default, with the options below
  record      record a model's distributions over a text, to compare others with
  kld         another model's KL divergence from what was recorded
  layers      what each layer of that model costs, and which to keep in 16 bits
  compare     finished runs: tables, verdicts, a report, a card
  quick       an original and its quantizations, from checkpoints to a verdict
  example     three measured runs and their report, without a server
  sweep       serve, measure and compare the models of a plan
  paths       which kernel paths of a checkpoint differ, and in which block
  parity      whether a training job's logprobs are what a server computes
  export      what was recorded, for llama.cpp
  corpus      the perplexity of every document of files"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ppl-client` and return its exit status: 0, 1 on failure, 3 if `compare` finds that a limit is exceeded, or
    130 on Ctrl-C. Wrong usage ends the process with status 2."""
    if "_ARGCOMPLETE" in os.environ:
        complete()
    return run(*parse(sys.argv[1:] if arguments is None else arguments))


def run(command: Command, options: argparse.Namespace, prog: str = "ppl-client") -> int:
    """Run a command, and return its exit status. Errors are printed in one line."""
    try:
        with lines_on_stderr():
            return command.run(options) or 0
    except (KeyboardInterrupt, asyncio.CancelledError) as error:  # In a sweep, SIGTERM raises CancelledError.
        print(f"{prog}: interrupted{command.if_interrupted}{_how_to_resume(error)}", file=sys.stderr)
        return 130
    except UnicodeEncodeError as error:
        # Show only the character: the text around it may be a key.
        character = printable(error.object[error.start : error.end])
        print(f"{prog}: error: a text, name or path has {character}, not valid Unicode", file=sys.stderr)
        return 1
    except (ScoremodeError, WindowError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"{prog}: error: {printable(message)}{_how_to_resume(error)}", file=sys.stderr)
        return 1


def complete() -> None:
    """Print completions for a shell, and end the process. Needs the extra `completion`."""
    import argcomplete

    parser = argparse.ArgumentParser()
    perplexity.COMMAND.add_arguments(parser, with_rare=True)
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name), with_rare=True)
    argcomplete.autocomplete(parser)


def _how_to_resume(error: BaseException) -> str:
    """The error's notes, in which `running.measure_each` says how to resume; empty if there are none."""
    return printable("".join(getattr(error, "__notes__", ())))


def _advice(command: Command, word: str) -> str:
    """Suggest for an unknown `word` a similar option, the commands that have it, or the place for servers' flags."""
    option = word.partition("=")[0]
    if nearest := get_close_matches(option, command.options, n=1, cutoff=0.8):
        return f"; did you mean {nearest[0]}?"
    if option.startswith("-") and (others := [name for name, other in COMMANDS.items() if option in other.options]):
        return f"; it is an option of {', '.join(others)}"
    return "; flags of the servers come after --" if command.rest and option.startswith("-") else ""


def parse(arguments: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    """Parse the command line, or end the process with status 2 if it is wrong.

    The first argument names the command. If it is an option, the command is `perplexity`.
    """
    is_named = bool(arguments) and not arguments[0].startswith("-")
    name = arguments[0] if is_named else "perplexity"
    command = COMMANDS.get(name, perplexity.COMMAND)
    with_rare = "--help-all" in arguments
    if command is perplexity.COMMAND:
        parser = command.parser("ppl-client", "%(prog)s [COMMAND] [options]", _COMMANDS, with_rare=with_rare)
    else:
        parser = command.parser(f"ppl-client {name}", with_rare=with_rare)
    if name not in COMMANDS:
        nearest = get_close_matches(name, COMMANDS, n=1)
        parser.error(f"no command {name}{f'; did you mean {nearest[0]}?' if nearest else ''}")
    if not is_named and (later := [word for word in arguments if word in COMMANDS]):
        parser.hint = f"; is {later[0]} the command? It comes first: ppl-client {later[0]} [options]"
    words, rest = list(arguments[1:] if is_named else arguments), list[str]()
    if command.rest and "--" in words:
        at = words.index("--")
        words, rest = words[:at], words[at + 1 :]
    options, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_advice(command, unknown[0])}")
    if command.rest:
        setattr(options, command.rest, rest)
    try:
        if command.check is not None:
            command.check(options)
    except (UsageError, WindowError) as error:
        parser.error(str(error))
    return command, options
