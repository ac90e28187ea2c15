"""Runs a sweep: serves, measures and stops the models of a plan. Several servers may start at once, but one model is
measured at a time."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import httpx

from scoremode._tasks import results_of
from scoremode.accuracy.compare_tasks import TaskComparison
from scoremode.client import AsyncScoreClient
from scoremode.comparison import RunComparison, RunFile, check_comparable, compare, load_run, with_logs
from scoremode.comparison.card import write_card
from scoremode.comparison.plots import write_plots
from scoremode.comparison.report import write_report
from scoremode.comparison.run_file import with_run
from scoremode.errors import NotFoundError, OutputError, RunError, ScoremodeError, file_errors
from scoremode.results import NUM_TOP
from scoremode.runs import (
    MAX_CONCURRENCY,
    Corpus,
    Evaluation,
    Journal,
    KldMeasurement,
    LayersMeasurement,
    Measurement,
    OnProgress,
    Output,
    WindowNlls,
    evaluate,
    export_llama_cpp,
    in_lane,
    load_prompts,
    measure_kld,
    measure_layers,
    measure_noise_floor,
    open_locked,
    patient_client,
    read_card,
    record_answers,
    record_reference,
)
from scoremode.sweep import reuse
from scoremode.sweep.estimate import estimated_seconds
from scoremode.sweep.memory import ALONE, model_folder, needs, plan_groups
from scoremode.sweep.plan import GgufOptions, ModelEntry, PlanError, SweepPlan, check_local_models
from scoremode.sweep.processes import ProcessError, device_memory, measure_file, model_server
from scoremode.windows import WindowError
from scoremode.wire import AnswerSettings, Lane, PerplexityWindow, Reference

_log = logging.getLogger(__name__)

OpenBar = Callable[[Literal["ppl", "kld", "tokens"]], AbstractContextManager[OnProgress | None]]
"""Opens a progress bar that shows this figure, and gives the function that advances the bar; None for no bar."""
RunKind = Literal["perplexity", "kld", "layers"]
_ANSWERS_LANE: Lane = "decode"
"""The lane for runs on answers: the engine computes as it did when it generated them."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a model, as the plan asks for it."""

    label: str
    path: Path
    wanted: reuse.Marks
    """The marks that a run must have to be reused."""
    lane: Lane = "prefill"
    repeat: int = 0
    kind: RunKind = "kld"
    """A run of kind `kld` without a reference measures perplexity alone."""


@dataclass(slots=True)
class SweepResult:
    """The runs and failures of a sweep."""

    runs: dict[str, Path] = field(default_factory=dict)
    """Files of all runs, from this sweep or an earlier one, by label in the order of the plan."""
    measured: list[str] = field(default_factory=list)
    """Names of the models that this sweep measured."""
    layers: dict[str, Path] = field(default_factory=dict)
    """Files of runs that measured the cost of each block, by label."""
    logs: dict[str, Path] = field(default_factory=dict)
    """llama-perplexity's logs, by the names of the GGUF files."""
    failures: dict[str, str] = field(default_factory=dict)
    """Errors, by the name of the model or GGUF file or the label of the run that failed. If a server failed, its error
    includes the one in its log."""


async def run_sweep(
    plan: SweepPlan,
    folder: Path,
    *,
    api_key: str | None = None,
    open_bar: OpenBar = lambda figure: nullcontext(),
    at_once: int | None = None,
    second_reference: str | None = None,
) -> SweepResult:
    """Measure every model of a plan, except those that an earlier sweep measured.

    The first model's perplexity is measured, and a reference is recorded. For each other model, KL divergence from the
    reference and perplexity are measured, or perplexity alone if its server does not have the reference. If the plan
    has prompts, the first model answers them, and the others are measured on these answers too. If a model fails, the
    result has the error, and the others are still measured.

    Args:
        plan: What to measure.
        folder: The plan's folder; paths in the plan are relative to it.
        api_key: Sent to all servers; the environment's SCOREMODE_API_KEY when left out.
        open_bar: Opens a progress bar for a run or a recording; none when left out.
        at_once: Most servers that start and run at once; as many as fit the GPU when left out, and 1 without a GPU.
        second_reference: Name of a complete reference in the folder of this sweep's references: every model is compared
            with it too, in prefill.

    Raises:
        PlanError: a model that can only be a local path does not exist, or two runs would have the same file.
        CorpusError: the text or the prompts cannot be read.
        OutputError: the folder for runs cannot be made, or another sweep uses it.
        OSError: the folder of a model cannot be listed.
        RunError: the file for the card cannot be used.
    """
    check_local_models(plan, folder)
    corpus = plan.text.load(folder, plan.windows.preset, plan.windows.max_windows)
    prompts = None if plan.prompts is None else load_prompts(folder / plan.prompts)
    output = (folder / plan.output).resolve()
    with file_errors(OutputError, f"make {output / 'references'}"):
        (output / "references").mkdir(parents=True, exist_ok=True)
    if plan.compare.card is not None:
        read_card(output / plan.compare.card)
    with open_locked(output / ".lock"):
        return await _run(_Sweep(plan, folder, corpus, output, api_key, open_bar, prompts, second_reference), at_once)


