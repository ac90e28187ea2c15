"""Requests that want more than prompt logprobs: chosen tokens at each position, a temperature, rows from a position on.

The API server marks their sampling parameters, as it does those of a reference's windows.
"""

from collections.abc import Container
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from scoremode_server.vllm_patches.windows import Projections, Window, marked_with

SCORED_MARK = "scoremode_rows"
"""The key in `SamplingParams.extra_args`."""


@dataclass(frozen=True, slots=True)
class ScoredMark:
    """What is wanted of a request's rows."""

    first: int
    """Position of the first target."""
    last_token: int
    """The last target, which is not fed."""
    num_top: int
    """Likeliest tokens."""
    temperature: float
    num_candidates: int
    candidates: bytes
    """int32: [m] for all rows, or [rows, m] from the first target's on."""

    @property
    def num_columns(self) -> int:
        """Of the rows: the target, the candidates, the top tokens."""
        return 1 + self.num_candidates + self.num_top

    @property
    def identity(self) -> str:
        """Everything that determines the rows of a sequence, except the number of top tokens, which come last."""
        digest = blake2b(self.candidates, digest_size=16).hexdigest()
        # The rows that candidates of their own belong to depend on where these begin.
        first = self.first if len(self.candidates) > 4 * self.num_candidates else None
        return repr((self.temperature, self.num_candidates, digest, first))

    def as_extra_args(self) -> dict[str, Any]:
        """For `SamplingParams`."""
        return {SCORED_MARK: asdict(self)}


class ScoredWindow(Window):
    """Tokens and logprobs [1 + m + k]: the target, the candidates, the top tokens. Ranks of the targets."""

    def __init__(self, mark: ScoredMark, device: torch.device) -> None:
        super().__init__(mark.first, mark.last_token)
        self._mark = mark
        candidates = torch.frombuffer(bytearray(mark.candidates), dtype=torch.int32) if mark.candidates else None
        self._candidates = (
            None if candidates is None else async_tensor_h2d(candidates.view(-1, mark.num_candidates), device=device)
        )

    def _rows(
        self, row: int, targets: torch.Tensor, hidden_states: torch.Tensor, projections: Projections
    ) -> LogprobsTensors:
        candidates = self._candidates
        if candidates is not None:
            one_for_all = len(candidates) == 1
            candidates = candidates.expand(len(targets), -1) if one_for_all else candidates[row : row + len(targets)]
        return LogprobsTensors(
            *projections.score(targets, hidden_states, self._mark.num_top, candidates, self._mark.temperature)
        )

    def finish(self) -> None:
        """Nothing is left to do."""


class ScoredWindows:
    """The windows that are with this worker, by request."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}

    def add(self, request_id: str, sampling_params: Any, *, writes: bool, device: torch.device) -> Window | None:
        """Begin the window that a request's parameters mark, if they do; again after it was preempted.

        Args:
            request_id: vLLM's.
            sampling_params: the request's.
            writes: whether this rank writes files.
            device: of hidden states.
        """
        window = self.begin(sampling_params, writes=writes, device=device)
        if window is not None:
            self._windows[request_id] = window
        return window

    def begin(self, sampling_params: Any, *, writes: bool, device: torch.device) -> Window | None:
        """The window that parameters mark; None if they mark none."""
        mark = marked_with(sampling_params, SCORED_MARK)
        return None if mark is None else ScoredWindow(ScoredMark(**mark), device)

    def get(self, request_id: str) -> Window | None:
        """The window of a request."""
        return self._windows.get(request_id)

    def remove(self, request_id: str) -> None:
        """The request has ended, or is preempted."""
        self._windows.pop(request_id, None)

    def keep_only(self, request_ids: Container[str]) -> None:
        """Forget the windows of all other requests."""
        for request_id in [each for each in self._windows if each not in request_ids]:
            del self._windows[request_id]

    def reserve(self, runner: Any, hidden_states: torch.Tensor, projections: Projections) -> None:
        """What windows need is taken while vLLM profiles. These need what prompt logprobs do."""
