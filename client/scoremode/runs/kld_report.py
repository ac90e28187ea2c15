"""A finished comparison with a reference as JSON and arrays, for the record."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.kld import POSITION_DTYPES
from scoremode.results import TOP_DTYPES
from scoremode.runs.calibration import Overlap
from scoremode.runs.divergence import KldMeasurement
from scoremode.runs.lanes import lane_fields
from scoremode.runs.report import (
    finite_or_none,
    origin_arrays,
    record_beginning,
    tokens_record,
)
from scoremode.wire.references import KldStatistics


def as_json(
    measurement: KldMeasurement, urls: Sequence[str], overlap: Overlap[KldStatistics] | None = None
) -> dict[str, object]:
    """All that was measured and all that it takes to repeat it. JSON lacks infinity: it becomes null."""
    return {
        **record_beginning("kld", urls, measurement.model, measurement.server),
        "reference": finite_or_none(measurement.reference.model_dump()),
        "settings": {
            "concurrency": measurement.concurrency,
            "as_noise_floor": measurement.as_noise_floor,
            **lane_fields(measurement.lane, measurement.mean_batch),
        },
        "statistics": measurement.statistics,
        "kld_over_noise_floor": measurement.kld_over_noise_floor,
        "most_divergent": [finite_or_none(dataclasses.asdict(token)) for token in measurement.most_divergent],
        "seconds": measurement.seconds,
        "positions_per_second": measurement.positions_per_second,
        **tokens_record(measurement.token_texts, measurement.origins),
        **({} if overlap is None else overlap.record(overlap.without)),
    }


def as_arrays(measurement: KldMeasurement) -> dict[str, NDArray[Any]]:
    """The values of every position, in the order of windows, top tokens of some, and the windows' sizes."""
    arrays = {name: getattr(measurement.positions, name).astype(dtype) for name, dtype in POSITION_DTYPES.items()}
    if (top := measurement.top_tokens) is not None:
        arrays |= {f"top_tokens.{name}": getattr(top, name).astype(dtype) for name, dtype in TOP_DTYPES.items()}
    arrays["window_sizes"] = np.array(measurement.window_sizes, np.int32)
    return arrays | origin_arrays(measurement.origins, arrays, measurement.token_texts)
