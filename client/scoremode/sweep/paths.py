"""Measures one checkpoint on several kernel paths, each a server with other flags, environment or command, and finds
the paths, and the blocks of the model, that differ from the default path.

The default path is recorded, and measured again on a second server. The paths are the other models of the same sweep;
all are measured in repeats. Those that differ in prefill are measured once more by a sweep of eager servers, which
resumes them at each block's boundary.
"""

import json
import logging
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, combinations, count, product, takewhile
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scoremode.comparison import RunFile, compare, load_run
from scoremode.comparison.paths import (
    DEFAULT,
    PathRow,
    PathsRun,
    block_figures,
    kld_test,
    lane_figures,
    same_path,
)
from scoremode.comparison.report import write_report
from scoremode.errors import RunError
from scoremode.runs import LEAST_WINDOWS, in_lane, write_whole
from scoremode.sweep import reuse
from scoremode.sweep.memory import model_folder
from scoremode.sweep.plan import ModelEntry, PlanError, SweepPlan, VaryOptions
from scoremode.sweep.processes import candidate_paths
from scoremode.sweep.sweep import SweepResult, numbered, run_sweep
from scoremode.wire import Lane

_log = logging.getLogger(__name__)

_Change = dict[str, Any]
"""One value that differs from the default path: a name, and fields of a model's entry."""

AGAIN, ORIGINAL = "default-again", "original"
"""Names of the second server of the default path, and of the original's."""
EAGER = "--enforce-eager"
FILE = "paths.json"
_LONGEST_NAME = 160
_EAGER_TOKENS = 8192
"""Limit on the text of the eager servers, whose reference has the residual stream at every boundary."""


async def measure_paths(plan: SweepPlan, folder: Path, **settings: Any) -> tuple[PathsRun, SweepResult]:
    """Measure the paths of a plan's model, and write `paths.json` to the plan's output.

    Args:
        plan: The plan, with `vary`.
        folder: As for `run_sweep`.
        **settings: Other arguments of `run_sweep`.

    Returns:
        The table, and the sweep over the paths.

    Raises:
        PlanError: two paths have the same name.
        RunError: the default path or the original fails.
        ScoremodeError: as for `run_sweep`; or no path is given, and `scoremode paths` cannot tell any.
    """
    vary, [model] = plan.vary or VaryOptions(), plan.models
    paths = _paths(vary, model) or await _candidates(plan, model, folder)
    if twice := [name for name, count in Counter(path.name.casefold() for path in paths).items() if count > 1]:
        raise PlanError(f"vary: two paths are called {twice[0]!r}")
    # Eager servers are also measured with their layers, unless the text is too long.
    has_layers = vary.blocks and EAGER in plan.flags(model) and (plan.text.max_tokens or inf) <= _EAGER_TOKENS + 1
    plan = plan.model_copy(update={"vary": None, "speeds": True, "layers": has_layers})
    _say_space(plan, model, folder)
    original = None if vary.original is None else await _record(plan, vary.original, folder, settings)
    result = await _measure(plan, paths, vary.repeats, folder, {**settings, "second_reference": original})
    run, file = _table(result, [path.name for path in paths], plan.lanes), (folder / plan.output / FILE).resolve()
    # The table is kept if looking for blocks is interrupted.
    write_whole(file, run.model_dump_json(indent=1).encode())
    differing = [row for row in run.differing if any(lane.differs and lane.lane == "prefill" for lane in row.lanes)]
    if differing and vary.blocks:
        names = [row.name for row in differing]
        try:
            eager = result
            if not plan.layers:
                again = [path for path in paths if path.name in names]
                eager = await _measure(_eager_plan(plan), again, vary.repeats, folder, settings)
            for row, other in zip(differing, _table(eager, names, ["prefill"]).rows[1:], strict=True):
                _add_eager(row, other, eager.layers)
        except RunError as error:
            for row in differing:
                row.reason = row.reason or f"with both paths eager, {error}"
        write_whole(file, run.model_dump_json(indent=1).encode())
    return run, result


