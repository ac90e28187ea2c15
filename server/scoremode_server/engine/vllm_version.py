"""Checks of what Scoremode replaces in vLLM, made where it is replaced."""

import inspect
from typing import Any


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
    return RuntimeError(f"Scoremode patches {owner.__name__}.{name}, which is not as in any vLLM that it knows")
