"""A sweep: each model of a plan is served, measured and stopped, one after another."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from scoremode.client import AsyncScoreClient
from scoremode.comparison import RunComparison, RunFile, check_comparable, compare, load_run, with_logs
from scoremode.comparison.card import write_card
from scoremode.comparison.plots import write_plots
from scoremode.comparison.report import write_report
from scoremode.errors import NotFoundError, OutputError, RunError, ScoremodeError, file_errors
from scoremode.results import NUM_TOP
from scoremode.runs import (
    Corpus,
    Evaluation,
    FinishedRun,
    Journal,
    KldMeasurement,
    Measurement,
    OnProgress,
    Output,
    WindowNlls,
    evaluate,
    export_llama_cpp,
    in_lane,
    measure_kld,
    measure_noise_floor,
    open_locked,
    patient_client,
    read_card,
    record_reference,
)
from scoremode.sweep import reuse
from scoremode.sweep.estimate import estimated_seconds
from scoremode.sweep.plan import GgufOptions, ModelEntry, SweepPlan, check_local_models
from scoremode.sweep.processes import ProcessError, measure_file, model_server
from scoremode.windows import WindowError
from scoremode.wire import Lane, PerplexityWindow

_log = logging.getLogger(__name__)

OpenBar = Callable[[Literal["ppl", "kld"]], AbstractContextManager[OnProgress | None]]
"""Opens a progress bar with this figure; gives the function that advances it."""


@dataclass(slots=True)
class SweepResult:
    """The runs and failures of a sweep."""

    runs: dict[str, Path] = field(default_factory=dict)
    """The files of all runs, measured now or before, by the models' names in the order of the plan."""
    measured: list[str] = field(default_factory=list)
    """Names of the models that were measured now."""
    logs: dict[str, Path] = field(default_factory=dict)
    """What llama-perplexity printed of GGUF files, by their names."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a run is missing, by the models' names; with the error in a server's log where it failed."""


async def run_sweep(
    plan: SweepPlan, folder: Path, *, api_key: str | None = None, open_bar: OpenBar = lambda figure: nullcontext()
) -> SweepResult:
    """Measure every model of a plan whose run is not there yet.

    The first gets a run of perplexity, and is recorded as a reference. Each other gets a run of KL divergence from it,
    which has its perplexity too; or one of perplexity, where its server has not the reference. A model that fails is
    in the result, and the others are still measured.

    Args:
        plan: What to measure.
        folder: Where the plan is; its paths are relative to it.
        api_key: Sent to all servers; the environment's SCOREMODE_API_KEY when left out.
        open_bar: Opens a progress bar for a run or a recording; none when left out.

    Raises:
        PlanError: a model that is a local path is not there.
        CorpusError: the text cannot be read.
        OutputError: the folder for runs cannot be made.
    """
    check_local_models(plan, folder)
    corpus = plan.text.load(folder, plan.windows.preset, plan.windows.max_windows)
    output = (folder / plan.output).resolve()
    with file_errors(OutputError, f"make {output / 'references'}"):
        (output / "references").mkdir(parents=True, exist_ok=True)
    if plan.compare.card is not None:
        read_card(output / plan.compare.card)
    with open_locked(output / ".lock"):
        return await _run(_Sweep(plan, folder, corpus, output, api_key, open_bar))


async def _run(sweep: "_Sweep") -> SweepResult:
    plan = sweep.plan
    for entry in plan.models:
        started = time.monotonic()
        try:
            await (sweep.measure_served(entry) if entry.url is None else sweep.measure_running(entry, entry.url))
        except (ScoremodeError, WindowError, OSError) as error:
            sweep.result.failures[entry.name] = str(error)
            _log.error("%s: failed: %s", entry.name, error)
        if entry.name in sweep.result.measured:
            sweep.seconds.append(time.monotonic() - started)
    if plan.gguf is not None:
        await sweep.measure_gguf(plan.gguf)
    return sweep.result


