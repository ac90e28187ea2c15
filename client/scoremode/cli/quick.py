"""Implements `ppl-client quick`, which makes a plan from its options, and sweeps an original and its quantizations."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scoremode._texts import model_name
from scoremode.cli import sweep
from scoremode.cli.compare import TASK_OPTIONS
from scoremode.cli.options import (
    COUNT,
    FILE,
    NAME,
    QUIET,
    Command,
    Group,
    Option,
    check_report,
    check_source,
    refuse,
    require,
)
from scoremode.errors import extra
from scoremode.runs import CATEGORIES, PRESETS, PROMPT_COLUMNS
from scoremode.wire import LANES

_PRESET = "llama.cpp"


def check(options: argparse.Namespace) -> None:
    check_source(options)
    refuse(options, ("preset", "max_windows"), "messages", ": each turn is a window")
    refuse(options, ("dataset", "messages", "by"), "text_file", ", which is the whole text")
    require(options, ("task_metric", "task_filter"), "tasks")
    check_report(options)


@extra("report")
def run(options: argparse.Namespace) -> int:
    """Sweep the models and print the verdict on each; returns 1 if a model failed."""
    sweep.require_extras_for(plan(options)["text"]["dataset"])
    from scoremode.sweep import checked_plan

    checked, tasks = checked_plan(plan(options), "quick"), None
    models = [entry.model or "" for entry in checked.models]
    # A name without a slash is more often a misspelled path than a model on the hub.
    if missing := [model for model in models if "/" not in model and not Path(model).is_dir()]:
        print(f"ppl-client: {missing[0]} is not a folder here, so servers look for it on the hub", file=sys.stderr)
    if _is_quantized(models[0]) and False in map(_is_quantized, models):
        print(f"ppl-client: {models[0]} is quantized and a copy is not: the original comes first", file=sys.stderr)
    if options.tasks is not None:
        # Read answers before the first server starts, so that unusable files are refused at once.
        from scoremode.accuracy import compare_tasks, load_tasks

        names, judges = [entry.name for entry in checked.models], (options.task_metric, options.task_filter)
        answers = {name: load_tasks(_answers_folder(options.tasks, name), *judges) for name in names}
        tasks = compare_tasks(answers, options.smallest_difference / 100)
    return sweep.measure(checked, Path(), options, tasks)


def _answers_folder(folder: Path, name: str) -> Path:
    """The subfolder with a model's answers: `name`, or else the only one named PATH__`name`, as by lm-eval."""
    own = [*folder.glob(f"*__{name}")]
    return own[0] if len(own) == 1 and not (folder / name).exists() else folder / name


