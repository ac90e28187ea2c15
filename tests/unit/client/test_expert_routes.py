"""Figures of choices of experts, worked out by hand: shares, errors, the parts of a divergence, and the layer named."""

import json

import numpy as np
import pytest

from scoremode import results
from scoremode.kld import POSITION_DTYPES, KldPositions
from scoremode.runs import ExpertRoutes
from scoremode.wire import ReferenceRoutes


def window(kld, same_set, differing, same_first=(), shared=(), forced=None) -> results.KldWindowValues:
    arrays = {name: np.zeros(len(kld), dtype) for name, dtype in POSITION_DTYPES.items()}
    counts = {"same_set": same_set, "same_first": same_first or same_set, "shared": shared or same_set}
    return results.KldWindowValues.model_construct(
        num_scored=len(kld),
        positions=KldPositions(**{**arrays, "kld": np.array(kld, np.float32)}),
        routes=results.RouteCounts.model_construct(**counts, differing_layers=np.array(differing, np.int32)),
        forced=forced,
    )


def figures_of(*windows, num_layers: int = 2) -> ExpertRoutes:
    layers = [f"layers.{number}" for number in range(num_layers)]
    return ExpertRoutes.from_windows(windows, ReferenceRoutes(layers=layers, num_experts=8, top_k=2))


def mean(value: float | None, stderr: float | None) -> dict:
    return {"mean": value, "stderr": stderr}


# Two windows of two targets, two layers, two experts per token. If the sums of both windows are r above and below the
# mean's share, the clustered error of a mean over n values is sqrt(2 · 2 r²) / n = 2 r / n.
HAND_WORKED = (
    window([1, 3], [2, 1], [0, 1], [2, 2], [4, 3], window([1, 1], [2, 2], [0, 0])),
    window([6, 0], [1, 1], [2, 0], [1, 1], [3, 2], window([4, 0], [2, 1], [1, 0])),
)


def test_figures_are_means_with_errors_by_window():
    found = figures_of(*HAND_WORKED)
    record = {
        "num_experts": 8,
        "top_k": 2,
        # Sums of a window: own 4, 6; forced 2, 4; their differences 2, 2, although both vary.
        "own": mean(2.5, 0.5),
        "forced": mean(1.5, 0.5),
        "rerouting": mean(1.0, 0.0),
        # Shares of layers by target: 1, 1/2; 0, 1.
        "same_experts": mean(0.625, 0.125),
        "differing_layers": [2, 1, 1],
        # 1, 0 and 3, 6.
        "kld_same": mean(0.5, 0.5),
        "kld_other": mean(4.5, 1.5),
        "layers": [
            {
                "name": "layers.0",
                "same_set": mean(0.75, 0.25),
                "same_first": mean(0.75, 0.25),
                "overlap": mean(0.875, 0.125),
                "forced_same_set": mean(1.0, 0.0),
            },
            {
                "name": "layers.1",
                "same_set": mean(0.5, 0.0),
                "same_first": mean(0.75, 0.25),
                "overlap": mean(0.625, 0.125),
                "forced_same_set": mean(0.75, 0.25),
            },
        ],
    }
    assert found.model_dump() == record
    assert ExpertRoutes.model_validate_json(json.dumps(record, allow_nan=False)).model_dump() == record
    arrays = {name: array.tolist() for name, array in found.arrays.items()}
    assert arrays == {"forced_kld": [1, 1, 4, 0], "differing_layers": [0, 1, 2, 0]}


def test_undefined_figures_are_none_and_not_nan():
    alone = figures_of(HAND_WORKED[0]).model_dump()
    assert [alone[name] for name in ("own", "same_experts")] == [mean(2.0, None), mean(0.75, None)]
    same = window([1, np.inf], [2, 2], [0, 0], forced=window([1, np.inf], [2, 2], [0, 0]))
    infinite = figures_of(same, same).model_dump()
    # No target is in the last one.
    names = ("own", "forced", "rerouting", "kld_same", "kld_other")
    assert [infinite[name] for name in names] == [mean(None, None)] * 5


@pytest.mark.parametrize(
    ("shares", "name"),
    [
        ([(99, 99), (60, 60)], "layers.1"),
        ([(100, 100), (60, 60), (100, 100)], "layers.1"),
        ([(99, 91), (85, 85)], "layers.1"),
        # Not twice as often as the next; within the next one's error of 0.06, or its own of 0.3; one layer; one window.
        ([(90, 90), (85, 85)], None),
        ([(99, 87), (84, 84)], None),
        ([(99, 99), (90, 30)], None),
        ([(60, 60)], None),
        ([(99,), (60,)], None),
    ],
)
def test_a_router_stands_out_if_it_clearly_disagrees_most(shares, name):
    """Shares are forced same sets of 100 targets, by layer and window."""
    kld, own = np.ones(100), [50] * len(shares)
    windows = [
        window(kld, own, np.zeros(100), forced=window(kld, each, np.zeros(100))) for each in zip(*shares, strict=True)
    ]
    found = figures_of(*windows, num_layers=len(shares)).standing_out
    assert (found and found.name) == name