def compare_runs(plan: SweepPlan, folder: Path, result: SweepResult) -> RunComparison | None:
    """Compare the runs that are comparable with the first, if there are any, and write what the plan asks for.

    The other runs are added to the failures of `result`, with the reason.
    """
    runs: list[RunFile] = []
    for label, path in result.runs.items():
        try:
            run = load_run(path, label)
            check_comparable([*runs[:1], run])
            runs.append(run)
        except RunError as error:
            result.failures[label] = str(error)
    if not runs:
        return None
    comparison, output = compare(runs), folder / plan.output
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
    result: SweepResult = field(default_factory=SweepResult)
    reference: str | None = None
    """Name of the first model's, once it is known."""
    recorded: list[PerplexityWindow] = field(default_factory=list)
    """Of the first model, those of this time."""
    recording_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """Of each model that was measured now, its server's start included."""

    async def measure_served(self, entry: ModelEntry) -> None:
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
                [*self.plan.serve, *entry.serve, "--reference-dir", str(self.output / "references")],
                environment=self.plan.env | entry.env,
                folder=self.folder,
                log=log,
                start_seconds=self.plan.start_timeout,
            ) as server,
            # A proxy of the environment is not asked for what runs here.
            patient_client(server.url, api_key=self.api_key, transport=httpx.AsyncHTTPTransport()) as client,
        ):
            await server.while_it_runs(self._measure(entry, client, marks))
        _log.info("%s: server stopped", entry.name)

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
        elif place == 0 and (estimate := estimated_seconds(self.plan, self.folder, self.corpus)) is not None:
            rest = f"; all may take {max(1, round(estimate / 60))} min, a rough estimate from the model's size"
        _log.info("model %d of %d, %s: %s%s", place + 1, len(models), entry.name, doing, rest)

    def _is_first(self, entry: ModelEntry) -> bool:
        return entry is self.plan.models[0]

    def _paths(self, entry: ModelEntry) -> dict[str, tuple[Lane, Path]]:
        """The files of an entry's runs with their lanes, by the runs' labels."""
        lanes = self.plan.lanes
        if self._is_first(entry) and "prefill" not in lanes:
            lanes = ("prefill", *lanes)
        paths = {}
        for lane in lanes:
            suffix = "" if lane == "prefill" else f"-{lane}"
            paths[in_lane(entry.name, lane)] = lane, self.output / f"{entry.name}{suffix}.json"
        return paths

    def _marks(self, entry: ModelEntry, model_marks: reuse.Marks) -> reuse.Marks:
        marks = {**reuse.text_marks(self.plan, self.corpus), **model_marks}
        if self._is_first(entry):
            self.reference = reuse.reference_name(entry, marks)
        return marks

    def _reuse(self, entry: ModelEntry, marks: reuse.Marks, reference: str | None) -> bool:
        """Take the run of an earlier sweep, if there is one that need not be measured again; returns whether it is."""
        wanted = {**marks, "reference": reference}
        if reference is None or self.plan.models[0].name in self.result.failures:
            # What was compared with the first is not thrown away because that is not at hand today.
            del wanted["reference"]
        paths = self._paths(entry)
        changes = [reuse.changes(path, wanted) for _, path in paths.values()]
        if changed := next(filter(None, changes), None):
            _log.info("%s: measured again, because of its %s", entry.name, changed)
        if any(each != "" for each in changes):
            return False
        if self._is_first(entry) and (
            (self.plan.gguf is not None and not self._base_file().exists())
            or (entry.url is None and self._is_reference_missing())
        ):
            return False
        for label, (_, path) in paths.items():
            self.result.runs[label] = path
            _log.info("%s: measured before, %s", label, path)
        return True

    def _is_reference_missing(self) -> bool:
        """Whether the first model's reference is missing, or not complete, and another model needs it, as far as is
        known before its server is asked."""
        assert self.reference is not None
        if reuse.is_complete(self.output / "references" / self.reference):
            return False
        text = {**reuse.text_marks(self.plan, self.corpus), "reference": self.reference}
        return any(
            entry.url is not None or reuse.changes(path, text | reuse.served_marks(self.plan, entry, self.folder)) != ""
            for entry in self.plan.models[1:]
            for _, path in self._paths(entry).values()
        )

    async def _reference_at(self, client: AsyncScoreClient, entry: ModelEntry) -> str | None:
        """The reference's name, where a server has it whole, or where it is the first one's, which can record it."""
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
        for label, (lane, path) in self._paths(entry).items():
            if reference is not None or lane == "prefill":
                await self._measure_lane(entry, client, {**marks, "reference": reference}, label, lane, path)
        self.result.measured.append(entry.name)
        if reference is not None and self._is_first(entry) and self.plan.gguf is not None:
            await self._export(client, reference)

    async def _measure_lane(
        self, entry: ModelEntry, client: AsyncScoreClient, marks: reuse.Marks, label: str, lane: Lane, path: Path
    ) -> None:
        output, reference = Output(path, resume=reuse.prepare_resume(path, marks), force=True), marks["reference"]
        try:
            run: FinishedRun
            if reference is None or (self._is_first(entry) and lane == "prefill"):
                run, figures = await self._perplexity(client, entry, output)
            else:
                run, figures = await self._kld(client, label, output, reference, lane)
            output.write({**run.record([client.base_url]), reuse.FIELD: marks}, run.arrays())
            output.remove_journal()
            reuse.finish(path)
        finally:
            output.abort()
        self.result.runs[label] = path
        _log.info("%s: %s, %s", label, figures, path)

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
                **self.plan.window_settings,
                on_progress=on_progress,
                on_window=self.recorded.append,
            )
        self.recording_seconds = recorded.seconds
        for lane in self.plan.lanes if self.plan.floor else ():
            if recorded.reference.noise_floor_of(lane) is None:
                _log.info("%s: measuring the noise floor, %s lane", entry.name, lane)
                with self.open_bar("kld") as on_progress:
                    await measure_noise_floor(client, reference, lane=lane, on_progress=on_progress)

    async def _perplexity(self, client: AsyncScoreClient, entry: ModelEntry, output: Output) -> tuple[Evaluation, str]:
        def start_journal(plan: Measurement[WindowNlls]) -> Journal[WindowNlls]:
            """Start a journal that has the windows which the recording scored: they are not scored again."""
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

    async def _kld(
        self, client: AsyncScoreClient, label: str, output: Output, reference: str, lane: Lane
    ) -> tuple[KldMeasurement, str]:
        _log.info("%s: measuring KL divergence and perplexity", label)
        with self.open_bar("kld") as on_progress:
            measurement = await measure_kld(
                client,
                reference,
                return_token_texts=True,
                top_logprobs=NUM_TOP,
                lane=lane,
                start_journal=output.start_journal,
                on_progress=on_progress,
            )
        mean, perplexity = measurement.statistics["kld"]["mean"], measurement.statistics["ppl_q"]
        return measurement, f"mean KL divergence {_shown(mean)}, perplexity {_shown(perplexity)}"


def _shown(figure: float | None) -> str:
    return "infinite" if figure is None else f"{figure:.6f}"
