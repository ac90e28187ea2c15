"""Holds rows outside the prefill lane, on a GPU, until they are scored together with rows of later steps."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from scoremode_server.worker.request_rows import RequestRows, RowPiece


@dataclass(slots=True)
class WaitingGroup:
    """Logits of several steps, for requests whose rows are computed together."""

    pieces: list[RowPiece] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def join(self, requests: Collection[RequestRows]) -> tuple[list[RowPiece], torch.Tensor, torch.Tensor]:
        """Join the pieces of each of `requests` into one. Returns the joined pieces, with their targets [rows] and
        logits [rows, columns]. Rows of other requests are left out."""
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
    """Logits of rows that are held to be scored together. A request then gets rows once, not in every step, and a
    reference's LM head, up to gigabytes, is read once."""

    max_bytes: int = 0
    """Limit on the bytes of the logits, in addition to the scorer's budget; 0 if rows never wait."""
    num_bytes: int = 0
    _groups: dict[Hashable, WaitingGroup] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(
        self, pieces: Sequence[RowPiece], targets: list[torch.Tensor], logits: torch.Tensor, num_bytes: int
    ) -> None:
        """Add the pieces of a group with their targets and logits [rows, columns], which take `num_bytes`."""
        group = self._groups.setdefault(pieces[0].request.key, WaitingGroup())
        group.pieces += pieces
        group.targets += targets
        group.logits.append(logits)
        self.num_bytes += num_bytes

    def pop_all(self, requests: Collection[RequestRows]) -> Iterator[tuple[list[RowPiece], torch.Tensor, torch.Tensor]]:
        """Remove all rows. Yields the rows of `requests` by group, as `WaitingGroup.join` returns them, and drops all
        others."""
        while self._groups:
            _, group = self._groups.popitem()
            if any(piece.request in requests for piece in group.pieces):
                yield group.join(requests)
        self.num_bytes = 0
