"""A worker's `RowScorer` on the CPU, of a model whose logits are linear in its hidden states."""

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from scoremode_server.kernels.working_memory import LogitsShape, block_bytes, row_bytes_fused
from scoremode_server.worker.row_scorer import RowScorer, SinkMaker, StepPart
from scoremode_server.worker.row_spec import RowSpec
from tests.unit.server.kernels.row_checks import check

ALONE = SimpleNamespace(world_size=1, rank_in_group=0, device=torch.device("cpu"))


def make_scorer(
    vocab: int,
    sinks: Mapping[str, SinkMaker] = MappingProxyType({}),
    *,
    chunk: int = 3,
    group: Any = ALONE,
) -> RowScorer:
    """A scorer whose working memory holds so many rows, each with its target."""
    shape = LogitsShape(vocab, 4)
    return RowScorer(block_bytes(shape) + chunk * row_bytes_fused(shape, 0, None), shape, group, sinks)


def check_rows(rows: Any, spec: RowSpec, logits: torch.Tensor, targets: list[int]) -> None:
    """Compare the rows of targets with float64; they are predicted by logits [targets, vocabulary]."""
    assert rows.logprobs.shape == (len(targets), spec.num_columns)
    candidates = rows.logprob_token_ids[:, 1 : 1 + spec.num_candidates]
    check(logits, torch.tensor(targets), rows[:3], candidates, spec.temperature)


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
        """One step of one request, whose tokens from `start` on are computed."""
        targets = torch.zeros(len(hidden_states), dtype=torch.int64)
        following = token_ids[start + 1 : min(start + 1 + len(hidden_states), num_fed)]
        targets[: len(following)] = following
        part = StepPart(name, start, 0, len(hidden_states), num_fed)
        return self.scorer.score([part], hidden_states, targets, self.logits_fn).get(name)

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
        return self.scorer.score(parts, torch.cat(states), torch.tensor(targets), self.logits_fn)