def _say_space(plan: SweepPlan, model: ModelEntry, folder: Path) -> None:
    """Log how much disk space the hidden states take, if the model's config and the text's length are known."""
    with suppress(OSError, ValueError, KeyError):
        config = json.loads((model_folder(str(model.model), folder) / "config.json").read_text())
        if plan.text.max_tokens is not None:
            # 16 bits per value; float32 takes twice as much.
            num_bytes = plan.text.max_tokens * (config | config.get("text_config", {}))["hidden_size"] * 2
            _log.info("the reference of %s tokens takes some %.2f GiB", f"{plan.text.max_tokens:,}", num_bytes / 2**30)


def write_paths_report(plan: SweepPlan, folder: Path, run: PathsRun, result: SweepResult) -> None:
    """Write the report that the plan asks for, with the paths and with the runs in the first lane. OSError or
    OutputError if the file cannot be written."""
    if plan.compare.html is not None:
        labels = {row.name: in_lane(AGAIN if row.name == DEFAULT else row.name, plan.lanes[0]) for row in run.rows}
        runs = [load_run(result.runs[label], name) for name, label in labels.items() if label in result.runs]
        path = folder / plan.output / plan.compare.html
        write_report(compare(runs), path, paths=run)
        _log.info("the report is %s", path)


def _paths(vary: VaryOptions, model: ModelEntry) -> list[ModelEntry]:
    """The model with each value of a plan alone, and with `product` in all combinations too."""
    knobs: list[list[_Change]] = [
        *(
            [_change([f"--{name}"] if value is True else [f"--{name}", str(value)]) for value in values]
            for name, values in vary.flags.items()
        ),
        *([_change(env={name: value}) for value in values] for name, values in vary.env.items()),
        [{"name": f"command={number}", "command": words} for number, words in enumerate(vary.command, 1)],
    ]
    return [
        _on_path(model, changes)
        for num_changes in range(1, len(knobs) + 1 if vary.product else 2)
        for varied in combinations(knobs, num_changes)
        for changes in product(*varied)
    ]


def _change(flags: Sequence[str] = (), env: Mapping[str, str] = MappingProxyType({})) -> _Change:
    return {"name": "=".join([*flags, *chain(*env.items())]).removeprefix("--"), "serve": flags, "env": env}


def _on_path(model: ModelEntry, changes: Sequence[_Change]) -> ModelEntry:
    """The model on the path with these changes. Its name is also that of files."""
    changed: dict[str, Any] = {
        "name": ", ".join(change["name"] for change in changes).replace("/", "_")[:_LONGEST_NAME],
        "serve": [*model.serve, *chain(*(change.get("serve", ()) for change in changes))],
        "env": {**model.env, **ChainMap(*(change.get("env", {}) for change in changes))},
        "command": next((change["command"] for change in changes if "command" in change), model.command),
    }
    return model.model_copy(update=changed)


async def _candidates(plan: SweepPlan, model: ModelEntry, folder: Path) -> list[ModelEntry]:
    """The model on each path that the installed vLLM has for it."""
    arguments, command = [str(model.model), *plan.flags(model)], model.command or plan.command
    candidates = await candidate_paths(command, arguments, plan.env | model.env, folder)
    return [_on_path(model, [_change(flags, env)]) for flags, env in candidates]


async def _measure(
    plan: SweepPlan, paths: Sequence[ModelEntry], num_repeats: int, folder: Path, settings: Mapping[str, Any]
) -> SweepResult:
    """Record the default path, and compare it and other paths. RunError if it fails on one of its servers."""
    default = plan.models[0].model_copy(update={"name": DEFAULT, "repeats": 0})
    again = plan.models[0].model_copy(update={"name": AGAIN})
    compared = [path.model_copy(update={"repeats": num_repeats}) for path in (again, *paths)]
    result = await run_sweep(plan.model_copy(update={"models": [default, *compared]}), folder, **settings)
    for name in (DEFAULT, AGAIN):
        if name in result.failures:
            raise RunError(f"the default path fails: {result.failures[name]}")
    return result


