"""Implements `ppl-client compare`, which compares finished runs in tables, plots, a report and a card."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from scoremode._texts import printable
from scoremode.cli.options import MORE_THAN_0, Command, Group, Option, UsageError, at_least, check_report, given, value
from scoremode.errors import RunError, extra
from scoremode.runs import ParityRun, parity_as_text, read_run, run_kind


def _name_and_bits(text: str) -> tuple[str, float]:
    name, _, bits = text.rpartition("=")
    return name, float(bits)


_NAMES = partial(str.split, sep=",")
_OF_RUNS = ("card", "html", "plots", "write_card", "base", "fail_if", "max_kld", "max_ppl_increase", "bits")
_ALONE = ("paths", "parity")
"""Commands whose runs are shown alone."""
_SIZES: dict[str, Literal["gib", "bits_per_weight"]] = {"gib": "gib", "bpw": "bits_per_weight"}
LIMIT_EXCEEDED = 3
"""Exit status if a limit is exceeded."""
TASK_OPTIONS = [
    Option(
        "--task-metric A,B,...",
        "metrics that judge the answers, a task's by the first that it has; needed if a task has several",
        type=_NAMES,
        default=[],
        is_rare=True,
    ),
    Option(
        "--task-filter A,B,...",
        "lm-eval's filters, chosen in the same way",
        type=_NAMES,
        default=[],
        is_rare=True,
    ),
    Option(
        "--smallest-difference POINTS",
        "percentage points: the verdict tells if there are too few questions to show them; default: %(default)g",
        type=MORE_THAN_0,
        default=1.0,
        is_rare=True,
    ),
]
"""Options that decide how answers to lm-eval's tasks are judged."""


def check(options: argparse.Namespace) -> None:
    runs, tasks, labels = options.runs, options.tasks or [], options.labels
    rules = [
        (options.markdown, "--markdown is gone: --card prints the published table in Markdown, --csv every figure"),
        (not runs and not tasks, "give finished runs, or --tasks"),
        (
            options.qbench,
            "--qbench is gone: use ppl-client kld for models that vLLM serves, and --llama-cpp for GGUF files; qbench "
            "itself draws its results",
        ),
        (not runs and options.llama_cpp, "--llama-cpp needs a finished run to be compared with"),
        (len({path.resolve() for path in runs}) < len(runs), "a run is named twice"),
        (labels and len(labels) != len(runs), f"--labels has {len(labels or ())} names for {len(runs)} runs"),
        (labels and (not all(labels) or len(set(labels)) < len(runs)), "--labels needs a different name for every run"),
        (len(tasks) == 1, "--tasks needs a folder for the base and one per other model"),
        (
            len(tasks) != len(runs) and any("=" not in task for task in tasks),
            f"--tasks has {len(tasks)} folders for {len(runs)} runs: give names to them (NAME=DIR)",
        ),
        *((not runs, f"{name} needs runs") for name in given(options, _OF_RUNS)),
    ]
    for is_broken, message in rules:
        if is_broken:
            raise UsageError(message)
    check_report(options)