def _is_quantized(model: str) -> bool | None:
    """Whether a model's config.json names a quantization; None without the file, such as for a name on the hub."""
    config = Path(model, "config.json")
    return b'"quantization_config"' in config.read_bytes() if config.is_file() else None


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Make the fields of the plan that these options describe."""
    files = [model for model in options.models if model.endswith(".gguf")]
    models = [options.original, *(model for model in options.models if model not in files)]
    preset = options.preset or (None if options.messages else _PRESET)
    dataset = options.dataset or (None if preset == CATEGORIES or options.text_file else sweep.DATASET)
    text_file, prompts = (None if path is None else str(path) for path in (options.text_file, options.prompts))
    windows = {"preset": preset, "max_windows": options.max_windows, "context_length": options.context_length}
    report = options.output / "report.html" if options.html is None else options.html
    card = None if options.write_card is None else str(options.write_card.absolute())
    return {
        "output": str(options.output),
        "text": {"dataset": dataset, "text_file": text_file, "messages": options.messages, "by": options.by},
        "windows": {name: value for name, value in windows.items() if value is not None},
        "models": [
            {"name": name, "model": model, "serve": "" if place else options.original_flags}
            for place, (name, model) in enumerate(zip(_names(models), models, strict=True))
        ],
        "serve": options.serve,
        "lane": options.lane,
        "floor": True,
        "prompts": prompts,
        "max_new_tokens": options.max_new_tokens,
        "gguf": {"llama_perplexity": options.llama_perplexity, "files": files} if files else None,
        "compare": {"html": str(report.absolute()), "plots": None, "card": card},
    }


def _names(models: Sequence[str]) -> list[str]:
    """Name models by the last part of their path or hub name, or by all of it if last parts are equal."""
    names = [model_name(model).rpartition("/")[2] for model in models]
    return [
        name if names.count(name) == 1 else model.strip("./~").replace("/", "-")
        for name, model in zip(names, models, strict=True)
    ]


COMMAND = Command(
    "quick",
    "Serve an original and its quantizations, measure them one after another on one text, and compare them: tables, a "
    "report, a card, and a verdict on each. The original is measured twice, for the noise floor. The same command "
    "again resumes. Words after -- are flags of `scoremode serve` for every model. `ppl-client sweep` does the same "
    "from a file.",
    [
        Group(
            "models",
            [
                Option("original ORIGINAL", "a checkpoint's folder, or its name on the hub"),
                Option("models QUANT", "likewise; or a GGUF file, which llama.cpp measures", nargs="+"),
                Option(
                    "--original-flags FLAGS",
                    "flags of `scoremode serve` for the original alone, in quotes: "
                    "--original-flags='--offload-group-size 1 --offload-prefetch-step 2'",
                    default="",
                ),
                sweep.AT_ONCE,
                Option(
                    "--llama-perplexity PROGRAM",
                    "llama.cpp's program for GGUF files; default: %(default)s",
                    default="llama-perplexity",
                ),
            ],
        ),
        Group(
            "text",
            [
                *sweep.SOURCES,
                Option("--messages COLUMN", "column of the dataset with conversations", type=NAME),
                Option("--by COLUMN", "column with a label for each row, with --messages", type=NAME),
                Option(
                    "--preset",
                    f"as for ppl-client, none with --messages; categories has its own text; default: {_PRESET}",
                    choices=PRESETS,
                ),
                Option("--context-length N", "default: the preset's", type=COUNT),
                Option(
                    "--max-windows N",
                    "the first N windows only; the figures are then comparable with no others",
                    type=COUNT,
                ),
                Option("--lane LANE", "default: %(default)s", choices=(*LANES, "both"), default="prefill"),
            ],
        ),
        Group(
            "answers",
            [
                Option(
                    "--prompts FILE",
                    "measure for how many tokens copies give the same answers as the original, to the prompts in a "
                    f"jsonl or parquet file, in its first column of {', '.join(PROMPT_COLUMNS)}",
                    type=FILE,
                ),
                Option(
                    "--max-new-tokens N",
                    "limit on the tokens of an answer; default: %(default)s",
                    type=COUNT,
                    default=256,
                    is_rare=True,
                ),
                Option(
                    "--tasks DIR",
                    "compare lm-eval's answers too: DIR has one folder per model, which lm-eval wrote with "
                    "--log_samples --output_path. Its name is the model's (the last part of the path or hub name), or "
                    "lm-eval's name for it (org__NAME)",
                    type=Path,
                ),
                *TASK_OPTIONS,
            ],
        ),
        Group(
            "output",
            [
                Option(
                    "--output DIR",
                    "folder for runs, logs and the reference; default: %(default)s",
                    type=Path,
                    default=Path("scoremode-quick"),
                ),
                Option("--html FILE", "the report; default: report.html in the folder", type=Path),
                Option(
                    "--write-card FILE.md",
                    "write the card too: between <!-- scoremode --> and <!-- /scoremode --> in the file, or at its end",
                    type=Path,
                ),
                sweep.API_KEY,
                QUIET,
            ],
        ),
    ],
    run,
    check,
    success="every model was measured",
    rest="serve",
    if_interrupted=", servers are stopped: the same command resumes it",
    example="ppl-client quick Qwen/Qwen3-8B ./Qwen3-8B-W4A16 --write-card README.md -- --max-model-len 4096",
)
