"""Limits on what a comparison may show, for pipelines that stop at a worse model."""

from typing import Literal

from scoremode.comparison.figures import RunComparison
from scoremode.comparison.summary import verdict_line
from scoremode.errors import RunError

FailIf = Literal["worse", "differs"]


def exceeded(
    comparison: RunComparison,
    fail_if: FailIf | None = None,
    max_kld: float | None = None,
    max_ppl_increase: float | None = None,
) -> list[str]:
    """One line per run that exceeds a limit: which, and the run's verdict.

    Args:
        fail_if: By perplexity, a run is worse than the base, or is shown to differ from it.
        max_kld: Nats, in the mean.
        max_ppl_increase: Of the base's perplexity, as a percentage.

    Raises:
        RunError: a limit cannot be checked: there is no base, interval or divergence.
    """
    if not comparison.pairs:
        raise RunError(f"{comparison.base.label} has no base, so no limit can be checked: give one, or a run of kld")
    if fail_if is not None and not comparison.has_intervals:
        raise RunError(f"--fail-if cannot be checked: {comparison.blocks}")
    failing = {"worse": ("worse",), "differs": ("worse", "better")}.get(fail_if or "", ())
    lines: list[str] = []
    for figures in comparison.runs[1:]:
        label, kld, change, reasons = figures.run.label, figures.kld, figures.ppl_change, list[str]()
        if comparison.base_pairs[label].verdict in failing:
            reasons.append(f"--fail-if {fail_if}")
        if max_kld is not None:
            if kld is None:
                raise RunError(f"--max-kld: {label} has no KL divergence, which only `ppl-client kld` measures")
            if not kld.value <= max_kld:
                reasons.append(f"--max-kld {max_kld:g}")
        if max_ppl_increase is not None and change is not None and not 100 * change.value <= max_ppl_increase:
            reasons.append(f"--max-ppl-increase {max_ppl_increase:g}")
        if reasons:
            lines.append(f"{' and '.join(reasons)}: {verdict_line(comparison, figures)}")
    return lines