@extra("report")
def run(options: argparse.Namespace) -> int:
    """Write the report and the plots, then print the tables. Returns 3 if a limit is exceeded. RunError if a run or a
    task's samples cannot be read or compared."""
    labels = dict(zip(options.runs, options.labels or (), strict=False))
    # Refuse options before the imports, which take seconds.
    kinds = {path: run_kind(path) for path in options.runs}
    layers_paths = [path for path, kind in kinds.items() if kind == "layers"]
    paths = [path for path, kind in kinds.items() if kind not in ("layers", *_ALONE)]
    for kind in ("layers", *_ALONE):
        if kind in kinds.values():
            _refuse_options(options, kind, is_alone=not paths)
    from scoremode.comparison.layers import layers_as_text, load_layers
    from scoremode.comparison.path_tables import paths_as_text
    from scoremode.comparison.paths import PathsRun

    rollouts = read_run(options.runs[0], ParityRun, "parity") if "parity" in kinds.values() else None
    kernel_paths = read_run(options.runs[0], PathsRun, "paths") if "paths" in kinds.values() else None
    layers = load_layers(layers_paths, [labels[path] for path in layers_paths] if labels else None)
    from scoremode.accuracy import compare_tasks, load_tasks
    from scoremode.comparison import as_csv, as_text, card, compare, load_runs, with_logs
    from scoremode.comparison.accuracy_tables import tasks_as_csv, tasks_as_text
    from scoremode.comparison.card import write_card
    from scoremode.comparison.run_file import with_bits
    from scoremode.comparison.summary import exceeded_limits

    comparison, tasks, lines = None, None, list[str]()
    runs = load_runs(paths, [labels[path] for path in paths] if labels else None)
    runs = with_bits(runs, dict(options.bits))
    if runs:
        comparison = compare(
            runs,
            base=options.base,
            size=_SIZES[options.x],
            max_kld=options.max_kld,
            max_ppl_increase=options.max_ppl_increase,
            num_resamples=options.resamples,
            seed=options.seed,
        )
        comparison = with_logs(comparison, options.llama_cpp)
        if any(given(options, ("fail_if", "max_kld", "max_ppl_increase"))):
            lines = exceeded_limits(comparison, options.fail_if)
    if folders := _task_folders(options.tasks or (), [run.label for run in runs]):
        models = {label: load_tasks(path, options.task_metric, options.task_filter) for label, path in folders.items()}
        tasks = compare_tasks(models, options.smallest_difference / 100)
        comparison = comparison and replace(comparison, tasks=tasks)
    try:
        # Import modules only if needed: each takes a second.
        if comparison is not None:
            if options.plots is not None:
                from scoremode.comparison.plots import write_plots

                write_plots(comparison, options.plots)
            if options.write_card is not None:
                write_card(comparison, options.write_card, is_full=options.card == "full")
        if options.html is not None:
            from scoremode.comparison.report import write_report

            write_report(comparison, options.html, layers=layers, paths=kernel_paths, parity=rollouts)
    finally:
        parts = []
        if options.csv:
            parts.append(as_csv(comparison, () if tasks is None else tasks_as_csv(tasks)))
        elif comparison is not None:
            form = partial(card, is_full=options.card == "full") if options.card else as_text
            parts.append(form(comparison))
        if tasks is not None and not options.csv and not (options.card and comparison):
            parts.append(tasks_as_text(tasks, is_markdown=options.card))
        if layers and not options.card:
            parts.append(layers_as_text(layers))
        if kernel_paths is not None:
            parts.append(paths_as_text(kernel_paths))
        if rollouts is not None:
            parts.append(parity_as_text(rollouts) + "\n")
        sys.stdout.write("\n".join(parts))
    for line in lines:
        print(f"ppl-client: {printable(line)}", file=sys.stderr)
    return LIMIT_EXCEEDED if lines else 0


def _refuse_options(options: argparse.Namespace, kind: str, *, is_alone: bool) -> None:
    """Raise RunError for `--csv`, which does not work with runs of this kind; if there are no others (`is_alone`), for
    options that need them; and for runs next to one that is shown alone."""
    if kind in _ALONE and len(options.runs) > 1:
        raise RunError(f"a run of ppl-client {kind} cannot be compared with other runs: give it alone")
    for name in given(options, ("csv", *((*_OF_RUNS, "tasks", "llama_cpp") if is_alone else ()))):
        if name != "--html":
            alone = " alone" if name != "--csv" else ""
            raise RunError(f"{name} does not work with runs of ppl-client {kind}{alone}")


def _task_folders(tasks: Sequence[str], labels: Sequence[str]) -> dict[str, Path]:
    """Map each model to the folder of its answers. The model is the name given with the folder, else the label of the
    run at the same place."""
    folders: dict[str, Path] = {}
    for place, task in enumerate(tasks):
        label, separator, folder = task.partition("=")
        if not separator and place >= len(labels):
            raise RunError(f"--tasks: {task} needs a name (NAME=DIR): runs of ppl-client layers have no tasks")
        if not separator:
            label, folder = labels[place], task
        if printable(label) in folders:
            raise RunError(f"--tasks: two folders are called {label!r}: give them names of their own")
        folders[printable(label)] = Path(folder)
    return folders


