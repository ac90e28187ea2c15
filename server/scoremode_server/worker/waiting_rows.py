"""Rows of the decode and verify lanes that wait for those of later steps, on a GPU."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from scoremode_server.worker.request_rows import RequestRows, RowPiece


@dataclass(slots=True)
class WaitingGroup:
    """Logits of several steps, of requests with equal keys."""

    pieces: list[RowPiece] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def join(self, requests: Collection[RequestRows]) -> tuple[list[RowPiece], torch.Tensor, torch.Tensor]:
        """Join the pieces of each of these requests to one. Returns them, and their targets [rows] and logits."""
        by_request: dict[RequestRows, list[tuple[RowPiece, int]]] = {}
        start = 0
        for piece in self.pieces:
            if piece.request in requests:
                by_request.setdefault(piece.request, []).append((piece, start))
            start += piece.num_rows
        joined, order = [], list[int]()
        for request, pieces in by_request.items():
            rows = [row for piece, start in pieces for row in range(start, start + piece.num_rows)]
            num_wanted = sum(piece.num_wanted for piece, _ in pieces)
            joined.append(RowPiece(request, pieces[0][0].first, len(order), len(rows), num_wanted))
            order += rows
        targets, logits = torch.cat(self.targets), torch.cat(self.logits)
        self.logits.clear()
        places = async_tensor_h2d(order, device=targets.device, dtype=torch.int64)
        return joined, targets[places], logits[places]


@dataclass(slots=True)
class WaitingRows:
    """Rows whose logits are kept to be scored at once: a request gets rows once instead of in every step, and the LM
    head of a reference, up to gigabytes, is read once."""

    max_bytes: int = 0
    """Limit on the logits, which are in addition to the scorer's budget; 0 where no rows wait."""
    num_bytes: int = 0
    _groups: dict[Hashable, WaitingGroup] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(
        self, pieces: Sequence[RowPiece], targets: list[torch.Tensor], logits: torch.Tensor, num_bytes: int
    ) -> None:
        """Keep the logits of a group's rows, which have equal keys."""
        group = self._groups.setdefault(pieces[0].request.key, WaitingGroup())
        group.pieces += pieces
        group.targets += targets
        group.logits.append(logits)
        self.num_bytes += num_bytes

    def pop_all(self, requests: Collection[RequestRows]) -> Iterator[tuple[list[RowPiece], torch.Tensor, torch.Tensor]]:
        """The rows of these requests by group, as `WaitingGroup.join` returns them; those of others are dropped."""
        while self._groups:
            _, group = self._groups.popitem()
            pieces, targets, logits = group.join(requests)
            if pieces:
                yield pieces, targets, logits
            del targets, logits
        self.num_bytes = 0