async def _run(sweep: "_Sweep", at_once: int | None) -> SweepResult:
    plan, result = sweep.plan, sweep.result
    files = [run.path.name.casefold() for entry in plan.models for run in sweep.runs(entry, {}, None)]
    if twice := [name for name, number in Counter(files).items() if number > 1]:
        raise PlanError(f"models: two runs would be written to {twice[0]}")
    for group in await sweep.groups(at_once):
        started = time.monotonic()
        sweep.loaded = {entry.name: asyncio.Event() for entry, _ in group}
        await results_of(sweep.measure(entry, flags) for entry, flags in group)
        if len(group) == 1 and group[0][0].name in result.measured:
            sweep.seconds.append(time.monotonic() - started)
    if plan.gguf is not None:
        await sweep.measure_gguf(plan.gguf)
    in_order = [run for entry in plan.models for run in sweep.runs(entry, {}, None) if run.label in result.runs]
    result.layers = {run.label: run.path for run in in_order if run.kind == "layers"}
    result.runs = {run.label: run.path for run in in_order if run.kind != "layers"}
    return result


def compare_runs(
    plan: SweepPlan, folder: Path, result: SweepResult, tasks: TaskComparison | None = None
) -> RunComparison | None:
    """Compare the runs of a sweep, and write the files that the plan asks for. `tasks` are accuracies to show as well.

    Runs that cannot be compared with the first are added to the failures of `result`. None if no run is left.
    """
    runs: list[RunFile] = []
    for label, path in result.runs.items():
        try:
            run = load_run(path, label)
            if not run.is_of_answers:
                check_comparable([*runs[:1], run])
            runs = with_run(runs, run)
        except RunError as error:
            result.failures[label] = str(error)
    if not runs:
        return None
    comparison, output = replace(compare(runs), tasks=tasks), folder / plan.output
    for label, path in result.logs.items():
        try:
            comparison = with_logs(comparison, [(label, str(path))])
        except RunError as error:
            result.failures[label] = str(error)
    if plan.compare.plots is not None:
        write_plots(comparison, output / plan.compare.plots)
    if plan.compare.html is not None:
        write_report(comparison, output / plan.compare.html)
        _log.info("the report is %s", output / plan.compare.html)
    if plan.compare.card is not None:
        write_card(comparison, output / plan.compare.card)
        _log.info("the card is %s", output / plan.compare.card)
    return comparison


