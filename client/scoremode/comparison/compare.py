"""Compares runs: chooses the base, and computes figures with errors and intervals per run, and a verdict per pair."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import combinations

import numpy as np

from scoremode.comparison.agreement import AgreementFigures, agreement_figures, answer_counts, floor_figures
from scoremode.comparison.bootstrap import Resamples, resample
from scoremode.comparison.figures import Figure, PairFigures, RunComparison, RunFigures, Size, Verdict, plain
from scoremode.comparison.groups import TokenGroup, first_known, groups_of
from scoremode.comparison.run_file import RunFile
from scoremode.errors import RunError
from scoremode.kld import Floats, over_noise_floor, quantile, standard_error
from scoremode.metrics import bits_per_byte, exp
from scoremode.windows import EXHAUSTIVE_METHODS
from scoremode.wire import ServedModel

LEAST_LN_RATIO = 5e-5
"""Smallest abs(ln(PPL ratio)) that counts as a difference: other batch shapes alone change ln(PPL) by this much."""

_SERVER_FIELDS = (*ServedModel.model_fields, "vocab_size", "fingerprint")
"""Fields of a reference that describe the server that recorded it."""


def compare(
    runs: Sequence[RunFile],
    *,
    base: str | None = None,
    size: Size = "gib",
    max_kld: float | None = None,
    max_ppl_increase: float | None = None,
    num_resamples: int = 4000,
    seed: int = 0,
) -> RunComparison:
    """Compare runs on the same tokens with the base, and every two runs with each other.

    Args:
        runs: One or more runs with the same text, tokenizer, method and windows, and different labels.
        base: Label of the run that the others are compared with. The default is a run of the reference's own model,
            else the reference if all runs have the same one, else the first run.
        size: The measure of size on the horizontal axis of plots, if the sizes are known.
        max_kld: Tolerance for the mean KL divergence in nats; the summary says whether a run is within it.
        max_ppl_increase: Tolerance for the increase of perplexity over the base's, in percent.
        num_resamples: Number of resamples of the text, for the intervals.
        seed: Seed of the resamples; the same seed gives the same intervals.

    Raises:
        RunError: the runs cannot be compared.
    """
    check_comparable(runs)
    runs, warnings = _with_base_first(runs, base)
    groups = [*groups_of(runs)]
    values = {(run.label, name): series for run in runs for name, series in _series(run).items()}
    klds = [run.kld for run in runs if run.kld is not None]
    # Infinities are expected. Figures that they make undefined become None or NaN.
    with np.errstate(invalid="ignore", over="ignore"):
        text_resamples, *group_resamples = resample(
            np.column_stack(list(values.values())),
            # Series that determine the block length: the base's NLLs, other runs' minus these, and KL divergences.
            np.column_stack([runs[0].nlls, *(run.nlls - runs[0].nlls for run in runs[1:]), *klds]),
            runs[0].window_sizes,
            first_known(runs, "window_documents"),
            [group.members for group in groups],
            num_resamples=num_resamples,
            seed=seed,
        )
        sample = _Sample(values, text_resamples)
        answer_runs = [run.answers or run for run in runs]
        counts = answer_counts(answer_runs, num_resamples, seed)
        figures = [
            sample.run_figures(
                run, runs[0], agreement_figures(own, counts) | floor_figures(own, answer_runs), _noise_floor(run, runs)
            )
            for run, own in zip(runs, answer_runs, strict=True)
        ]
        group_figures: list[tuple[TokenGroup, RunFigures]] = []
        for group, resamples in zip(groups, group_resamples, strict=True):
            part = _Sample({name: series[group.members] for name, series in values.items()}, resamples)
            for run in runs:
                agreement = agreement_figures(run, counts, group.members)
                group_figures.append((group, part.run_figures(run, runs[0], agreement, is_group=True)))
        return RunComparison(
            runs=figures,
            pairs=[sample.pair_figures(first, second) for first, second in combinations(figures, 2)],
            num_resamples=num_resamples,
            seed=seed,
            blocks=text_resamples.blocks,
            has_intervals=math.isfinite(text_resamples.factor),
            groups=group_figures,
            warnings=warnings,
            chosen_base=base,
            size=size,
            max_kld=max_kld,
            max_ppl_increase=max_ppl_increase,
        )


def _with_base_first(runs: Sequence[RunFile], label: str | None = None) -> tuple[list[RunFile], list[str]]:
    """Put the base first: the run with `label`, else the first run of a reference's own model, else the reference if
    all runs have the same reference, else the first run.

    If all runs have the same reference, and no run is of its model, the reference is added as a run.

    Returns:
        The runs in the order in which they are compared, and warnings.

    Raises:
        RunError: there is a label that no run has.
    """
    candidates, warnings = [*runs], list[str]()
    references = [run.reference for run in runs if run.reference is not None]
    own = [run for run in runs if any(reference.is_of(run.server) for reference in references)]
    # A run of the original in another lane is the base only if there is none in prefill.
    own = [run for run in own if run.lane == "prefill"] or own
    identities = {run.reference_identity for run in runs}
    if not own and len(identities) == 1 and references:
        candidates.insert(0, _run_of_reference(runs))
    base = (own or candidates)[0]
    if base.is_of_original and len(candidates) == 1:
        assert base.kld is not None
        nats = plain(float(base.kld.mean())).text
        warnings.append(f"{base.label} is the base, as the reference's own model; {nats} nats from the reference.")
    if label is not None:
        labels = [run.label for run in candidates]
        if label not in labels:
            raise RunError(f"--base: no run is called {label!r}; there are: {', '.join(labels)}")
        base = candidates[labels.index(label)]
    elif len(own) > 1:
        names = " and ".join(run.label for run in own)
        warnings.append(f"{names} are all of the reference's model: {base.label} is the base; --base chooses another.")
    return [base, *(run for run in candidates if run is not base)], warnings


def _run_of_reference(runs: Sequence[RunFile]) -> RunFile:
    """Make a run that stands for the reference that all runs were compared with. Its KL divergences are 0."""
    run = runs[0]
    reference = run.reference
    assert reference is not None
    assert run.reference_nlls is not None
    label = reference.model
    while label in {other.label for other in runs}:
        label += " (reference)"
    server_fields = {name: getattr(reference, name) for name in _SERVER_FIELDS}
    return replace(
        run,
        path=run.path.with_name(f"reference {reference.name}"),
        label=label,
        model=reference.model,
        server=run.server.model_copy(update=server_fields),
        finished=datetime.fromtimestamp(reference.created, UTC).isoformat(timespec="seconds"),
        lane="prefill",
        as_noise_floor=True,
        nlls=run.reference_nlls,
        ranks=None,
        kld=np.zeros(run.num_scored),
        top_token_ids=run.reference_top_token_ids,
        top_tokens=None,
        routes=None,
        forced_kld=None,
        is_reference=True,
        answers=None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Values of all runs over the targets of a text or a group, and their means in each resample."""

    values: Mapping[tuple[str, str], Floats]
    """Series of values [targets], by a run's label and the series' name."""
    resamples: Resamples

    def _resampled(self, run: RunFile, name: str) -> Floats:
        return self.resamples.means[:, list(self.values).index((run.label, name))]

    def run_figures(
        self,
        run: RunFile,
        base: RunFile,
        agreement: AgreementFigures,
        noise_floor: float | None = None,
        is_group: bool = False,
    ) -> RunFigures:
        nll, kld = self._mean(run, "nll"), self._clipped_mean(run, "kld")
        square = self._clipped_mean(run, "delta_p_square")
        names = {"kld_median": 0.5, "kld_p95": 0.95, "kld_p99": 0.99, "kld_p999": 0.999, "kld_max": 1}
        ordered = np.sort(self.values.get((run.label, "kld"), np.empty(0)))
        quantiles = {name: quantile(ordered, fraction) if kld else None for name, fraction in names.items()}
        return RunFigures(
            run=run,
            nll=nll,
            perplexity=_exponential(nll),
            bits_per_byte=None if is_group else _bits_per_byte(run, nll),
            kld=kld,
            same_top_p=self._share(run, "same_top"),
            same_experts=self._share(run, "same_experts"),
            forced_kld=self._clipped_mean(run, "forced_kld"),
            rerouting=self._mean(run, "rerouting") if (run.label, "rerouting") in self.values else None,
            delta_p_rms=square and square.mapped(math.sqrt, 0.5 / math.sqrt(square.value) if square.value else None),
            kld_over_noise_floor=over_noise_floor(None if kld is None else kld.value, noise_floor),
            ppl_ratio=None if run is base else _exponential(self._difference(base, run, "nll")),
            **{**agreement, **quantiles},
        )

    def pair_figures(self, first_figures: RunFigures, second_figures: RunFigures) -> PairFigures:
        first, second = first_figures.run, second_figures.run
        ln_ratio = self._difference(first, second, "nll")
        ppl_first, ppl_second = first_figures.perplexity.value, second_figures.perplexity.value
        resampled = np.exp(self._resampled(second, "nll")) - np.exp(self._resampled(first, "nll"))
        stderr = standard_error(ppl_second * second.nlls - ppl_first * first.nlls)
        kld_difference, kld_verdict = None, None
        if first.kld is not None and second.kld is not None and first.reference_identity == second.reference_identity:
            kld_difference = self._difference(first, second, "kld")
            kld_verdict = self._verdict(kld_difference)
            multiples = (first_figures.kld_over_noise_floor, second_figures.kld_over_noise_floor)
            if all(multiple is not None and multiple <= 1 for multiple in multiples):
                kld_verdict = "no difference shown"
        return PairFigures(
            first=first,
            second=second,
            ln_ppl_ratio=ln_ratio,
            ppl_ratio=_exponential(ln_ratio),
            ppl_difference=self._figure(ppl_second - ppl_first, stderr, resampled),
            kld_difference=kld_difference,
            verdict=self._verdict(ln_ratio, LEAST_LN_RATIO),
            kld_verdict=kld_verdict,
        )

    def _difference(self, first: RunFile, second: RunFile, name: str) -> Figure:
        values = self.values[second.label, name] - self.values[first.label, name]
        resampled = self._resampled(second, name) - self._resampled(first, name)
        return self._figure(float(values.mean()), standard_error(values), resampled)

    def _mean(self, run: RunFile, name: str) -> Figure:
        values = self.values[run.label, name]
        return self._figure(float(values.mean()), standard_error(values), self._resampled(run, name))

    def _clipped_mean(self, run: RunFile, name: str) -> Figure | None:
        """The mean, with an interval cut off at 0; None for a run without these values."""
        if (run.label, name) not in self.values:
            return None
        mean = self._mean(run, name)
        return mean if mean.low is None else replace(mean, low=max(mean.low, 0.0))

    def _share(self, run: RunFile, name: str) -> Figure | None:
        """The share of targets that agree with the reference; None for a run without these values."""
        mean = self._clipped_mean(run, name)
        # The reference agrees with itself by definition, so its share has no error.
        if mean is None or run.is_reference:
            return mean
        resampled = self._resampled(run, name)
        ends = self.resamples.share_interval(mean.value, resampled, len(self.values[run.label, name]))
        return Figure(mean.value, mean.stderr, *ends)

    def _figure(self, value: float, stderr: float, resampled: Floats) -> Figure:
        finite = stderr if math.isfinite(stderr) else None
        return Figure(value, finite, *self.resamples.interval(value, resampled))

    def _verdict(self, difference: Figure, least: float = 0.0) -> Verdict:
        """The verdict: no difference is shown if the interval contains 0, or has both ends closer to 0 than `least`."""
        low, high = difference.low, difference.high
        if low is None or high is None:
            if not math.isfinite(self.resamples.factor) or not math.isfinite(difference.value):
                return "no interval"
            # All resamples are equal, so the value decides.
            low = high = difference.value
        if low <= 0 <= high or max(-low, high) < least:
            return "no difference shown"
        return "better" if high < 0 else "worse"


