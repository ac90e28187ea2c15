"""Implements `ppl-client paths`, which measures one checkpoint on several kernel paths and says which ones differ."""

import argparse
import asyncio
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scoremode._texts import model_name
from scoremode.cli import sweep
from scoremode.cli.compare import LIMIT_EXCEEDED
from scoremode.cli.options import COUNT, FILE, QUIET, Command, Group, Option, UsageError, at_least, refuse
from scoremode.cli.progress import progress_bar
from scoremode.errors import extra
from scoremode.wire import LANES

if TYPE_CHECKING:
    from scoremode.comparison.paths import PathsRun
    from scoremode.sweep import SweepPlan

_DATASET = "wikitext"
_CONTEXT = 1024
_TOKENS = 40_960
"""Tokens of the text by default: enough to see a difference of a third of bfloat16's noise."""
_LEAST_WINDOWS = 4


def check(options: argparse.Namespace) -> None:
    refuse(options, ("dataset",), "text_file", ", which is the whole text")
    for words in options.tries:
        name, is_set, values = words.partition("=")
        if not name.lstrip("-") or (is_set and not values):
            raise UsageError(f"--try {words}: give FLAG, FLAG=A,B, VARIABLE=A,B or command='...'")


@extra("report")
def run(options: argparse.Namespace) -> int:
    """Measure the paths and print the table. Returns 3 if a path differs and `--fail-if` is given, and 1 if a path's
    server ended while it was measured."""
    from scoremode.sweep import checked_plan

    fields = plan(options)
    sweep.require_extras_for(fields["text"]["dataset"])
    measured = measure(checked_plan(fields, "paths"), Path(), options)
    if measured.differing and options.fail_if:
        return LIMIT_EXCEEDED
    return int(any(row.verdict == "failed" for row in measured.rows))


def measure(plan: "SweepPlan", folder: Path, options: argparse.Namespace) -> "PathsRun":
    """Measure the paths of a plan with `vary`, write its report, and print the table."""
    from scoremode.comparison.path_tables import paths_as_text
    from scoremode.sweep.paths import measure_paths, write_paths_report

    open_bar = partial(progress_bar, quiet=options.quiet)
    measuring = measure_paths(plan, folder, api_key=options.api_key, open_bar=open_bar, at_once=options.at_once)
    run, result = asyncio.run(sweep.stopped_by_sigterm(measuring))
    write_paths_report(plan, folder, run, result)
    sys.stdout.write(paths_as_text(run))
    return run


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Make the fields of the plan that these options describe."""
    context = options.context_length or _CONTEXT
    num_windows = options.max_windows or max(_LEAST_WINDOWS, _TOKENS // context)
    dataset = options.dataset or (None if options.text_file else _DATASET)
    original = options.reference and {"name": model_name(options.reference), "model": options.reference}
    report = options.output / "report.html" if options.html is None else options.html
    return {
        "output": str(options.output),
        "text": {
            "dataset": dataset,
            "text_file": options.text_file and str(options.text_file),
            # A window begins only where a token follows it.
            "max_tokens": num_windows * context + 1,
        },
        "windows": {"method": "disjoint", "context_length": context},
        "models": [{"name": model_name(options.model), "model": options.model}],
        "serve": options.serve,
        "lane": options.lane,
        "vary": {
            **_tries(options.tries),
            "product": options.product,
            "repeats": options.repeats,
            "blocks": options.blocks,
            "original": original,
        },
        "compare": {"html": str(report.absolute()), "plots": None},
    }


def _tries(words: list[str]) -> dict[str, Any]:
    """The values of `--try` as the fields of a plan's `vary`. Names in capitals are environment variables."""
    vary: dict[str, Any] = {"flags": {}, "env": {}, "command": []}
    for text in words:
        name, is_set, values = text.lstrip("-").partition("=")
        if name == "command":
            vary["command"].append(shlex.split(values))
        elif name.isupper():
            vary["env"].setdefault(name, []).extend(values.split(","))
        else:
            # A value in JSON, such as that of --compilation-config, has commas of its own.
            listed = [values] if values.startswith(("{", "[")) else values.split(",")
            vary["flags"].setdefault(name, []).extend(listed if is_set else [True])
    return vary


COMMAND = Command(
    "paths",
    "Measure one checkpoint on several kernel paths: attention, linear and MoE backends, KV cache types, graphs and "
    "eager, model runners, versions of vLLM. Tells which paths differ from the default one by more than it differs "
    "from itself, from which position on, and in which block. The same command again resumes. Words after -- are flags "
    "of `scoremode serve` for every server.",
    [
        Group(
            "paths",
            [
                Option("model MODEL", "the checkpoint's folder, or its name on the hub"),
                Option(
                    "--try FLAG=A,B",
                    "values of a flag of the server, each a path; FLAG alone for a flag without a value; VARIABLE=A,B "
                    "for the environment; command='/venv/bin/scoremode serve' for another vLLM. May be given several "
                    "times. Default: what the installed vLLM has for the model",
                    dest="tries",
                    action="append",
                    default=[],
                ),
                Option("--product", "measure all combinations of values too", action="store_true"),
                Option(
                    "--repeats N",
                    "measure the default path N times more, for the floor; default: %(default)s",
                    type=at_least(2),
                    default=4,
                ),
                Option(
                    "--no-blocks",
                    "do not look for the blocks of paths that differ, which takes more servers",
                    dest="blocks",
                    action="store_false",
                ),
                Option("--reference ORIGINAL", "the original, to tell which path is nearer to it"),
                sweep.AT_ONCE,
            ],
        ),
        Group(
            "text",
            [
                Option("--dataset NAME|PATH", f"as for ppl-client; default: {_DATASET}"),
                Option("--text-file FILE", "a file that holds the text, UTF-8, in place of a dataset", type=FILE),
                Option("--context-length N", f"tokens of a window; default: {_CONTEXT}", type=COUNT),
                Option("--max-windows N", f"default: {_TOKENS:,} tokens in all, at least 4 windows", type=COUNT),
                Option("--lane LANE", "default: %(default)s", choices=(*LANES, "both"), default="both"),
            ],
        ),
        Group(
            "output",
            [
                Option(
                    "--output DIR",
                    "folder for runs, logs and the reference; default: %(default)s",
                    type=Path,
                    default=Path("scoremode-paths"),
                ),
                Option("--html FILE", "the report; default: report.html in the folder", type=Path),
                Option("--fail-if differs", "exit with status 3 if a path differs", choices=["differs"]),
                Option("--api-key KEY", "API key of all servers", default=None),
                QUIET,
            ],
        ),
    ],
    run,
    check,
    success="every path was measured or refused",
    rest="serve",
    if_interrupted=", servers are stopped: the same command resumes it",
    example="ppl-client paths ./Qwen3-8B-W4A16 --try attention-backend=TRITON_ATTN,FLASHINFER --try kv-cache-dtype=fp8",
)
