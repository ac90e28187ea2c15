"""Rows of several tensors one after another, without a copy of all of them."""

from collections.abc import Sequence

import torch


class JoinedRows:
    """Tensors [rows, ...] of one dtype that are read as one, a slice at a time, on `device` if that is another one than
    theirs. On the host they are best pinned."""

    def __init__(self, parts: Sequence[torch.Tensor], device: torch.device | None = None) -> None:
        self._parts = parts
        self._device = device

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Some rows: a view where one tensor has all of them."""
        pieces, start = [], 0
        for part in self._parts:
            piece = part[max(rows.start - start, 0) : max(rows.stop - start, 0)]
            if len(piece):
                pieces.append(piece if self._device is None else piece.to(self._device, non_blocking=True))
            start += len(part)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
