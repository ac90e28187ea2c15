"""What is left of rows of logits: enough for the logprobs of some of their entries."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class ReducedRows:
    """Rows of logits, reduced.

    Attributes:
        tokens: [rows, 1 + k] int32: the target, and those of the k highest logits, in falling order.
        logits: [rows, 1 + k] float32, theirs.
        maxima: [rows] float32, the highest logit m.
        sums: [rows] float64, the sum of exp((logit - m) / T) over the row, at a temperature T; NaN where the row has a
            NaN.
        ranks: [rows] int32, how many logits are as high as the target's.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def empty(cls, rows: int, num_top: int, device: torch.device) -> "ReducedRows":
        """Room for them."""
        numbers = {"dtype": torch.float32, "device": device}
        integers = {"dtype": torch.int32, "device": device}
        return cls(
            tokens=torch.empty((rows, 1 + num_top), **integers),
            logits=torch.empty((rows, 1 + num_top), **numbers),
            maxima=torch.empty(rows, **numbers),
            sums=torch.empty(rows, dtype=torch.float64, device=device),
            ranks=torch.empty(rows, **integers),
        )

    @classmethod
    def join(cls, parts: "Sequence[ReducedRows]") -> "ReducedRows":
        """The rows of all, one after another."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __getitem__(self, rows: slice) -> "ReducedRows":
        """Views of some rows."""
        return ReducedRows(self.tokens[rows], self.logits[rows], self.maxima[rows], self.sums[rows], self.ranks[rows])

    @property
    def num_top(self) -> int:
        """The k."""
        return int(self.tokens.shape[1]) - 1

    def logprobs(self, temperature: float = 1.0) -> torch.Tensor:
        """[rows, 1 + k] float32, in nats; see `logprobs_of`."""
        return self.logprobs_of(self.logits, temperature)

    def logprobs_of(self, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Of entries of the rows, [rows, any] float32: (logit - m) / T - log(sum), which rounds less than
        logit / T - logsumexp. The temperature is the one of the sums. Rounded to float32 once."""
        below = logits.double().sub_(self.maxima[:, None]).div_(temperature)
        return below.sub_(self.sums.log()[:, None]).float()
