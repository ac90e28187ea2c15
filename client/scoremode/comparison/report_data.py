"""What a report's page draws its text from: the tokens of the passages that fit, and means of all."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.comparison.packing import Packed, pack_fixed, pack_floats, pack_integers, pack_klds, packed_bytes
from scoremode.comparison.passages import Passages, cut_passages, kept_passages
from scoremode.comparison.run_file import RunFile
from scoremode.results import NUM_TOP, TopTokens
from scoremode.windows import EXHAUSTIVE_METHODS

Series = dict[str, Any]
_SHARE_OF_TOPS = 0.06
"""Of all bytes, at most."""
_BYTES_OF_TOPS = (4 + 2 * NUM_TOP * 6) * 4 // 3 + 1
"""Of a position of a run, at most."""


def text_data(runs: Sequence[RunFile], max_bytes: float) -> dict[str, Any]:
    """Everything that the text view shows, in JSON of at most `max_bytes`.

    `series` are the runs in order and then their references, each with a mean of every passage and a value of every
    token of the kept passages, in order. `tokens`, `tops` and the like are places in `vocabulary`.
    """
    passages = cut_passages(runs[0].window_sizes)
    texts = _token_texts(runs)
    tops = _shown_tops(runs, int(_SHARE_OF_TOPS * max_bytes / (_BYTES_OF_TOPS * len(runs))))
    vocabulary = _vocabulary(runs, tops.values())
    everything = _series(runs, passages, np.ones(len(passages), bool), vocabulary)
    fixed = sum(
        len(json.dumps(part)) for part in ([texts.get(int(token)) for token in vocabulary], vocabulary.tolist())
    )
    fixed += 16 * len(passages) * (len(everything) + 4)
    fixed += _BYTES_OF_TOPS * sum(len(top.positions) for top in tops.values())
    a_token = sum(
        packed_bytes(value) for one in everything for name, value in one.items() if name in _PER_TOKEN and value
    )
    a_token += packed_bytes(pack_integers(np.array([len(vocabulary)])))
    if fixed + a_token * runs[0].num_scored <= max_bytes:
        kept, series = np.ones(len(passages), bool), everything
    else:
        kept = kept_passages(passages, runs, max(0, (max_bytes - fixed) / a_token))
        series = _series(runs, passages, kept, vocabulary)
    for index, top in tops.items():
        series[index] |= _packed_tops(top, passages.positions(kept), vocabulary)
    return {
        "passages": {
            "window": pack_integers(passages.window),
            "last_window": pack_integers(passages.last_window),
            "first": pack_integers(passages.first),
            "size": pack_integers(passages.size),
            "kept": pack_integers(kept),
        },
        "has_gaps": runs[0].method not in EXHAUSTIVE_METHODS,
        "num_kept": int(passages.size[kept].sum()),
        "tokens": pack_integers(np.searchsorted(vocabulary, runs[0].token_ids[passages.positions(kept)])),
        "vocabulary": {
            "ids": pack_integers(vocabulary),
            "texts": [texts.get(int(token)) for token in vocabulary],
        },
        "series": series,
    }


_PER_TOKEN = ("nll", "kld", "ranks", "tops", "confidence")


def _series(
    runs: Sequence[RunFile], passages: Passages, kept: NDArray[np.bool_], vocabulary: NDArray[np.int32]
) -> list[Series]:
    positions = passages.positions(kept)
    largest_nll = _largest_nll(runs)

    def places(ids: NDArray[np.int32] | None) -> Packed | None:
        return None if ids is None else pack_integers(np.searchsorted(vocabulary, ids[positions]))

    references = [run.reference_identity for run in runs]
    found: list[Series] = [
        {
            "label": run.label,
            "is_reference": False,
            # Equal for runs that were compared with the same one.
            "reference": references.index(run.reference_identity),
            "nll": pack_fixed(run.nlls[positions], largest_nll),
            "kld": None if run.kld is None else pack_klds(run.kld[positions]),
            "ranks": None if run.ranks is None else pack_integers(run.ranks[positions]),
            "tops": places(run.top_token_ids),
            "confidence": None,
            "mean_nll": pack_floats(passages.means(run.nlls)),
            "mean_kld": None if run.kld is None else pack_floats(passages.means(run.kld)),
        }
        for run in runs
    ]
    for run in _one_for_each_reference(runs):
        nlls, confidence = run.reference_nlls, run.reference_confidence
        assert nlls is not None
        assert confidence is not None
        assert run.reference is not None
        found.append(
            {
                "label": f"reference {run.reference.name}",
                "is_reference": True,
                "reference": references.index(run.reference_identity),
                "nll": pack_fixed(nlls[positions], largest_nll),
                "kld": None,
                "ranks": None,
                "tops": places(run.reference_top_token_ids),
                "confidence": pack_fixed(confidence[positions], 1),
                "mean_nll": pack_floats(passages.means(nlls)),
                "mean_kld": None,
            }
        )
    return found


def _shown_tops(runs: Sequence[RunFile], num_shown: int) -> dict[int, TopTokens]:
    """Of runs that have some, where the sum of all divergences is largest, each divided by its run's mean."""
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


def _largest_nll(runs: Sequence[RunFile]) -> float:
    """The largest finite one: with one scale for all, values that are equal in two series stay equal."""
    arrays = [array for run in runs for array in (run.nlls, run.reference_nlls) if array is not None]
    return max(float(array.max(where=np.isfinite(array), initial=0)) for array in arrays)


def _one_for_each_reference(runs: Sequence[RunFile]) -> list[RunFile]:
    return list({run.reference_identity: run for run in reversed(runs) if run.reference is not None}.values())


def _vocabulary(runs: Sequence[RunFile], tops: Iterable[TopTokens]) -> NDArray[np.int32]:
    """Every token id that occurs, in order."""
    arrays = [array for run in runs for array in (run.token_ids, run.top_token_ids, run.reference_top_token_ids)]
    arrays += [top.token_ids[..., :NUM_TOP] for top in tops]
    return np.unique(np.concatenate([np.unique(array) for array in arrays if array is not None]))


def _token_texts(runs: Sequence[RunFile]) -> Mapping[int, str]:
    return {token: text for run in runs for token, text in run.token_texts.items()}
