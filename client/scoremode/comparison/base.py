"""The run that others are compared with: one of the original model, or the reference itself."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np

from scoremode.comparison.run_file import RunFile
from scoremode.errors import RunError
from scoremode.wire.protocol import ServerInfo
from scoremode.wire.references import Reference

_OF_THE_MODEL = (ServerInfo.model_fields.keys() & Reference.model_fields.keys()) - {"object"}
"""Fields of a reference that describe the server that recorded it."""


def with_base_first(runs: Sequence[RunFile], label: str | None = None) -> tuple[list[RunFile], list[str]]:
    """Put the base first: the run of that label, or else the first run of a reference's own model, or the reference if
    all runs have the same one, or the first run.

    The reference is a run too if all runs have the same one, and none is of its model.

    Returns:
        The runs in the order in which they are compared, and warnings.

    Raises:
        RunError: no run has that label.
    """
    candidates, warnings = [*runs], list[str]()
    references = [run.reference for run in runs if run.reference is not None]
    own = [run for run in runs if any(reference.is_of(run.server) for reference in references)]
    # In another lane the original is a run like any other.
    own = [run for run in own if run.lane == "prefill"] or own
    identities = {run.reference_identity for run in runs}
    if not own and len(identities) == 1 and references:
        candidates.insert(0, run_of_reference(runs))
    base = (own or candidates)[0]
    if label is not None:
        labels = [run.label for run in candidates]
        if label not in labels:
            raise RunError(f"--base: no run is called {label!r}; there are: {', '.join(labels)}")
        base = candidates[labels.index(label)]
    elif len(own) > 1:
        names = " and ".join(run.label for run in own)
        warnings.append(f"{names} are all of the reference's model: {base.label} is the base, or that of --base.")
    return [base, *(run for run in candidates if run is not base)], warnings


def run_of_reference(runs: Sequence[RunFile]) -> RunFile:
    """The reference that all runs were compared with, as a run: it does not diverge from itself."""
    run = runs[0]
    reference = run.reference
    assert reference is not None
    assert run.reference_nlls is not None
    label = reference.model
    if label in {each.label for each in runs}:
        label = f"{label} (reference {reference.name})"
    described = {name: getattr(reference, name) for name in _OF_THE_MODEL}
    return replace(
        run,
        path=run.path.with_name(f"reference {reference.name}"),
        label=label,
        model=reference.model,
        server=run.server.model_copy(update=described),
        finished=datetime.fromtimestamp(reference.created, UTC).isoformat(timespec="seconds"),
        lane="prefill",
        as_noise_floor=True,
        nlls=run.reference_nlls,
        ranks=None,
        kld=np.zeros(run.num_scored),
        top_token_ids=run.reference_top_token_ids,
        top_tokens=None,
        tokens_per_second=None,
        is_reference=True,
    )
