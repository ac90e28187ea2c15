"""A worker's `RowScorer` on the CPU, of a model whose logits are linear in its hidden states."""

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from scoremode_server.kernels.working_memory import LogitsShape, block_bytes, row_bytes_fused
from scoremode_server.rows import PromptLogprobs, Rows, own_rows
from scoremode_server.worker.request_rows import StepPart
from scoremode_server.worker.row_scorer import RowScorer
from scoremode_server.worker.row_spec import RowSpec
from scoremode_server.worker.sinks import SinkMaker
from tests.unit.server.kernels.row_checks import check

ALONE = SimpleNamespace(world_size=1, rank_in_group=0, device=torch.device("cpu"))


def make_scorer(
    vocab: int,
    makers: Mapping[str, SinkMaker] = MappingProxyType({}),
    *,
    chunk: int = 3,
    group: Any = ALONE,
) -> RowScorer:
    """A scorer whose working memory holds so many rows, each with its target."""
    shape = LogitsShape(vocab, 4)
    return RowScorer(block_bytes(shape) + chunk * row_bytes_fused(shape, 0, None), shape, group, makers)


def rows_of(found: Any, spec: RowSpec) -> Rows:
    """The rows that a worker returns, as an API server reads them."""
    received = PromptLogprobs(found)
    return received.rows(spec.columns) if spec.is_packed else own_rows(received, spec.width)


def check_rows(rows: Rows, spec: RowSpec, logits: torch.Tensor, targets: list[int]) -> None:
    """Compare the rows of targets with float64; they are predicted by logits [targets, vocabulary]."""
    assert rows.logprobs.shape == (len(targets), spec.width)
    tokens, logprobs, ranks = (torch.tensor(column) for column in (rows.token_ids, rows.logprobs, rows.ranks))
    candidates = tokens[:, 1 : 1 + spec.num_candidates]
    check(logits, torch.tensor(targets), (tokens, logprobs, ranks), candidates, spec.temperature)


class LinearWorker:
    """A worker that feeds each prompt by itself.

    Attributes:
        num_projected: rows of each projection.
    """

    def __init__(self, scorer: RowScorer, project: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.scorer = scorer
        self.num_projected: list[int] = []

        def logits_fn(hidden_states: torch.Tensor) -> torch.Tensor:
            self.num_projected.append(len(hidden_states))
            return project(hidden_states)

        self.logits_fn = logits_fn

    def step(self, name: str, start: int, hidden_states: torch.Tensor, token_ids: torch.Tensor, num_fed: int) -> Any:
        """Compute one request's tokens from `start` on. Returns its rows once they are complete."""
        targets = torch.zeros(len(hidden_states), dtype=torch.int64)
        following = token_ids[start + 1 : min(start + 1 + len(hidden_states), num_fed)]
        targets[: len(following)] = following
        part, spec = StepPart(name, start, 0, len(hidden_states), num_fed), self.scorer.requests[name].spec
        found = self.scorer.score([part], hidden_states, targets, self.logits_fn).get(name)
        return None if found is None else rows_of(found, spec)

    def whole(self, spec: RowSpec, hidden_states: torch.Tensor, token_ids: list[int]) -> Any:
        """The rows of a request that is computed in one step."""
        self.scorer.begin("whole", spec)
        return self.step("whole", 0, hidden_states, torch.tensor(token_ids), len(token_ids))

    def together(self, specs: dict[str, RowSpec], hidden_states: torch.Tensor, token_ids: list[int]) -> dict[str, Any]:
        """The rows of several requests of the same prompt in one step, with others' tokens around the second."""
        parts, states, targets = [], [], []
        nothing = torch.full((2, hidden_states.shape[1]), torch.nan)
        for number, (name, spec) in enumerate(specs.items()):
            if number in (1, 2):
                states.append(nothing)
                targets += [0, 0]
            self.scorer.begin(name, spec)
            parts.append(StepPart(name, 0, len(targets), len(token_ids), len(token_ids)))
            states.append(hidden_states)
            targets += [*token_ids[1:], 0]
        found = self.scorer.score(parts, torch.cat(states), torch.tensor(targets), self.logits_fn)
        return {name: rows_of(rows, specs[name]) for name, rows in found.items()}
