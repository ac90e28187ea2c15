"""Sinks compute further columns of a request's rows in an engine worker, or keep what rows are computed from. This is
the seam for figures of your own: docs/extend.md has an example.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig

from scoremode_server.kernels.fused_logprobs import Chunk, LogitsFunction, kernels_for
from scoremode_server.kernels.reduced_rows import Shard
from scoremode_server.rows import Column, Columns
from scoremode_server.worker.lm_head import LMHead

if TYPE_CHECKING:
    from scoremode_server.worker.request_rows import RowPiece, StepPart
    from scoremode_server.worker.row_scorer import RowScorer
    from scoremode_server.worker.row_spec import RowSpec

ENTRY_POINTS = "scoremode.sinks"
"""The group of entry points by which packages offer sinks. An entry point's name is the one that requests use."""

__all__ = ["Chunk", "Column", "Columns", "LogitsFunction", "Shard", "Sink", "SinkMaker", "Statistics"]


class Sink:
    """One request's part of a figure that is computed for every row. Derive from it, and set `columns`.

    API servers make a sink for each request that names it, to check `data` and to learn its columns; engine workers
    make another when the request reaches them, and again if it was preempted. The methods are called in workers alone,
    within a step. Ranks of a tensor-parallel group make the same calls in the same order: `key` and what `compute`
    exchanges must follow from the request alone.
    """

    columns: Columns = ()
    """What `compute` returns. No two sinks of a request may have columns of one name."""
    may_be_cached: bool = True
    """Whether rows may be stored with their block, for later requests with equal data. False for figures that depend on
    more than the tokens, the model and the data."""

    def __init__(self, data: Any = None) -> None:
        """Read what a request sends for this sink, of any type that JSON has. Raise ValueError to refuse it: the client
        gets the message with status 400."""
        self.data = data

    @property
    def key(self) -> Hashable:
        """Rows of requests whose sinks have equal keys are computed together, by the sinks of one of them."""
        return repr(self.data)

    def is_ready(self, end: int, *, local: bool) -> bool:
        """Whether this rank can compute the rows of the step whose tokens end at position `end`, with `local` from its
        part of the vocabulary. If one rank cannot, all leave out these rows, and the request fails."""
        return True

    def chunk_rows(self, scorer: "RowScorer", head: LMHead) -> int | None:
        """Rows of logits that may be in memory at once; None for as many as scores need, which leaves no memory for
        another copy of them."""
        return None

    def compute(self, chunk: Chunk, pieces: "Sequence[RowPiece]") -> Mapping[str, torch.Tensor]:
        """Compute the columns by name, [rows] or [rows, width], of the rows of a chunk. These are consecutive rows of
        the `pieces` of all requests whose sinks have this key. They must be the same on every rank; an entry of float32
        that is NaN makes the request fail."""
        return {}

    def store(self, columns: Mapping[str, torch.Tensor], hidden_states: torch.Tensor) -> None:
        """Keep something of the request's next rows: of all their columns, and of hidden states [rows, hidden], which
        the next step overwrites. These are logits where rows waited for those of later steps, in the decode lane."""

    def finish(self) -> None:
        """Do what remains when all rows were computed."""


class SinkMaker:
    """Makes the sinks of one name in an engine worker, and keeps what they share there. It is made when the worker has
    its device, in every worker, also in those without an LM head. This one makes sinks of a class, which share
    nothing."""

    has_hooks: bool = False
    """Whether `around_forward` must be called."""

    def __init__(self, sink_class: type[Sink]) -> None:
        self.sink_class = sink_class

    def begin(self, spec: "RowSpec", data: Any, *, writes: bool) -> Sink:
        """Make the sink of a request; again if the request was preempted. One rank of a tensor-parallel group `writes`
        what leaves the workers."""
        return self.sink_class(data)

    def allocate(self, config: VllmConfig, device: torch.device) -> None:
        """Allocate the memory that sinks keep. Called before vLLM profiles, on ranks with an LM head; not on a CPU."""

    def reserve(self, scorer: "RowScorer", runner: Any, hidden_states: torch.Tensor, head: LMHead) -> None:
        """Use as much memory as sinks need at most in a step. Called while vLLM profiles, with its model runner."""

    def around_forward(
        self, model: torch.nn.Module, parts: "Sequence[tuple[Sink, StepPart]]"
    ) -> AbstractContextManager[None]:
        """Enclose the model's forward pass of a step that computes these parts of sinks of this maker, or of a dummy
        run, which has none. Called only where the model runs eagerly, and first for a dummy run."""
        return nullcontext()


class Statistics(Sink):
    """Figures of the whole distribution p of the next token: its entropy H = -sum of p ln p, and the standard deviation
    of ln p under p, sqrt(sum of p (ln p + H)^2), both in nats."""

    names = ("entropy", "std_logprob")

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        if not isinstance(data, list) or not data or len(set(data)) < len(data) or not set(data) <= set(self.names):
            raise ValueError(f"statistics must be one or more of {', '.join(self.names)}")
        self.columns = tuple(map(Column, data))

    def compute(self, chunk: Chunk, pieces: "Sequence[RowPiece]") -> Mapping[str, torch.Tensor]:
        """Let x = (logit - m) / T. Then ln p = x - ln s, for the sum s of exp(x) over the vocabulary."""
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
