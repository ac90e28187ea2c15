"""Sampling parameters of scoring requests, which no client can send."""

from copy import copy
from typing import Any, Self, cast

from vllm.sampling_params import SamplingParams

from scoremode_server.vllm_patches.row_spec import ROWS, RowSpec


class ScoringParams(SamplingParams):
    """Sampling parameters of a scoring request. The type is what marks it, since no client can send a type.

    The engine's processes receive plain `SamplingParams`: fields are sent, not the type.
    """

    @classmethod
    def of(cls, params: SamplingParams, spec: RowSpec) -> Self:
        """The same parameters, which were checked when they were made, of a request for these rows.

        Raises:
            ValueError: a client has set what rows it wants.
        """
        _check(params)
        marked = copy(params)
        marked.__class__ = cls
        marked.extra_args = {**(params.extra_args or {}), **spec.as_extra_args()}
        return cast("Self", marked)


def guard_rows(engine: Any) -> None:
    """Let an engine client refuse a `RowSpec` in any other request: clients may set `extra_args` (`vllm_xargs`)."""
    add_request = engine.add_request

    async def add_unforged(request_id: str, prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(params, ScoringParams):
            _check(params)
        return await add_request(request_id, prompt, params, *args, **options)

    engine.add_request = add_unforged


def _check(params: Any) -> None:
    if ROWS in (getattr(params, "extra_args", None) or ()):
        raise ValueError(f"vllm_xargs: {ROWS} cannot be set")
