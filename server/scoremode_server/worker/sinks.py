"""Sinks compute more columns of a request's rows in an engine worker, or save what the rows are computed from. Use them
to add figures of your own: docs/extend.md has an example."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig

from scoremode_server.kernels.fused_logprobs import Chunk, kernels_for
from scoremode_server.rows import Column, Columns
from scoremode_server.worker.lm_head import LMHead

if TYPE_CHECKING:
    from scoremode_server.worker.request_rows import RowPiece, StepPart
    from scoremode_server.worker.row_scorer import RowScorer
    from scoremode_server.worker.row_spec import RowSpec

ENTRY_POINTS = "scoremode.sinks"
"""The group of entry points in which packages register sinks. Requests name a sink by its entry point's name."""

__all__ = ["Chunk", "Column", "Columns", "Sink", "SinkMaker", "Statistics"]


class Sink:
    """Computes figures for every row of a request. Derive from it, and set `columns`.

    The API server makes a sink for each request that names it, to check `data` and to read `columns`. Engine workers
    make another when the request arrives, and again if it was preempted. Only workers call the methods, within a step.
    All ranks of a tensor-parallel group make the same calls in the same order, so `key`, and the tensors that `compute`
    exchanges between ranks, may depend on the request alone.
    """

    columns: Columns = ()
    """The columns that `compute` returns. Their names must be unique among the sinks of a request."""
    may_be_cached: bool = True
    """Whether rows may be stored for later requests with equal data. Set False if figures depend on more than the
    tokens, the model and the data."""

    def __init__(self, data: Any = None) -> None:
        """Read a request's data for this sink, any JSON value. Raise ValueError to refuse it: the client gets the
        message with status 400."""
        self.data = data

    @property
    def key(self) -> Hashable:
        """Requests whose sinks have equal keys are computed together, by the sinks of one of them."""
        return repr(self.data)

    def is_ready(self, end: int, *, local: bool) -> bool:
        """Whether this rank can compute the step's rows, whose tokens end at position `end`. If `local`, the rank
        computes only its part of the vocabulary. If any rank is not ready, the request fails."""
        return True

    def chunk_rows(self, scorer: "RowScorer", head: LMHead) -> int | None:
        """Limit on rows of logits in memory at once. None uses the limit for scores, which leaves no memory for another
        copy of the logits."""
        return None

    def compute(self, chunk: Chunk, pieces: "Sequence[RowPiece]") -> Mapping[str, torch.Tensor]:
        """Compute columns by name, [rows] or [rows, width], for a chunk. Its rows are consecutive rows of `pieces`,
        which belong to all requests with this key. Ranks must return the same. NaN in a float32 column makes the
        request fail."""
        return {}

    def store(self, columns: Mapping[str, torch.Tensor], hidden_states: torch.Tensor) -> None:
        """Save anything needed of the request's next rows. The next step overwrites `hidden_states` [rows, hidden].
        Outside the prefill lane rows may wait for later steps: `hidden_states` are then logits [rows, columns]."""

    def finish(self) -> None:
        """Finish the request after its last rows."""


class SinkMaker:
    """Makes the sinks of one name in an engine worker, and holds what they share. Every worker creates its makers when
    it has its device, even without an LM head. This base class makes sinks of one class, which share nothing."""

    has_hooks: bool = False
    """Whether `around_forward` must be called."""

    def __init__(self, sink_class: type[Sink]) -> None:
        self.sink_class = sink_class

    def begin(self, spec: "RowSpec", data: Any, *, writes: bool) -> Sink:
        """Make the sink of a request; again if the request was preempted. `writes` is true on one rank of a
        tensor-parallel group: only that rank may write files."""
        return self.sink_class(data)

    def allocate(self, config: VllmConfig, device: torch.device) -> None:
        """Allocate memory that sinks hold permanently. Called before vLLM profiles memory, on ranks with an LM head;
        not on a CPU."""

    def reserve(self, scorer: "RowScorer", runner: Any, hidden_states: torch.Tensor, head: LMHead) -> None:
        """Use as much memory as sinks may need in a step. Called while vLLM profiles memory, with its model runner."""

    def around_forward(
        self, model: torch.nn.Module, parts: "Sequence[tuple[Sink, StepPart]]"
    ) -> AbstractContextManager[Any]:
        """Wrap a step's forward pass. `parts` are the parts of requests with this maker's sinks; a dummy run has none.
        Called only if the model runs eagerly. The first call is for a dummy run."""
        return nullcontext()


class Statistics(Sink):
    """Computes figures of the next token's whole distribution p, in nats: its entropy H = -sum of p ln p, and the
    standard deviation of ln p under p, sqrt(sum of p (ln p + H)^2)."""

    names = ("entropy", "std_logprob")

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        if not isinstance(data, list) or not data or len(set(data)) < len(data) or not set(data) <= set(self.names):
            raise ValueError(f"statistics must be one or more of {', '.join(self.names)}")
        self.columns = tuple(map(Column, data))

    def compute(self, chunk: Chunk, pieces: "Sequence[RowPiece]") -> Mapping[str, torch.Tensor]:
        """Use x = (logit - m) / T for the highest logit m. Then ln p = x - ln s, where s is the sum of exp(x)."""
        kernels, scores = kernels_for(chunk.logits.device, chunk.scores.num_top), chunk.scores
        sums = kernels.sum_moments(chunk.logits, chunk.num_columns, scores, chunk.temperature)
        mean, mean_square = chunk.add_up(sums).double().unbind(1)
        figures = {
            "entropy": (scores.sums.log() - mean).float(),
            "std_logprob": (mean_square - mean.square()).clamp_(min=0).sqrt_().float(),
        }
        return {column.name: figures[column.name] for column in self.columns}


@cache
def sink_classes() -> dict[str, type[Sink]]:
    """The sinks that requests may name: Scoremode's own, and those of installed packages."""
    return {"statistics": Statistics} | {entry.name: entry.load() for entry in entry_points(group=ENTRY_POINTS)}
