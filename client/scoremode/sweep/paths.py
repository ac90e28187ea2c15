"""Measures one checkpoint on several kernel paths, each a server with other flags, environment or command, and finds
the paths, and the blocks of the model, that differ from the default path.

The default path is recorded, and measured again on a second server, in repeats. The paths are the other models of the
same sweep. Those that differ in prefill are measured once more by a sweep of eager servers, which resumes them at each
block's boundary.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, product
from math import inf
from pathlib import Path
from typing import Any

from scoremode.comparison import compare, load_run
from scoremode.comparison.paths import (
    DEFAULT,
    BlockFigures,
    PathRow,
    PathsRun,
    block_figures,
    lane_figures,
    nearer_to_original,
    same_path,
)
from scoremode.comparison.report import write_report
from scoremode.comparison.run_file import RunFile
from scoremode.errors import RunError
from scoremode.runs import LEAST_WINDOWS, in_lane, write_whole
from scoremode.sweep import reuse
from scoremode.sweep.memory import model_folder
from scoremode.sweep.plan import ModelEntry, PlanError, SweepPlan, VaryOptions
from scoremode.sweep.processes import candidate_paths
from scoremode.sweep.sweep import SweepResult, run_sweep
from scoremode.wire import Lane

_log = logging.getLogger(__name__)

AGAIN, ORIGINAL = "default-again", "original"
"""Names of the second server of the default path, and of the original's."""
EAGER = "--enforce-eager"
FILE = "paths.json"
_LONGEST_NAME = 80
_EAGER_TOKENS = 8192
"""Limit on the text of the eager servers, whose reference has the residual stream at every boundary."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One value that differs from the default path."""

    name: str
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    command: list[str] | None = None

    def applied_to(self, model: ModelEntry) -> ModelEntry:
        """The model on this path. The name is also that of files."""
        changed = {
            "name": self.name.replace("/", "_")[:_LONGEST_NAME],
            "serve": [*model.serve, *self.flags],
            "env": model.env | self.env,
            "command": self.command or model.command,
        }
        return model.model_copy(update=changed)


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
    changes = [*_changes(vary)] or await _candidates(plan, model, folder)
    paths = [change.applied_to(model) for change in changes]
    if repeated := [name for name, count in Counter(path.name.casefold() for path in paths).items() if count > 1]:
        raise PlanError(f"vary: two paths are called {repeated[0]!r}")
    # Eager servers are also measured with their layers, unless the text is too long.
    has_layers = vary.blocks and EAGER in plan.flags(model) and (plan.text.max_tokens or inf) <= _EAGER_TOKENS + 1
    plan = plan.model_copy(update={"vary": None, "speeds": True, "layers": has_layers})
    _say_space(plan, model, folder)
    original = None if vary.original is None else await _record(plan, vary.original, folder, settings)
    measured = await _measure(plan, paths, vary.repeats, folder, {**settings, "second_reference": original})
    rows = measured.rows([path.name for path in paths], plan.lanes)
    differing = {row.name: row for row in rows if any(lane.differs and lane.lane == "prefill" for lane in row.lanes)}
    run, path = measured.table(rows, plan.lanes), (folder / plan.output / FILE).resolve()
    if differing and vary.blocks:
        # The table is kept if looking for blocks is interrupted.
        write_whole(path, run.model_dump_json(indent=1).encode())
        eager = measured
        if not plan.layers:
            again = [path for path in paths if path.name in differing]
            eager = await _measure(_eager_plan(plan), again, vary.repeats, folder, settings)
        for row in eager.rows([*differing], ["prefill"]):
            differing[row.name].eager = next(iter(row.lanes), None)
            differing[row.name].reason = differing[row.name].reason or row.reason
            differing[row.name].blocks = eager.blocks(row.name)
    write_whole(path, run.model_dump_json(indent=1).encode())
    return run, measured.result


def _say_space(plan: SweepPlan, model: ModelEntry, folder: Path) -> None:
    """Log how much disk space the hidden states take, if the model's config and the text's length are known."""
    with suppress(OSError, ValueError, KeyError):
        config = json.loads((model_folder(str(model.model), folder) / "config.json").read_text())
        hidden_size = (config | config.get("text_config", {}))["hidden_size"]
        if plan.text.max_tokens is not None:
            # 16 bits per value; float32 takes twice as much.
            gib = plan.text.max_tokens * hidden_size * 2 / 2**30
            _log.info("the reference of %s tokens takes some %.2f GiB", f"{plan.text.max_tokens:,}", gib)


def write_paths_report(plan: SweepPlan, folder: Path, run: PathsRun, result: SweepResult) -> None:
    """Write the report that the plan asks for, with the paths and with the runs in prefill. OSError or OutputError if
    the file cannot be written."""
    if plan.compare.html is not None:
        labels = {AGAIN: DEFAULT, **{row.name: row.name for row in run.rows}}
        runs = [load_run(result.runs[own], label) for own, label in labels.items() if own in result.runs]
        path = folder / plan.output / plan.compare.html
        write_report(compare(runs), path, paths=run)
        _log.info("the report is %s", path)


