"""The one vLLM whose inner methods Scoremode replaces."""

import inspect
from typing import Any

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


def expect(owner: Any, name: str, *parameters: str) -> None:
    """Make sure that what is replaced still takes these parameters.

    Raises:
        RuntimeError: it takes others, or is not there.
    """
    function = getattr(owner, name, None)
    if function is None or tuple(inspect.signature(function).parameters) != parameters:
        raise changed(owner, name)


def changed(owner: Any, name: str) -> RuntimeError:
    """The error to raise when `owner.name` is not what a patch was made for."""
    return RuntimeError(f"Scoremode patches {owner.__name__}.{name}, which is not as it was in the vLLM it pins")