def _series(run: RunFile) -> dict[str, Floats]:
    """The run's series for `_Sample`, by name: each has the values of all targets, [n]."""
    square = None if run.delta_p is None else run.delta_p**2
    series = {"nll": run.nlls, "kld": run.kld, "same_top": run.same_top, "delta_p_square": square}
    series |= {"same_experts": run.same_experts, "forced_kld": run.forced_kld, "rerouting": run.rerouting}
    return {name: np.asarray(values, np.float64) for name, values in series.items() if values is not None}


def _noise_floor(run: RunFile, runs: Sequence[RunFile]) -> float | None:
    """The largest noise floor (the divergence of the reference's model from itself) in all runs with the reference and
    lane of `run`: a run from before the floor was measured does not have it."""
    alike = [other for other in runs if (other.reference_identity, other.lane) == (run.reference_identity, run.lane)]
    return max((other.noise_floor for other in alike if other.noise_floor is not None), default=None)


def _exponential(figure: Figure) -> Figure:
    return figure.mapped(exp, exp(figure.value))


def _bits_per_byte(run: RunFile, nll: Figure) -> Figure | None:
    if not run.num_bytes:
        return None
    num_tokens = run.num_scored if run.method in EXHAUSTIVE_METHODS else run.num_tokens
    factor = bits_per_byte(num_tokens, run.num_bytes)
    return nll.mapped(lambda value: factor * value, factor)


