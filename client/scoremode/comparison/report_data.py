"""Makes the data from which a report's page draws the text: tokens of the passages that fit into the file, and means of
all passages.

A passage is a window, or a part of a long window that a page can draw at once. Arrays are in base64, with 16 bits per
value if 16 are exact enough for the page, else with 32.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.comparison.groups import domains, first_known, name_of_domains
from scoremode.comparison.run_file import RunFile
from scoremode.kld import Floats
from scoremode.results import NUM_TOP, TopTokens
from scoremode.windows import EXHAUSTIVE_METHODS, TOKEN_CLASSES

MAX_TOKENS = 1024
"""Limit on the tokens of a passage."""
NUM_LISTED = 50
"""How many of each run's most divergent tokens have priority: their passages are kept before all others."""
_BYTES_OF_TOPS = (4 + 2 * NUM_TOP * 6) * 4 // 3 + 1
"""Limit on the bytes of a position's top tokens in one run."""
MAX_PROMPT = 4000
"""How many of a prompt's last characters are shown."""
_KLD_SCALE = 512
"""Factor that brings KL divergences from 1e-7 to 127 nats into the range in which float16 has 11 significant bits."""
_INFINITE = 65_535
"""Stands for infinity in fixed-point values."""

Packed = dict[str, str | float | None]
"""An array: little-endian values in base64, and their type and scale. It stands for values times scale, if there is a
scale. In `uint16` with a scale, 65,535 is infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class Passages:
    """Windows, and the parts of long windows: arrays of shape [passages]."""

    window: NDArray[np.int64]
    """The index of the passage's window."""
    first: NDArray[np.int64]
    """The index of the passage's first token among the window's targets."""
    start: NDArray[np.int64]
    """The index of the passage's first token in the run's arrays."""
    size: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.size)

    def means(self, values: Floats) -> Floats:
        """Mean of each passage, [passages], given the values of all tokens."""
        return np.add.reduceat(values, self.start) / self.size


