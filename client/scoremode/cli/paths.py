"""Implements `ppl-client paths`, which measures one checkpoint on several kernel paths and says which ones differ."""

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scoremode._texts import model_name
from scoremode.cli import sweep
from scoremode.cli.compare import LIMIT_EXCEEDED
from scoremode.cli.options import COUNT, QUIET, Command, Group, Option, UsageError, at_least, refuse
from scoremode.cli.progress import progress_bar
from scoremode.errors import extra
from scoremode.runs import LEAST_WINDOWS
from scoremode.wire import LANES

if TYPE_CHECKING:
    from scoremode.sweep import SweepPlan

_TOKENS = 40_960
"""Tokens of the text by default: enough to see a difference of a third of bfloat16's noise."""


def check(options: argparse.Namespace) -> None:
    refuse(options, ("dataset",), "text_file", ", which is the whole text")
    _tries(options.tries)


@extra("report")
def run(options: argparse.Namespace) -> int:
    """Measure the paths and print the table; returns the exit status."""
    from scoremode.sweep import checked_plan

    fields = plan(options)
    sweep.require_extras_for(fields["text"]["dataset"])
    return measure(checked_plan(fields, "paths"), Path(), options, fail_if_differs=options.fail_if is not None)


def measure(plan: "SweepPlan", folder: Path, options: argparse.Namespace, *, fail_if_differs: bool = False) -> int:
    """Measure the paths of a plan with `vary`, print the table, and write the report. Returns 3 if a path differs and
    `fail_if_differs` is set. Returns 1 if a path's server ended while it was measured; with `fail_if_differs` also if a
    path was refused or has no verdict."""
    from scoremode.comparison.path_tables import paths_as_text
    from scoremode.sweep.paths import measure_paths, write_paths_report

    open_bar = partial(progress_bar, quiet=options.quiet)
    measuring = measure_paths(plan, folder, api_key=options.api_key, open_bar=open_bar, at_once=options.at_once)
    run, result = asyncio.run(sweep.stopped_by_sigterm(measuring))
    sys.stdout.write(paths_as_text(run))
    write_paths_report(plan, folder, run, result)
    if fail_if_differs and run.differing:
        return LIMIT_EXCEEDED
    failures = ("failed", "refused", "no verdict") if fail_if_differs else ("failed",)
    return int(any(row.verdict in failures for row in run.rows))


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Make the fields of the plan that these options describe."""
    num_windows = options.max_windows or max(LEAST_WINDOWS, _TOKENS // options.context_length)
    return {
        "output": str(options.output),
        "text": {
            "dataset": options.dataset or (None if options.text_file else sweep.DATASET),
            "text_file": options.text_file and str(options.text_file),
            # A window begins only where a token follows it.
            "max_tokens": num_windows * options.context_length + 1,
        },
        "windows": {"method": "disjoint", "context_length": options.context_length},
        "models": [{"name": model_name(options.model), "model": options.model}],
        "serve": options.serve,
        "lane": options.lane,
        "vary": {
            **_tries(options.tries),
            "product": options.product,
            "repeats": options.repeats,
            "blocks": options.blocks,
            "original": options.reference and {"name": "original", "model": options.reference},
        },
    }


def _tries(words: list[str]) -> dict[str, Any]:
    """The values of `--try` as the fields of a plan's `vary`. Names in capitals are environment variables. UsageError
    for a name without a value that needs one."""
    vary: dict[str, Any] = {"flags": {}, "env": {}, "command": []}
    for text in words:
        name, is_set, values = text.lstrip("-").partition("=")
        is_flag = name != "command" and not name.isupper()
        if not name or not (values or (is_flag and not is_set)):
            raise UsageError(f"--try {text}: give FLAG, FLAG=A,B, VARIABLE=A,B or command='...'")
        # A value in JSON, such as that of --compilation-config, has commas of its own.
        listed = [values] if values.startswith(("{", "[")) else values.split(",")
        if name == "command":
            vary["command"].append(values)
        else:
            vary["flags" if is_flag else "env"].setdefault(name, []).extend(listed if is_set else [True])
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
                    "measure each path N times, and the default one N times more; default: %(default)s",
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
                *sweep.SOURCES,
                Option("--context-length N", "tokens of a window; default: %(default)s", type=COUNT, default=1024),
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
                Option(
                    "--fail-if differs",
                    "exit with status 3 if a path differs, and with 1 if a path is refused or has no verdict",
                    choices=["differs"],
                ),
                sweep.API_KEY,
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
