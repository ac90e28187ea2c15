"""How the kernels over rows of logits walk through them; apart from the kernels, as a server on a CPU has no Triton."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a program walks through its row: in tiles of `lanes` x `width` entries, both powers of two. A lane keeps a
    maximum, and takes `width` neighbouring entries of a tile; 8 of 2 bytes are the widest load."""

    lanes: int
    width: int
    num_warps: int
    num_stages: int
    """Tiles that are being loaded at a time."""

    def lane_entries(self, columns: int) -> int:
        """Entries of a row that a lane takes, those past the row's end among them."""
        return max(1, -(-columns // (self.lanes * self.width))) * self.width


TILING = Tiling(lanes=1024, width=8, num_warps=8, num_stages=1)
PAIR_TILING = Tiling(lanes=512, width=8, num_warps=8, num_stages=1)
"""Of kernels that read two rows: as many entries at a time."""
