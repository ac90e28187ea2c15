"""Device memory of one GPU, sampled while something runs."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SAMPLE_MILLISECONDS = 50


@dataclass(slots=True)
class Memory:
    """Device memory in use, in MiB, as the driver tells it, and its peak since `restart`."""

    now: int = 0
    peak: int = 0
    sampled: threading.Event = field(default_factory=threading.Event)

    def restart(self) -> None:
        """Forget the peak, and wait for a fresh sample."""
        self.peak = 0
        self.sampled.clear()
        if not self.sampled.wait(timeout=10):
            raise RuntimeError("nvidia-smi gives no samples")

    def follow(self, lines: Iterator[str]) -> None:
        """Take one sample a line."""
        for line in lines:
            self.now = int(line)
            self.peak = max(self.peak, self.now)
            self.sampled.set()


@contextmanager
def sampled_memory(gpu: int = 0) -> Iterator[Memory]:
    """One GPU's memory, sampled every 50 ms."""
    query = ("nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    memory = Memory()
    with subprocess.Popen((*query, f"-lms={SAMPLE_MILLISECONDS}"), stdout=subprocess.PIPE, text=True) as sampler:
        assert sampler.stdout is not None
        thread = threading.Thread(target=memory.follow, args=(iter(sampler.stdout.readline, ""),), daemon=True)
        thread.start()
        try:
            yield memory
        finally:
            sampler.terminate()