def check_labels(labels: Sequence[str]) -> None:
    """Raise RunError for labels that occur twice."""
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise RunError(f"{labels.count(repeated[0])} runs are called {repeated[0]!r}: give each its own label")


def check_comparable(runs: Sequence[RunFile]) -> None:
    """Raise RunError if there are no runs, two have the same label, or one differs from the first in text, tokens or
    windows."""
    if not runs:
        raise RunError("give at least one run to compare")
    check_labels([run.label for run in runs])
    for run in runs[1:]:
        if difference := _run_difference(runs[0], run):
            raise RunError(f"{runs[0].path} and {run.path} cannot be compared: {difference}")


def _run_difference(first: RunFile, second: RunFile) -> str | None:
    """Describe the first difference between two runs; None if they can be compared."""
    # Runs of the kinds `kld` and `perplexity` hash their text differently, so their hashes cannot be compared.
    if first.kind == second.kind and first.text_identity != second.text_identity:
        return f"the text is {first.text_in_words} in the first and {second.text_in_words} in the second"
    settings = {
        "method": "method",
        "context_length": "context length",
        "stride": "stride",
        "num_windows": "number of windows",
        "num_scored": "number of scored tokens",
    }
    for name, words in settings.items():
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            return f"the {words} is {one} in the first and {other} in the second"
    if not np.array_equal(first.window_sizes, second.window_sizes):
        return "their windows have different numbers of tokens"
    return _token_difference(first, second)


def _token_difference(first: RunFile, second: RunFile) -> str | None:
    differing = np.flatnonzero(first.token_ids != second.token_ids)
    if not len(differing):
        return None
    at = int(differing[0])
    window = int(np.searchsorted(np.cumsum(first.window_sizes), at, side="right"))
    return (
        f"{len(differing):,} of {first.num_scored:,} token ids differ, the first in window {window}: "
        f"{first.token_ids[at]} and {second.token_ids[at]}; the runs used different texts or tokenizers"
    )