def cut_passages(window_sizes: NDArray[np.int32]) -> Passages:
    """Cut windows into passages. A window without targets has none."""
    pieces = -(-window_sizes.astype(np.int64) // MAX_TOKENS)
    window = np.repeat(np.arange(len(pieces)), pieces)
    number = np.arange(len(window)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = number * MAX_TOKENS
    size = np.minimum(window_sizes[window] - first, MAX_TOKENS)
    return Passages(window, first, np.cumsum(size) - size, size)


def text_data(runs: Sequence[RunFile], max_bytes: float) -> dict[str, Any]:
    """Make the data of the report's text view. `script_json` turns it into at most `max_bytes`.

    `series` has one entry per run, then one per reference that is not a run. An entry has the mean of each passage, and
    in order the value of each token in the kept passages. `tokens`, `tops` and `shown_tops` have indices in
    `vocabulary`.
    """
    passages = cut_passages(runs[0].window_sizes)
    # Top tokens take at most 6 % of all bytes.
    tops = _shown_tops(runs, int(0.06 * max_bytes / (_BYTES_OF_TOPS * len(runs))))
    arrays = [array for run in runs for array in (run.token_ids, run.top_token_ids, run.reference_top_token_ids)]
    ids = [*(array for array in arrays if array is not None), *(top.token_ids[..., :NUM_TOP] for top in tops.values())]
    vocabulary = np.unique(np.concatenate([np.unique(array) for array in ids]))
    # A passage's bytes are proportional to its tokens, apart from top tokens and prompts.
    nothing = np.zeros(len(passages), bool)
    without_tops = {index: top.at(np.empty(0, np.intp)) for index, top in tops.items()}
    fixed = len(script_json(_data(runs, passages, nothing, without_tops, vocabulary)))
    whole = len(script_json(_data(runs, passages, ~nothing, without_tops, vocabulary)))
    num_tops = sum(len(top.positions) for top in tops.values())
    costs: Floats = passages.size * np.float64((whole - fixed) / runs[0].num_scored)
    prompts = _prompts(runs, passages)
    costs[[*prompts]] += [len(script_json({str(index): text})) for index, text in prompts.items()]
    kept = kept_passages(passages, runs, costs, max_bytes - fixed - _BYTES_OF_TOPS * num_tops)
    return _data(runs, passages, kept, tops, vocabulary) | {
        "prompts": {index: text for index, text in prompts.items() if kept[index]}
    }


def _data(
    runs: Sequence[RunFile],
    passages: Passages,
    kept: NDArray[np.bool_],
    tops: Mapping[int, TopTokens],
    vocabulary: NDArray[np.int32],
) -> dict[str, Any]:
    positions, classes = np.repeat(kept, passages.size), first_known(runs, "classes")
    domain_names, window_domains = domains(runs) or ((), None)
    texts = {token: text for run in runs for token, text in run.token_texts.items()}
    parts = {token: content for run in runs for token, content in run.token_bytes.items()}
    series = _series(runs, passages, positions, vocabulary)
    for index, top in tops.items():
        series[index] |= _packed_tops(top, positions, vocabulary)
    return {
        "passages": {
            "window": pack_integers(passages.window),
            "first": pack_integers(passages.first),
            "size": pack_integers(passages.size),
            "kept": pack_integers(kept),
            "domain": None if window_domains is None else pack_integers(window_domains[passages.window]),
        },
        "classes": None if classes is None else pack_integers(classes[positions]),
        "class_names": TOKEN_CLASSES,
        "domain_names": [*domain_names],
        "domains": name_of_domains(runs),
        "has_gaps": runs[0].method not in EXHAUSTIVE_METHODS,
        "num_kept": int(positions.sum()),
        "tokens": pack_integers(np.searchsorted(vocabulary, runs[0].token_ids[positions])),
        "vocabulary": {
            "ids": pack_integers(vocabulary),
            "texts": [texts.get(token) for token in vocabulary.tolist()],
            # Bytes of tokens that end within a character, by the tokens' indices in the vocabulary.
            "bytes": {place: parts[token] for place, token in enumerate(vocabulary.tolist()) if token in parts},
        },
        "series": series,
    }


def _prompts(runs: Sequence[RunFile], passages: Passages) -> dict[int, str]:
    """The end of each window's prompt, by the index of the window's first passage."""
    prompts = next((run.prompts for run in runs if run.prompts), None)
    if prompts is None:
        return {}
    begins = np.flatnonzero(passages.first == 0).tolist()
    return {index: prompts[passages.window[index]][-MAX_PROMPT:] for index in begins}


def script_json(data: dict[str, Any]) -> str:
    """Make JSON for a `script` element: no tag can begin or end in it, because it has no `<`."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _series(
    runs: Sequence[RunFile], passages: Passages, positions: NDArray[np.bool_], vocabulary: NDArray[np.int32]
) -> list[dict[str, Any]]:
    nlls = [array for run in runs for array in (run.nlls, run.reference_nlls) if array is not None]
    # The largest finite NLL is the scale of all series, so that equal values stay equal.
    largest_nll = max(float(array.max(where=np.isfinite(array), initial=0)) for array in nlls)
    shown = _with_references(runs)
    references = [run.reference_identity for run in shown]
    return [
        {
            "label": run.label,
            "is_reference": run.reference_confidence is not None,
            # Runs that were compared with the same reference have the same number.
            "reference": references.index(run.reference_identity),
            "nll": pack_fixed(run.nlls[positions], largest_nll),
            "kld": None if run.kld is None else pack_klds(run.kld[positions]),
            "ranks": None if run.ranks is None else pack_integers(run.ranks[positions]),
            "tops": None
            if (tops := run.top_token_ids) is None
            else pack_integers(np.searchsorted(vocabulary, tops[positions])),
            "confidence": None if (shares := run.reference_confidence) is None else pack_fixed(shares[positions], 1),
            "mean_nll": _packed(passages.means(run.nlls), "float32", None),
            "mean_kld": None if run.kld is None else _packed(passages.means(run.kld), "float32", None),
        }
        for run in shown
    ]


def _with_references(runs: Sequence[RunFile]) -> list[RunFile]:
    """The runs, and each of their references once. A run of a reference's own model in prefill becomes the reference,
    without KL divergences if all are 0; if there is no such run, the reference is added. Only references have
    `reference_confidence`, and the reference's top tokens as `top_token_ids`."""
    shown = [run if run.is_reference else replace(run, reference_confidence=None) for run in runs]
    for run in {run.reference_identity: run for run in reversed(runs)}.values():
        reference = run.reference
        if reference is None or run.reference_nlls is None:
            continue
        values: dict[str, Any] = {
            "reference": reference,
            "reference_confidence": run.reference_confidence,
            "top_token_ids": run.reference_top_token_ids,
        }
        own = [place for place, other in enumerate(runs) if other.lane == "prefill" and _is_of(other, run)]
        if own:
            kld = runs[own[0]].kld
            shown[own[0]] = replace(shown[own[0]], **values, kld=kld if kld is not None and kld.any() else None)
            continue
        label = reference.model
        while label in {other.label for other in shown}:
            label += " (reference)"
        shown.append(replace(run, **values, label=label, nlls=run.reference_nlls, kld=None, ranks=None))
    return shown


def _is_of(run: RunFile, compared: RunFile) -> bool:
    """Whether a run is of the reference model of `compared`, and was not compared with a different reference."""
    assert compared.reference is not None
    is_alike = run.reference_identity in (None, compared.reference_identity)
    return is_alike and (run.is_reference or compared.reference.is_of(run.server))


def _shown_tops(runs: Sequence[RunFile], num_shown: int) -> dict[int, TopTokens]:
    """The top tokens of runs, by the runs' indices, at the `num_shown` positions with the largest sum of all runs' KL
    divergences. Each run's divergences are divided by their mean."""
    klds = [np.minimum(run.kld, np.finfo(np.float32).max) for run in runs if run.kld is not None]
    score = sum((kld / (kld.mean() or 1) for kld in klds), start=np.zeros(runs[0].num_scored))
    shown = np.argsort(-score, kind="stable")[:num_shown]
    return {index: run.top_tokens.at(shown) for index, run in enumerate(runs) if run.top_tokens is not None}


def _packed_tops(tops: TopTokens, kept: NDArray[np.bool_], vocabulary: NDArray[np.int32]) -> dict[str, Packed]:
    here = tops.at(np.flatnonzero(kept))
    nlls = np.maximum(-here.logprobs[..., :NUM_TOP].astype(np.float64), 0).ravel()
    return {
        "shown_at": pack_integers((np.cumsum(kept) - 1)[here.positions]),
        "shown_tops": pack_integers(np.searchsorted(vocabulary, here.token_ids[..., :NUM_TOP].ravel())),
        "shown_nlls": pack_fixed(nlls, nlls.max(where=np.isfinite(nlls), initial=0)),
    }


def kept_passages(passages: Passages, runs: Sequence[RunFile], costs: Floats, max_cost: float) -> NDArray[np.bool_]:
    """[passages], whether to keep each passage. The `costs` [passages] of kept passages add up to at most `max_cost`.

    Passages with one of a run's most divergent tokens come first, then those with the largest mean divergence. Each
    run's divergence is divided by its mean over all tokens, so that no run alone decides.
    """
    compared = [run for run in runs if run.kld is not None and run.kld.any()] or runs[1:] or runs
    listed = np.zeros(len(passages), bool)
    score = np.zeros(len(passages))
    for run in compared:
        # Use the KL divergence; without one, the difference in NLL from the first run, and for the first run its NLL.
        values = run.nlls if run.kld is None else run.kld
        if run.kld is None and run is not runs[0]:
            # Infinity minus infinity counts as 0.
            with np.errstate(invalid="ignore"):
                values = np.where(values == runs[0].nlls, 0, np.abs(values - runs[0].nlls))
        values = np.minimum(values, np.finfo(np.float32).max)
        top = np.argpartition(values, -min(NUM_LISTED, len(values)))[-NUM_LISTED:]
        listed[np.searchsorted(passages.start, top, side="right") - 1] = True
        score += passages.means(values) / (values.mean() or 1)
    order = np.lexsort((-score, ~listed))
    kept = np.zeros(len(passages), bool)
    kept[order[np.cumsum(costs[order]) <= max_cost]] = True
    return kept


def pack_integers(values: NDArray[Any]) -> Packed:
    """Pack nonnegative integers exactly, in 16 bits if all values fit, else in 32."""
    dtype = "uint16" if len(values) == 0 or values.max() < 2**16 else "int32"
    return _packed(values, dtype, None)


def pack_fixed(values: Floats, largest: float) -> Packed:
    """Pack NLLs or probabilities in steps of `largest` / 65,534, the same for series whose differences are shown."""
    finite = np.isfinite(values)
    scale = largest / (_INFINITE - 1) or 1.0
    return _packed(np.where(finite, np.rint(np.where(finite, values, 0) / scale), _INFINITE), "uint16", scale)


def pack_klds(values: Floats) -> Packed:
    """Pack KL divergences with 11 significant bits each, because their sizes differ by many powers of ten."""
    scaled = np.where(np.isfinite(values), np.minimum(values * _KLD_SCALE, np.finfo(np.float16).max), np.inf)
    return _packed(scaled, "float16", 1 / _KLD_SCALE)


def _packed(values: NDArray[Any], dtype: str, scale: float | None) -> Packed:
    content = np.ascontiguousarray(values.astype(np.dtype(dtype).newbyteorder("<"))).tobytes()
    return {"type": dtype, "scale": scale, "data": base64.b64encode(content).decode("ascii")}
