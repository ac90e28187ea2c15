"""Files of references that threads of a worker write."""

import time

from scoremode_server.vllm_patches.reference_windows import ReferenceWindows


def let_all_be_written(windows: ReferenceWindows) -> None:
    """Wait until no thread has anything to do."""
    while windows._threads._lanes:
        time.sleep(0.001)
