"""Divides tokens into groups for tables: by class in conversations, by domain (the rows' labels in the column of
`--by`), and by position in the context."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.comparison.run_file import RunFile
from scoremode.windows import DEFAULT_CONTEXT_LENGTH, TOKEN_CLASSES

MOST_DOMAINS = 20
"""Limit on the domains in a table; the smallest ones are joined into one group."""
_CONTEXT_EDGES = (0, 256, 1024, 4096, 16_384)


@dataclass(frozen=True, slots=True, eq=False)
class TokenGroup:
    """Some of a text's targets, which are its scored tokens."""

    by: str
    """The division that the group is part of: `class`, the column of `--by`, or `tokens before`."""
    name: str
    members: NDArray[np.bool_]
    """[n], whether a target belongs to the group."""

    @property
    def num_scored(self) -> int:
        """The number of targets."""
        return int(self.members.sum())


def first_known(runs: Sequence[RunFile], name: str) -> Any:
    """The array `name` of the first run that has it, because all runs have the same tokens; None if no run has it."""
    return next((array for run in runs if (array := getattr(run, name)) is not None), None)


def domains(runs: Sequence[RunFile]) -> tuple[Sequence[str], NDArray[np.int32]] | None:
    """The names of domains, and the index of each window's domain [windows], from the first run that has them."""
    return next(((run.labels, run.window_labels) for run in runs if run.window_labels is not None), None)


def name_of_domains(runs: Sequence[RunFile]) -> str:
    """The name of the column that has the domains; `domain` if no run has this name."""
    return next((run.corpus.by for run in runs if run.corpus is not None and run.corpus.by), "domain")


def groups_of(runs: Sequence[RunFile]) -> Iterator[TokenGroup]:
    """Yield groups by class, domain and context. A division with a single group is left out. So is the division by
    context if no target has `DEFAULT_CONTEXT_LENGTH` tokens before it."""
    sizes, classes = runs[0].window_sizes, first_known(runs, "classes")
    if classes is not None:
        yield from _several("class", dict(enumerate(TOKEN_CLASSES)), classes)
    if (window_domains := domains(runs)) is not None:
        names, domain_indices = window_domains
        indices = np.repeat(domain_indices, sizes)
        counts = np.bincount(indices, minlength=len(names))
        rare = np.argsort(-counts, kind="stable")[MOST_DOMAINS:]
        others = f"{(counts[rare] > 0).sum()} others"
        indices = np.where(np.isin(indices, rare), -1, indices)
        yield from _several(name_of_domains(runs), {**dict(enumerate(names)), -1: others}, indices)
    before = tokens_before(runs)
    if before is not None and before.max() >= DEFAULT_CONTEXT_LENGTH:
        ranges = [f"{low:,} to {high - 1:,}" for low, high in pairwise(_CONTEXT_EDGES)]
        ranges.append(f"{_CONTEXT_EDGES[-1]:,} and more")
        yield from _several("tokens before", dict(enumerate(ranges, 1)), np.digitize(before, _CONTEXT_EDGES))


def tokens_before(runs: Sequence[RunFile]) -> NDArray[np.int64] | None:
    """[n], how many tokens of its window come before each target; None if no run has the windows' contexts."""
    sizes, contexts = runs[0].window_sizes, first_known(runs, "window_contexts")
    if contexts is None:
        return None
    starts = np.cumsum(sizes) - sizes
    before: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(contexts - starts, sizes)
    return before


def _several(by: str, names: Mapping[int, str], indices: NDArray[Any]) -> list[TokenGroup]:
    present = set(np.unique(indices).tolist())
    groups = [TokenGroup(by, name, indices == index) for index, name in names.items() if index in present]
    return groups if len(groups) > 1 else []
