"""Looks up the model or the LoRA adapter that a request names."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fastapi import Request
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.lora.request import LoRARequest

from scoremode_server.errors import MAX_NAME, NotServedError, RequestError


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model or LoRA adapter that requests can name; `lora` is None for a model."""

    name: str
    lora: LoRARequest | None


def shorten_name(failure: ErrorResponse, name: str | None) -> None:
    """Shorten a long model name in vLLM's error."""
    if name is not None and len(name) > MAX_NAME:
        failure.error.message = failure.error.message.replace(name, f"{name[:MAX_NAME]}…")


class ServedModels(BaseServing):
    """vLLM's own look-up of model names, so that aliases and adapters (also those loaded later) work as in vLLM."""

    async def resolve(self, name: str | None) -> ResolvedModel:
        """Find the model or adapter with a name; without a name, the served model. NotServedError if neither has that
        name."""
        request = SimpleNamespace(model=name)
        if (failure := await self._check_model(request)) is not None:
            shorten_name(failure, name)
            message = failure.error.message.replace("Valid aliases:", "The served model is called:")
            # vLLM's message lists no adapters.
            adapters = f" Adapters: {', '.join(self.models.lora_requests)}." if self.models.lora_requests else ""
            kind = NotServedError if failure.error.code == 404 else RequestError
            raise kind(f"{message}{adapters}", "model")
        lora = self._maybe_get_adapters(request)
        return ResolvedModel(self.models.model_name(lora), lora)

    async def engine_options(self, raw_request: Request, model: ResolvedModel) -> dict[str, Any]:
        """Arguments of vLLM's `generate`: the model's adapter, and those that vLLM's own routes read from a request's
        headers."""
        return {
            "lora_request": model.lora,
            "trace_headers": await self._get_trace_headers(raw_request.headers),
            "priority": GenerateBaseServing._get_priority(SimpleNamespace(priority=0), raw_request),
            "data_parallel_rank": GenerateBaseServing._get_data_parallel_rank(raw_request),
            "session_id": GenerateBaseServing._get_session_id_from_headers(raw_request),
        }