def _changes(vary: VaryOptions) -> Iterator[_Change]:
    """The values of a plan, each alone, and with `product` in all combinations too."""
    knobs = [
        *([_flag(name, value) for value in values] for name, values in vary.flags.items()),
        *([_Change(f"{name}={value}", env={name: value}) for value in values] for name, values in vary.env.items()),
        [_Change(f"command={number}", command=words) for number, words in enumerate(vary.command, 1)],
    ]
    yield from chain(*knobs)
    if vary.product:
        for chosen in product(*([_Change(""), *knob] for knob in knobs)):
            if len(parts := [change for change in chosen if change.name]) > 1:
                name, flags = ", ".join(part.name for part in parts), [*chain(*(part.flags for part in parts))]
                env = {name: value for part in parts for name, value in part.env.items()}
                yield _Change(name, flags, env, next((part.command for part in parts if part.command), None))


def _flag(name: str, value: str | bool) -> _Change:
    return _Change(name, [f"--{name}"]) if value is True else _Change(f"{name}={value}", [f"--{name}", str(value)])


async def _candidates(plan: SweepPlan, model: ModelEntry, folder: Path) -> list[_Change]:
    """The paths that the installed vLLM has for the model."""
    arguments, command = [str(model.model), *plan.flags(model)], model.command or plan.command
    return [
        _Change("=".join([*flags, *chain(*env.items())]).removeprefix("--"), flags, env)
        for flags, env in await candidate_paths(command, arguments, plan.env | model.env, folder)
    ]


async def _measure(
    plan: SweepPlan, paths: Sequence[ModelEntry], num_repeats: int, folder: Path, settings: Mapping[str, Any]
) -> "_Measured":
    """Measure the default path, its repeats, and other paths. RunError if one of the first two fails."""
    default = plan.models[0].model_copy(update={"name": DEFAULT, "repeats": 0})
    again = plan.models[0].model_copy(update={"name": AGAIN, "repeats": num_repeats})
    result = await run_sweep(plan.model_copy(update={"models": [default, again, *paths]}), folder, **settings)
    for name in (DEFAULT, AGAIN):
        if name in result.failures:
            raise RunError(f"the default path fails: {result.failures[name]}")
    return _Measured(result, num_repeats)


async def _record(plan: SweepPlan, original: ModelEntry, folder: Path, settings: Mapping[str, Any]) -> str:
    """Record the original in the folder of the paths' references, and return the reference's name."""
    alone = {"models": [original.model_copy(update={"name": ORIGINAL})], "layers": False, "lane": "prefill"}
    result = await run_sweep(plan.model_copy(update=alone), folder, **settings)
    if ORIGINAL in result.failures:
        raise RunError(f"the original fails: {result.failures[ORIGINAL]}")
    return str(json.loads(result.runs[ORIGINAL].read_text())[reuse.FIELD]["reference"])


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


@dataclass(frozen=True, slots=True)
class _Measured:
    """The runs of a sweep over the default path, its repeats, and other paths."""

    result: SweepResult
    num_repeats: int

    def repeats(self, lane: Lane) -> list[RunFile]:
        return [load_run(self.result.runs[label]) for label in self._numbered(in_lane(AGAIN, lane))]

    def _numbered(self, label: str) -> list[str]:
        return [label, *(f"{label}-{number}" for number in range(2, self.num_repeats + 1))]

    def rows(self, names: Sequence[str], lanes: Sequence[Lane]) -> list[PathRow]:
        """One row per path, without the blocks."""
        repeats, paths = {lane: self.repeats(lane) for lane in lanes}, self.result.runs
        labels = [(name, in_lane(name, lane)) for name in names for lane in lanes]
        runs = [load_run(paths[label], name) for name, label in labels if label in paths]
        figures, servers = lane_figures(runs, repeats), {DEFAULT: repeats[lanes[0]][0].server}
        rows = []
        for name in names:
            own = [(run.server, lane) for run, lane in zip(runs, figures, strict=True) if run.label == name]
            row = PathRow(name=name, reason=self.result.failures.get(name), lanes=[lane for _, lane in own])
            for server, _ in own[:1]:
                row.same_as = same_path(server, servers)
                servers[name] = server
            if (original := paths.get(f"{name} (original)")) is not None:
                row.original = nearer_to_original(load_run(original), load_run(paths[f"{DEFAULT} (original)"]))
            rows.append(row)
        return rows

    def blocks(self, name: str) -> list[BlockFigures]:
        """The parts of the model that differ on a path; empty if its layers were not measured."""
        layers = self.result.layers
        if (path := layers.get(f"{name} (layers)")) is None:
            return []
        return block_figures(path, [layers[label] for label in self._numbered(f"{AGAIN} (layers)")])

    def table(self, rows: Sequence[PathRow], lanes: Sequence[Lane]) -> PathsRun:
        """All rows, after that of the default path: its first repeat next to all of them."""
        repeats = {lane: self.repeats(lane) for lane in lanes}
        default = repeats[lanes[0]][0]
        figures = lane_figures([runs[0] for runs in repeats.values()], repeats)
        return PathsRun(
            model=default.model,
            server=default.server,
            text=default.text_identity,
            num_tokens=default.num_scored,
            num_windows=len(default.window_sizes),
            context_length=default.context_length,
            num_repeats=self.num_repeats,
            rows=[PathRow(name=DEFAULT, lanes=figures), *rows],
        )
