"""What a comparison comes to, in a few sentences."""

from collections.abc import Sequence

from scoremode.comparison.computed_by import computed_differently
from scoremode.comparison.figures import Comparison, RunFigures, Verdict

_OPPOSITE: dict[Verdict, Verdict] = {
    "better": "worse",
    "worse": "better",
    "no difference shown": "no difference shown",
}


def summary(comparison: Comparison) -> list[str]:
    """Sentences: what is better than what, where no difference is shown, what is below the noise floor, and which GPUs
    and kernels differ."""
    labels = [figures.run.label for figures in comparison.runs]
    by_nll = {(pair.first.label, pair.second.label): pair.verdict for pair in comparison.pairs}
    by_kld = {
        (pair.first.label, pair.second.label): pair.kld_verdict
        for pair in comparison.pairs
        if pair.kld_verdict is not None
    }
    sentences = [*_order("perplexity", labels, by_nll), *_beside_base(comparison)]
    if by_kld:
        compared = [figures.run.label for figures in comparison.runs if figures.kld is not None]
        sentences += _order("mean KL divergence", compared, by_kld)
    sentences += _noise_floor(comparison.runs)
    sentences += computed_differently([figures.run for figures in comparison.runs])
    differences = [figure for pair in comparison.pairs for figure in (pair.ln_ppl_ratio, pair.kld_difference)]
    if any(figure is not None and figure.low is None for figure in differences):
        sentences.append(
            "Where there is no interval, for the text is short or a value infinite, no difference can be shown."
        )
    return sentences


def _order(what: str, labels: Sequence[str], verdicts: dict[tuple[str, str], Verdict]) -> list[str]:
    """Which runs are shown to be better than which, and each pair of which nothing is shown."""
    both_ways = {**verdicts, **{(second, first): _OPPOSITE[verdict] for (first, second), verdict in verdicts.items()}}
    undecided = [" and ".join(pair) for pair, verdict in verdicts.items() if verdict == "no difference shown"]
    if verdicts and len(undecided) == len(verdicts):
        return [f"By {what}, no difference is shown between any two runs."]
    beaten = {label: [other for other in labels if both_ways.get((label, other)) == "worse"] for label in labels}
    sentences = []
    for worse in {tuple(each): each for each in beaten.values() if each}.values():
        better = [label for label in labels if beaten[label] == worse]
        sentences.append(f"By {what}, {_listed(better)} {_are(better)} better than {_listed(worse)}.")
    if undecided:
        sentences.append(f"By {what}, no difference is shown between {', nor between '.join(undecided)}.")
    return sentences


def _beside_base(comparison: Comparison) -> list[str]:
    """By how much, for the runs that are shown to differ from the first."""
    parts = [
        f"{pair.second.label} {pair.ppl_ratio.value:.4f} times [{pair.ppl_ratio.low:.4f}, {pair.ppl_ratio.high:.4f}]"
        for pair in comparison.pairs_with_base
        if pair.verdict != "no difference shown"
    ]
    return [f"Perplexity over that of {comparison.base.label}: {_listed(parts)}."] if parts else []


def _noise_floor(runs: Sequence[RunFigures]) -> list[str]:
    """Nothing of the reference's own run, which the floor is made of."""
    multiples = [
        (figures.run.label, figures.kld_over_noise_floor)
        for figures in runs
        if figures.kld_over_noise_floor is not None and not figures.run.as_noise_floor
    ]
    below = [label for label, multiple in multiples if multiple <= 1]
    above = [f"that of {label} {multiple:,.1f} times" for label, multiple in multiples if multiple > 1]
    sentences = []
    if below:
        sentences.append(
            f"{_listed(below)} {_are(below)} at or below the noise floor: "
            "the reference's own model diverges as much from itself in other batches."
        )
    if above:
        sentences.append(f"Beside the noise floor, the mean KL divergence is more: {_listed(above)} it.")
    return sentences


def _are(items: Sequence[str]) -> str:
    return "is" if len(items) == 1 else "are"


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
