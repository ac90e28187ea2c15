"""The one vLLM whose inner methods Scoremode replaces."""

import vllm

PATCHED_VERSION = "0.32.0"


def require_patched_version() -> None:
    """Refuse any other vLLM.

    Raises:
        RuntimeError: this is not the vLLM that the patches were made for.
    """
    version = vllm.__version__.split("+")[0]
    if version != PATCHED_VERSION:
        raise RuntimeError(
            f"Scoremode patches vLLM {PATCHED_VERSION}, and found {version}: install the version it pins"
        )
