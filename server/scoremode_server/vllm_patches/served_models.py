"""Which model or LoRA adapter a request names."""

from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace

from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.lora.request import LoRARequest

from scoremode_server.errors import RequestError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests can name, with the adapter to run where it is one."""

    name: str
    lora: LoRARequest | None


class ServedModels(BaseServing):
    """vLLM's own look-up of model names, so that aliases and adapters (also those loaded later) work as in vLLM."""

    async def resolve(self, name: str | None) -> ServedModel:
        """The model of that name, or the served one.

        Raises:
            RequestError: there is none (404).
        """
        request = SimpleNamespace(model=name)
        if (failure := await self._check_model(request)) is not None:
            raise RequestError(failure.error.message, "model", HTTPStatus(failure.error.code))
        lora = self._maybe_get_adapters(request)
        return ServedModel(self.models.model_name(lora), lora)