@dataclass(slots=True)
class _Sweep:
    plan: SweepPlan
    folder: Path
    corpus: Corpus
    output: Path
    api_key: str | None
    open_bar: OpenBar
    prompts: Corpus | None = None
    second_reference: str | None = None
    result: SweepResult = field(default_factory=SweepResult)
    reference: str | None = None
    """Name of the first model's reference, once it is known."""
    answers_reference: str = ""
    """Name of the reference with the first model's answers, once it is known."""
    recorded: list[PerplexityWindow] = field(default_factory=list)
    """The first model's windows that this sweep recorded."""
    recording_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """Seconds for each model that this sweep served alone and measured, including its server's start."""
    first_is_done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the first model is measured, or has failed."""
    measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a model is measured, so that no other takes part of the GPU."""
    loaded: dict[str, asyncio.Event] = field(default_factory=dict)
    """An event per model in a group of servers: set once its server is up, has failed, or is not needed."""
    is_at_once: bool = False
    """Whether servers start at once. A line in the log says which, and how long all may take."""

    async def groups(self, at_once: int | None) -> list[list[tuple[ModelEntry, Sequence[str]]]]:
        """Divide the models into groups whose servers run at once, with the flags that set each server's memory."""
        plan, device = self.plan, None
        # The first model names the reference that the others are asked for.
        waiting = {entry.name: entry for entry in plan.models if at_once != 1 and self._needs_server(entry)}
        if sum(entry.url is None for entry in waiting.values()) > 1:
            with suppress(ProcessError):
                device = await device_memory(plan.command, plan.env, self.folder)
        # The device is what the plan's command sees: another command may not know the flags for memory, or see another.
        wanted = {
            name: ALONE
            if entry.model is None
            or entry.url is not None
            or (device is not None and (entry.command is not None or "CUDA_VISIBLE_DEVICES" in entry.env))
            else needs(model_folder(entry.model, self.folder), plan.flags(entry), device)
            for name, entry in waiting.items()
        }
        groups = plan_groups(wanted, device, at_once)
        if len(groups) == len(waiting):
            return [[(entry, ())] for entry in plan.models]
        self.is_at_once = True
        names, estimate = "; then ".join(map(", ".join, groups)), self._estimate(len(groups))
        _log.info("servers that start at once: %s%s", names, estimate)
        entries = {entry.name: entry for entry in plan.models}
        measured: list[dict[str, Sequence[str]]] = [{name: ()} for name in entries if name not in waiting]
        return [[(entries[name], flags) for name, flags in group.items()] for group in [*measured, *groups]]

    def _needs_server(self, entry: ModelEntry) -> bool:
        """Whether a model is not measured yet, or is on a running server, which is asked later."""
        if entry.url is not None:
            return True
        marks = self._marks(entry, reuse.served_marks(self.plan, entry, self.folder))
        runs = self.runs(entry, marks, self.reference)
        return any(reuse.changes(run.path, run.wanted) != "" for run in runs) or self._must_record(entry)

    async def measure(self, entry: ModelEntry, flags: Sequence[str]) -> None:
        """Measure a model, whose server gets these flags too. An error is added to the failures."""
        try:
            self._require_recorded()
            await (self.measure_served(entry, flags) if entry.url is None else self.measure_running(entry, entry.url))
        except (ScoremodeError, WindowError, OSError) as error:
            hint = "; --at-once 1 gives its server the whole GPU" if flags and isinstance(error, ProcessError) else ""
            self.result.failures[entry.name] = f"{error}{hint}"
            _log.error("%s: failed: %s%s", entry.name, error, hint)
        finally:
            if self._is_first(entry):
                self.first_is_done.set()
            self.loaded[entry.name].set()

    async def measure_served(self, entry: ModelEntry, more_flags: Sequence[str]) -> None:
        marks = self._marks(entry, reuse.served_marks(self.plan, entry, self.folder))
        if self._reuse(entry, marks, self.reference):
            return
        log = self.output / "logs" / f"{entry.name}.log"
        command = entry.command or self.plan.command
        assert entry.model is not None
        self._announce(entry, f"loading `{' '.join(command)} {entry.model}`, log {log}")
        async with (
            model_server(
                command,
                entry.model,
                [*self.plan.flags(entry), "--reference-dir", str(self.output / "references"), *more_flags],
                environment=self.plan.env | entry.env,
                folder=self.folder,
                log=log,
                start_seconds=self.plan.start_timeout,
            ) as server,
            # The server runs on this machine, so do not use a proxy that the environment names.
            patient_client(server.url, api_key=self.api_key, transport=httpx.AsyncHTTPTransport()) as client,
        ):
            await server.while_it_runs(self._measure_in_turn(entry, client, marks))
        _log.info("%s: server stopped", entry.name)

    async def _measure_in_turn(self, entry: ModelEntry, client: AsyncScoreClient, marks: reuse.Marks) -> None:
        """Measure a model once the first one is done, and no other is being measured."""
        self.loaded[entry.name].set()
        for loaded in self.loaded.values() if self.plan.speeds else ():
            await loaded.wait()
        if not self._is_first(entry):
            await self.first_is_done.wait()
        self._require_recorded()
        async with self.measuring:
            # If the first model failed since this server started, runs that were compared with it stay valid.
            if self.plan.models[0].name not in self.result.failures or not self._reuse(entry, marks, self.reference):
                await self._measure(entry, client, marks)

    def _require_recorded(self) -> None:
        """RunError if the first model failed and was only to be recorded: then there is nothing to measure."""
        first = self.plan.models[0]
        if not first.repeats and first.name in self.result.failures:
            raise RunError(f"{first.name} failed, with which it would be compared")

    async def measure_running(self, entry: ModelEntry, url: str) -> None:
        async with patient_client(url, model=entry.model, api_key=self.api_key) as client:
            marks = self._marks(entry, reuse.running_marks(await client.info(), entry))
            if self._reuse(entry, marks, await self._reference_at(client, entry)):
                return
            self._announce(entry, f"served at {client.address}")
            await self._measure(entry, client, marks)

    def _announce(self, entry: ModelEntry, doing: str) -> None:
        models, rest = self.plan.models, ""
        place = models.index(entry)
        if self.seconds:
            minutes = (len(models) - place) * sum(self.seconds) / len(self.seconds) / 60
            rest = f"; all may take {max(1, round(minutes))} min more"
        elif place == 0 and not self.is_at_once:
            rest = self._estimate(len(models))
        _log.info("model %d of %d, %s: %s%s", place + 1, len(models), entry.name, doing, rest)

    def _estimate(self, num_starts: int) -> str:
        seconds = estimated_seconds(self.plan, self.folder, self.corpus, self.prompts, num_starts)
        if seconds is None:
            return ""
        return f"; all may take {max(1, round(seconds / 60))} min, a rough estimate from the model's size"

    def _is_first(self, entry: ModelEntry) -> bool:
        return entry is self.plan.models[0]

    def runs(self, entry: ModelEntry, marks: reuse.Marks, reference: str | None) -> Iterator[PlannedRun]:
        """Yield the runs of an entry, given the marks of its server and its text."""
        lanes = self.plan.lanes
        if self._is_first(entry) and "prefill" not in lanes:
            lanes = ("prefill", *lanes)
        wanted = {**marks, "reference": reference}
        for repeat in range(entry.repeats):
            for lane in lanes:
                label, name = in_lane(entry.name, lane), entry.name if lane == "prefill" else f"{entry.name}-{lane}"
                kind: RunKind = "perplexity" if self._is_first(entry) and lane == "prefill" else "kld"
                path = self.output / f"{numbered(name, repeat)}.json"
                yield PlannedRun(numbered(label, repeat), path, wanted, lane, repeat, kind)
            if self.plan.layers and not self._is_first(entry):
                path = self.output / f"{numbered(f'{entry.name}-layers', repeat)}.json"
                label = numbered(f"{entry.name} (layers)", repeat)
                yield PlannedRun(label, path, wanted, repeat=repeat, kind="layers")
        if self.second_reference is not None:
            label, path = f"{entry.name} (original)", self.output / f"{entry.name}-original.json"
            yield PlannedRun(label, path, {**marks, "reference": self.second_reference})
        if self.prompts is not None and not self._is_first(entry):
            wanted = reuse.answers_marks(self.plan, self.prompts, marks)
            wanted["reference"] = reference and self.answers_reference
            path = self.output / f"{entry.name}-answers.json"
            yield PlannedRun(f"{entry.name} (answers)", path, wanted, _ANSWERS_LANE)

    def _marks(self, entry: ModelEntry, model_marks: reuse.Marks) -> reuse.Marks:
        marks = {**reuse.text_marks(self.plan, self.corpus), **model_marks}
        if self._is_first(entry):
            self.reference = reuse.reference_name(entry, marks)
            self.answers_reference = reuse.reference_name(entry, reuse.answers_marks(self.plan, self.prompts, marks))
        return marks

    def _reuse(self, entry: ModelEntry, marks: reuse.Marks, reference: str | None) -> bool:
        """Reuse the entry's runs from an earlier sweep that are still valid. Returns whether nothing is left to measure
        or record on the entry's server."""
        runs = [*self.runs(entry, marks, reference)]
        has_reference = reference is not None and self.plan.models[0].name not in self.result.failures
        for run in runs:
            # If the reference is not available now, runs that were compared with it stay valid.
            wanted = {name: value for name, value in run.wanted.items() if has_reference or name != "reference"}
            changed = reuse.changes(run.path, wanted)
            if changed:
                _log.info("%s: measured again, because of its %s", run.label, changed)
            elif changed is not None:
                self.result.runs[run.label] = run.path
                _log.info("%s: measured before, %s", run.label, run.path)
        return not self._must_record(entry) and all(run.label in self.result.runs for run in runs)

    def _must_record(self, entry: ModelEntry) -> bool:
        """Whether this is the first model, and its server is needed even if it is measured."""
        return self._is_first(entry) and (
            (self.plan.gguf is not None and not self._base_file().exists())
            or (self.prompts is not None if entry.url is not None else self._is_reference_missing())
        )

    def _is_reference_missing(self) -> bool:
        """Whether a later model needs a reference of the first model that is missing or incomplete. A model on a
        running server always counts as one that needs its references, because the server has not been asked yet."""
        text = reuse.text_marks(self.plan, self.corpus)
        return any(
            not reuse.is_complete(self.output / "references" / str(run.wanted["reference"]))
            and (entry.url is not None or reuse.changes(run.path, run.wanted) != "")
            for entry in self.plan.models[1:]
            for run in self.runs(
                entry,
                text | (reuse.served_marks(self.plan, entry, self.folder) if entry.url is None else {}),
                self.reference,
            )
        )

    async def _reference_at(self, client: AsyncScoreClient, entry: ModelEntry) -> str | None:
        """Return the reference's name if the server has all of it, or serves the first model and can record it."""
        if self.reference is None:
            return None
        try:
            if self._is_first(entry):
                await client.references()
                return self.reference
            return self.reference if (await client.reference(self.reference)).complete else None
        except NotFoundError:
            return None

    async def _measure(self, entry: ModelEntry, client: AsyncScoreClient, marks: reuse.Marks) -> None:
        reference = await self._reference_at(client, entry)
        if reference is None:
            _log.warning(
                "%s: its server has no reference of the first model, nor records one: only perplexity is measured",
                entry.name,
            )
        elif self._is_first(entry):
            await self._record(client, entry, reference)
        for run in self.runs(entry, marks, reference):
            # Only perplexity in prefill needs no reference.
            is_alone = run.lane == "prefill" and run.kind != "layers"
            if run.label not in self.result.runs and (is_alone or run.wanted["reference"] is not None):
                await self._measure_run(entry, client, run)
        self.result.measured.append(entry.name)
        if reference is not None and self._is_first(entry) and self.plan.gguf is not None:
            await self._export(client, reference)
        if self._is_first(entry):
            self.first_is_done.set()

    async def _measure_run(self, entry: ModelEntry, client: AsyncScoreClient, run: PlannedRun) -> None:
        output = Output(run.path, resume=reuse.prepare_resume(run.path, run.wanted), force=True)
        try:
            finished: Evaluation | KldMeasurement | LayersMeasurement
            if run.kind == "layers":
                finished, figures = await self._layers(client, output, run)
            elif run.kind == "perplexity" or run.wanted["reference"] is None:
                finished, figures = await self._perplexity(client, entry, output)
            else:
                finished, figures = await self._kld(client, output, run)
            record = finished.record([client.base_url])
            if self.is_at_once and not self.plan.speeds:
                # Another server may have been starting, and none had the GPU to itself.
                record |= dict.fromkeys({"tokens_per_second", "positions_per_second"} & record.keys())
            output.write({**record, reuse.FIELD: run.wanted}, finished.arrays())
            output.remove_journal()
            reuse.finish(run.path)
        finally:
            output.abort()
        self.result.runs[run.label] = run.path
        _log.info("%s: %s, %s", run.label, figures, run.path)

    def _base_file(self) -> Path:
        return self.output / "gguf" / f"{self.reference}.base"

    async def _export(self, client: AsyncScoreClient, reference: str) -> None:
        path = self._base_file()
        if not path.exists():
            _log.info("exporting the reference for llama.cpp, %s", path)
            path.parent.mkdir(exist_ok=True)
            await export_llama_cpp(client, reference, path)

    async def measure_gguf(self, options: GgufOptions) -> None:
        """Have llama-perplexity measure each file that it has not measured yet."""
        for name in options.files:
            file = self.folder / name
            try:
                if not self._base_file().exists():
                    raise ProcessError("the first model's reference was not exported")
                log = reuse.log_path(self._base_file(), file)
                if not log.exists():
                    _log.info("%s: llama-perplexity measures it, log %s", file.stem, log)
                    await measure_file(options.llama_perplexity, file, self._base_file(), log)
                self.result.logs[file.stem] = log
            except (ScoremodeError, OSError) as error:
                self.result.failures[file.stem] = str(error)
                _log.error("%s: failed: %s", file.stem, error)

    async def _record(self, client: AsyncScoreClient, entry: ModelEntry, reference: str) -> None:
        _log.info("%s: recording the reference %s", entry.name, reference)
        with self.open_bar("ppl") as on_progress:
            recorded = await record_reference(
                client,
                self.corpus,
                reference,
                layers=self.plan.layers,
                **self.plan.window_settings,
                on_progress=on_progress,
                on_window=self.recorded.append,
            )
        self.recording_seconds = recorded.seconds
        floors: list[tuple[Reference, Lane]] = [(recorded.reference, lane) for lane in self.plan.lanes]
        if self.prompts is not None:
            _log.info("%s: answering %d prompts", entry.name, self.prompts.num_rows)
            with self.open_bar("tokens") as on_progress:
                answered = await record_answers(
                    client,
                    self.prompts,
                    self.answers_reference,
                    AnswerSettings(max_new_tokens=self.plan.max_new_tokens),
                    folder=self.output,
                    on_progress=on_progress,
                )
            floors.append((answered.reference, _ANSWERS_LANE))
        for original, lane in floors if self.plan.floor else ():
            if original.noise_floor_of(lane) is None:
                _log.info("%s: measuring the noise floor of %s, %s lane", entry.name, original.name, lane)
                with self.open_bar("kld") as on_progress:
                    await measure_noise_floor(client, original.name, lane=lane, on_progress=on_progress)

    async def _perplexity(self, client: AsyncScoreClient, entry: ModelEntry, output: Output) -> tuple[Evaluation, str]:
        def start_journal(plan: Measurement[WindowNlls]) -> Journal[WindowNlls]:
            """Start a journal; the first model's has the windows that were scored when they were recorded."""
            journal = output.start_journal(plan)
            if not self._is_first(entry):
                return journal
            journal.seconds += self.recording_seconds
            for window in self.recorded:
                if window.logprobs is not None and window.index not in journal.windows:
                    scored = WindowNlls(
                        index=window.index,
                        num_scored=window.num_scored,
                        nll_sum=window.nll_sum,
                        nlls=[-logprob for logprob in window.logprobs],
                        ranks=window.ranks,
                    )
                    journal.windows[window.index] = plan.from_line(scored.to_line())
                    journal.add(scored, journal.seconds)
            return journal

        _log.info("%s: measuring perplexity", entry.name)
        with self.open_bar("ppl") as on_progress:
            evaluation = await evaluate(
                client,
                self.corpus,
                **self.plan.window_settings,
                return_ranks=True,
                return_token_texts=True,
                start_journal=start_journal,
                on_progress=on_progress,
            )
        return evaluation, f"perplexity {evaluation.result.perplexity:.4f}"

    async def _kld(self, client: AsyncScoreClient, output: Output, run: PlannedRun) -> tuple[KldMeasurement, str]:
        _log.info("%s: measuring KL divergence and perplexity", run.label)
        reference = str(run.wanted["reference"])
        if self.plan.speeds and not run.repeat and run.lane == self.plan.lanes[0]:
            # A server's first request loads the reference's LM head, which is not part of the speed.
            await client.kld(reference, (0, 1))
        with self.open_bar("kld") as on_progress:
            measurement = await measure_kld(
                client,
                reference,
                return_token_texts=True,
                top_logprobs=NUM_TOP,
                concurrency=await _concurrency(client, run),
                lane=run.lane,
                start_journal=output.start_journal,
                on_progress=on_progress,
            )
        mean, perplexity = measurement.statistics["kld"]["mean"], measurement.statistics["ppl_q"]
        return measurement, f"mean KL divergence {_shown(mean)}, perplexity {_shown(perplexity)}"

    async def _layers(self, client: AsyncScoreClient, output: Output, run: PlannedRun) -> tuple[LayersMeasurement, str]:
        _log.info("%s: measuring the cost of each block", run.label)
        with self.open_bar("kld") as on_progress:
            measurement = await measure_layers(
                client,
                str(run.wanted["reference"]),
                concurrency=await _concurrency(client, run),
                start_journal=output.start_journal,
                on_progress=on_progress,
            )
        return measurement, f"whole model {measurement.whole.in_words} nats per token"


async def _concurrency(client: AsyncScoreClient, run: PlannedRun) -> int | None:
    """Windows in flight: the default number in the first run, and then fewer, so that batches differ."""
    if not run.repeat:
        return None
    info, reference = await client.info(), await client.reference(str(run.wanted["reference"]))
    most = min(MAX_CONCURRENCY, info.max_num_seqs or MAX_CONCURRENCY, reference.num_windows)
    return max(1, most * 3 // (3 + run.repeat))


def numbered(label: str, repeat: int) -> str:
    """The label of a repeat, given that of the first run."""
    return f"{label} ({repeat + 1})" if repeat else label


def _shown(figure: float | None) -> str:
    return "infinite" if figure is None else f"{figure:.6f}"