COMMAND = Command(
    "compare",
    "Compare finished runs, from the files that `ppl-client` and `ppl-client kld` wrote with --output: figures, each "
    "with two errors, and for every pair whether a difference is shown.",
    [
        Group(
            "",
            [
                Option(
                    "runs RUN.json",
                    "finished runs on the same text and windows; those on answers to prompts are added to the run of "
                    "their model",
                    type=Path,
                    nargs="*",
                ),
                Option(
                    "--labels A,B,...",
                    "names for the runs, in order; default: the models' names, or the files' if models have the same "
                    "name",
                    type=_NAMES,
                ),
                Option(
                    "--base LABEL",
                    "the run that the others are compared with; default: a run of the reference's own model, else the "
                    "reference if all runs have the same one, else the first run",
                ),
            ],
        ),
        Group(
            "other engines",
            [
                Option(
                    "--llama-cpp NAME=LOG",
                    "add a row, without intervals, from the output of `llama-perplexity` on the same text and windows, "
                    "with --kl-divergence or without; may be repeated",
                    type=value(lambda text: text.partition("=")[::2], all, "NAME=FILE"),
                    action="append",
                    default=[],
                ),
                Option("--qbench", argparse.SUPPRESS, nargs="?", const=True),
            ],
        ),
        Group(
            "tasks",
            [
                Option(
                    "--tasks [NAME=]DIR",
                    "compare accuracies on tasks, question by question: folders that lm-eval wrote with --log_samples "
                    "--output_path, one per model, the base first; without names, in the order of the runs",
                    nargs="+",
                ),
                *TASK_OPTIONS,
            ],
        ),
        Group(
            "table",
            [
                Option("--markdown", argparse.SUPPRESS, action="store_true"),
                Option(
                    "--card",
                    "print a Hugging Face model card for a quantized model: YAML, a table, and where its figures are "
                    "from; --card full, after the runs, has all columns, and so has --write-card then",
                    type=value(str, "full".__eq__, "full or nothing, and runs come before it"),
                    nargs="?",
                    const=True,
                ),
                Option("--csv", "print one line per figure, in full precision", action="store_true"),
            ],
            is_exclusive=True,
        ),
        Group(
            "output",
            [
                Option("--html FILE", "write a report, one file that loads nothing", type=Path),
                Option("--plots DIR", "write the plots as SVG and PNG", type=Path),
                Option(
                    "--x SIZE",
                    "draw plots against gib, the size of weight files, or bpw, bits per weight; default: %(default)s",
                    choices=tuple(_SIZES),
                    default="gib",
                    is_rare=True,
                ),
                Option(
                    "--bits NAME=BITS",
                    "bits per weight for a run with simulated quantization, whose files have the original's size: "
                    "without it the run is left out of plots against size; may be repeated",
                    type=value(_name_and_bits, lambda pair: pair[0] and pair[1] > 0, "NAME=BITS"),
                    action="append",
                    default=[],
                    is_rare=True,
                ),
                Option(
                    "--write-card FILE.md",
                    "write the card into a file between the marks <!-- scoremode --> and <!-- /scoremode -->, or at "
                    "its end if it has none, and its figures into model-index in the front matter; nothing else in it "
                    "changes. The plot is written next to it",
                    type=Path,
                ),
            ],
        ),
        Group(
            "limits",
            [
                Option(
                    "--fail-if VERDICT",
                    "exit with status 3 if a run's perplexity is worse than the base's, however little, or differs "
                    "from it",
                    choices=("worse", "differs"),
                ),
                Option(
                    "--max-kld NATS",
                    "likewise if a run's mean KL divergence is larger; the summary then says whether the whole "
                    "interval is within",
                    type=at_least(0, float),
                ),
                Option(
                    "--max-ppl-increase PERCENT",
                    "likewise if a run's perplexity exceeds the base's by more; the summary as for --max-kld",
                    type=at_least(0, float),
                ),
            ],
        ),
        Group(
            "intervals",
            [
                Option(
                    "--resamples N",
                    "resamples of the text; default: %(default)s",
                    type=at_least(100),
                    default=4000,
                    is_rare=True,
                ),
                Option(
                    "--seed N", "seed of the resamples; default: %(default)s", type=at_least(0), default=0, is_rare=True
                ),
            ],
        ),
    ],
    run,
    check,
    success="the runs were compared and all is written, 3 if a limit is exceeded",
    example="ppl-client compare int8.json int4.json --html report.html --write-card README.md",
)
