"""Computes sizes in llama.cpp's base file (`llama-perplexity --kl-divergence-base`), for the server and the client.

The file begins with the bytes `_logits_`. Context length, vocabulary size, number of windows, and the windows' tokens
follow as int32. Then each target has its distribution in 4 + 2 ceil(vocabulary / 2) numbers of 16 bits
(tools/perplexity/perplexity.cpp in llama.cpp).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BaseFile:
    """The layout of a file whose windows all have the same number of targets. Sizes are in bytes."""

    context_length: int
    num_windows: int
    num_scored: int
    """Targets of all windows."""
    vocab_size: int

    @property
    def header_size(self) -> int:
        return 20 + 4 * self.context_length * self.num_windows

    @property
    def window_size(self) -> int:
        return 2 * (self.num_scored // self.num_windows) * (4 + 2 * ((self.vocab_size + 1) // 2))

    @property
    def size(self) -> int:
        return self.header_size + self.num_windows * self.window_size

    def num_complete(self, size: int) -> int:
        """The number of complete windows in a file of `size` bytes."""
        return max(0, size - self.header_size) // self.window_size

    def end_of(self, num_windows: int) -> int:
        """The size of a file with `num_windows` windows; a file without windows has no header."""
        return self.header_size + num_windows * self.window_size if num_windows else 0