async def _record(plan: SweepPlan, original: ModelEntry, folder: Path, settings: Mapping[str, Any]) -> str:
    """Record the original in the folder of the paths' references, and return the reference's name."""
    alone = {"models": [original.model_copy(update={"name": ORIGINAL})], "layers": False, "lane": "prefill"}
    result = await run_sweep(plan.model_copy(update=alone), folder, **settings)
    if ORIGINAL in result.failures:
        raise RunError(f"the original fails: {result.failures[ORIGINAL]}")
    return str(json.loads(result.runs[ORIGINAL].read_text())[reuse.FIELD]["reference"])


def _add_eager(row: PathRow, eager: PathRow, layers: Mapping[str, Path]) -> None:
    """Add the figures of a path and of its blocks with both paths eager, given its row there and the files of
    `layers`."""
    row.eager, row.reason = next(iter(eager.lanes), None), row.reason or eager.reason
    if files := _repeats(layers, f"{row.name} (layers)"):
        blocks = block_figures(files, _repeats(layers, f"{AGAIN} (layers)"))
        # If the path agrees there, the largest costs are chance.
        if blocks[0].differs or (row.eager is not None and row.eager.differs):
            row.blocks = blocks


def _eager_plan(plan: SweepPlan) -> SweepPlan:
    """The plan for eager servers: less text, in windows of the same length."""
    context = plan.window_settings.get("context_length") or 2048
    text, windows = plan.text, plan.windows
    if windows.preset is None:
        # A window begins only where a token follows it.
        most = max(_EAGER_TOKENS, LEAST_WINDOWS * context) + 1
        text = text.model_copy(update={"max_tokens": min(text.max_tokens or most, most)})
    else:
        most = max(LEAST_WINDOWS, _EAGER_TOKENS // context)
        windows = windows.model_copy(update={"max_windows": min(windows.max_windows or most, most)})
    eager = {"output": f"{plan.output}/eager", "text": text, "windows": windows, "serve": [*plan.serve, EAGER]}
    return plan.model_copy(update={**eager, "lane": "prefill", "layers": True})


def _repeats(files: Mapping[str, Path], label: str) -> list[Path]:
    """The files of a run and of its repeats, until one is missing."""
    names = (numbered(label, repeat) for repeat in count())
    return [files[name] for name in takewhile(files.__contains__, names)]


def _table(result: SweepResult, names: Sequence[str], lanes: Sequence[Lane]) -> PathsRun:
    """Compare the runs of a sweep. The rows have no blocks yet."""

    def runs_of(name: str, lane: Lane) -> list[RunFile]:
        return [load_run(path, name) for path in _repeats(result.runs, in_lane(name, lane))]

    repeats = {lane: runs_of(AGAIN, lane) for lane in lanes}
    paths = [runs for name in names for lane in lanes if (runs := runs_of(name, lane))]
    figures, default = lane_figures(paths, repeats), repeats[lanes[0]][0]
    servers = {DEFAULT: default.server, **{runs[0].label: runs[0].server for runs in paths}}
    originals = {name: load_run(path) for name in (DEFAULT, *names) if (path := result.runs.get(f"{name} (original)"))}
    rows = [
        PathRow(
            name=name,
            reason=result.failures.get(name),
            same_as=same_path(name, servers),
            lanes=[lane for runs, lane in zip(paths, figures, strict=True) if runs[0].label == name],
            original=kld_test([originals[name]], [originals[DEFAULT]]) if name in originals else None,
        )
        for name in names
    ]
    return PathsRun(
        model=default.model,
        server=default.server,
        text=default.text_identity,
        num_tokens=default.num_scored,
        num_windows=len(default.window_sizes),
        context_length=default.context_length,
        num_repeats=len(repeats[lanes[0]]),
        rows=[PathRow(name=DEFAULT, lanes=lane_figures([*repeats.values()], repeats)), *rows],
    )
