"""Windows of a reference as requests to the engine, and the workers' answers to them."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from vllm.utils import random_uuid

from scoremode.kld import KldPositions
from scoremode_server.errors import EngineOutputError
from scoremode_server.prefix_cache.admission import Gate
from scoremode_server.prefix_cache.run import RowsRequest
from scoremode_server.references.directory import StoredReference, StoredText
from scoremode_server.rows import Columns, missing_row
from scoremode_server.scoring.scorer import ScoreSettings
from scoremode_server.vllm_patches.row_spec import RowSpec, WindowMark


def mark_window(
    action: Literal["record", "compare"],
    reference: StoredReference,
    text: StoredText,
    index: int,
    head_stamp: str = "",
) -> tuple[list[int], WindowMark]:
    """The tokens of a window of a reference, and its mark. Workers tell references apart by name and identity, and LM
    heads by the state of the file as well."""
    token_ids, first = text.window(index)
    mark = WindowMark(
        action=action,
        reference=reference.name,
        identity=reference.manifest.identity,
        index=index,
        num_scored=len(token_ids) - first,
        ticket=random_uuid(),
        head=f"{reference.name}/{reference.manifest.identity}/{head_stamp}",
    )
    return token_ids, mark


@dataclass(frozen=True, slots=True)
class MarkedWindow:
    """A window's tokens, and the mark that tells workers what to do with its hidden states. Its tokens count in the
    queue until `done`."""

    token_ids: list[int]
    mark: WindowMark
    settings: ScoreSettings
    num_top: int = 0
    """Top tokens that are wanted of both sides."""

    def __post_init__(self) -> None:
        self.settings.queue.add(1, len(self.token_ids))

    @property
    def first(self) -> int:
        """Position of the first target."""
        return len(self.token_ids) - self.mark.num_scored

    def request(self, gate: Gate | None = None, rank: int | None = None) -> RowsRequest:
        """The engine's request, at a gate, for the data-parallel rank that has read its files; for any if None."""
        options = self.settings.options
        return RowsRequest.score(
            self.token_ids,
            RowSpec(self.first, num_top=self.num_top, window=self.mark),
            request_id=f"{self.settings.request_id}-{self.mark.index}",
            # Cached positions have no hidden states, so no window could use another's.
            cache_salt=random_uuid(),
            use_cache=False,
            options=options if rank is None else {**options, "data_parallel_rank": rank},
            queue=self.settings.queue,
            gate=gate,
        )

    def done(self) -> None:
        """The window has its answer."""
        self.settings.queue.done(len(self.token_ids), 0)

    def check_rows(self, is_nan: np.ndarray) -> None:
        """Check that each target has a row [scored], and that none is NaN."""
        if len(is_nan) != self.mark.num_scored:
            raise EngineOutputError(f"the engine computed {len(is_nan)} rows of the {self.mark.num_scored} of a window")
        if is_nan.any():
            raise missing_row(self.first + int(is_nan.argmax()))


@dataclass(frozen=True, slots=True)
class WindowComparison:
    """The targets of a window."""

    index: int
    positions: KldPositions
    """Arrays over the targets."""
    top: tuple[np.ndarray, np.ndarray]
    """Token ids and logprobs [scored, k] of the served model's top k."""
    reference_top: tuple[np.ndarray, np.ndarray]

    @classmethod
    def from_columns(cls, index: int, columns: Columns) -> "WindowComparison":
        """From a worker's columns, whose order `vllm_patches.row_scorer` decides."""
        token_ids, logprobs, ranks = columns
        width = token_ids.shape[1] // 2
        served, reference = slice(1, width), slice(width + 1, 2 * width)
        positions = KldPositions(
            token_ids=token_ids[:, 0],
            kld=logprobs[:, -3],
            reverse_kld=logprobs[:, -2],
            acceptance=logprobs[:, -1],
            logprobs=logprobs[:, 0],
            reference_logprobs=logprobs[:, width],
            ranks=ranks,
            reference_ranks=token_ids[:, -1],
            top_token_ids=token_ids[:, 1],
            reference_top_token_ids=token_ids[:, width + 1],
            reference_confidence=np.exp(logprobs[:, width + 1]),
        )
        top, reference_top = ((token_ids[:, part], logprobs[:, part]) for part in (served, reference))
        return cls(index, positions, top, reference_top)
