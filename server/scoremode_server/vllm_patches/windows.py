"""Requests whose hidden states take another way than prompt logprobs, as the model runners see them.

The runners hand over the hidden states of each step, and get back what takes the place of prompt logprobs, with a row
for each target, the last one among them. Vocabulary-sized tensors exist for one chunk of rows only.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.v1.outputs import LogprobsTensors

from scoremode_server.kernels import kl_divergence
from scoremode_server.kernels.kl_divergence import Comparison
from scoremode_server.kernels.tensor_parallel import Shard, all_ranks_agree
from scoremode_server.vllm_patches.lm_head import LogitsFunction
from scoremode_server.vllm_patches.reference_head import ReferenceHead


class Projections(ABC):
    """What a model runner does with hidden states [rows, hidden] and targets [rows]. Every rank of a tensor-parallel
    group must come here at the same time."""

    project: LogitsFunction
    """The served model's, of all of the vocabulary, or of `shard`."""
    shard: Shard | None

    def all_ranks_agree(self, yes: bool) -> bool:
        """Whether it is so on every rank."""
        group = get_tp_group()
        return yes if group.world_size == 1 else all_ranks_agree(group, yes)

    @abstractmethod
    def score(
        self,
        targets: torch.Tensor,
        hidden_states: torch.Tensor,
        num_top: int = 0,
        candidates: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[torch.Tensor, ...]:
        """See `kernels.fused_logprobs.compute`, whose last three parameters these are."""

    @abstractmethod
    def compared_rows(self, num_top: int, reference_logit_bytes: int) -> int:
        """Rows of both sides' logits that are held at a time, where one of the reference's takes so many bytes."""

    def compare(
        self,
        targets: torch.Tensor,
        hidden_states: torch.Tensor,
        reference: ReferenceHead,
        reference_hidden_states: torch.Tensor,
        num_top: int,
    ) -> Comparison:
        """See `kernels.kl_divergence.compare`."""
        return kl_divergence.compare(
            targets,
            self.project,
            hidden_states,
            reference.logits_fn,
            reference_hidden_states,
            num_top,
            self.compared_rows(num_top, reference.logit_bytes),
            self.shard,
        )


def marked_with(sampling_params: Any, key: str) -> dict[str, Any] | None:
    """The mark that a request's parameters have under this key, if they do."""
    mark: dict[str, Any] | None = ((sampling_params and sampling_params.extra_args) or {}).get(key)
    return mark


class Window(ABC):
    """The targets of a request that is being computed, in one step or several.

    Attributes:
        first: position of the first target.
        last_token: the last target, which is not fed.
        end: position after the last one whose hidden state was taken.
    """

    def __init__(self, first: int, last_token: int) -> None:
        self.first = first
        self.last_token = last_token
        self.end = 0
        self._parts: list[LogprobsTensors] = []

    def step(
        self, start: int, hidden_states: torch.Tensor, token_ids: torch.Tensor, num_fed: int, projections: Projections
    ) -> LogprobsTensors | None:
        """Take the hidden states [tokens, hidden] of a step, those of the positions from `start` on.

        Args:
            start: position of the first.
            hidden_states: after the final norm. Those after the prompt, of placeholders for drafts, are left out.
            token_ids: [at least num_fed], of the prompt.
            num_fed: tokens of the prompt.
            projections: of the model runner.

        Returns:
            The rows of all targets, once the window is complete; but for those of positions before the first step's.
        """
        hidden_states = hidden_states[: num_fed - start]
        self.end = end = start + len(hidden_states)
        first_row = max(start, self.first - 1)
        if first_row < end:
            targets = token_ids[first_row + 1 : end + 1]
            if end == num_fed:
                # A tensor made on the host would wait for all that the GPU has to do.
                last = targets.new_full((1,), self.last_token)
                targets = torch.cat((targets[: end - first_row - 1], last))
            self._parts.append(
                self._rows(first_row - (self.first - 1), targets, hidden_states[first_row - start :], projections)
            )
        if end < num_fed:
            return None
        self.finish()
        return LogprobsTensors.cat(self._parts) if len(self._parts) > 1 else self._parts[0]

    @abstractmethod
    def _rows(
        self, row: int, targets: torch.Tensor, hidden_states: torch.Tensor, projections: Projections
    ) -> LogprobsTensors:
        """Do what is to be done with some rows, the first of which is `row` of the window's."""

    @abstractmethod
    def finish(self) -> None:
        """All rows were given."""
