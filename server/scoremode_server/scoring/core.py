"""The objects that all routes share."""

import hmac
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from vllm.engine.protocol import EngineClient

from scoremode.wire.protocol import Lane, ServerInfo
from scoremode_server.engine.admission import Admission
from scoremode_server.http.responses import AnswerSpace
from scoremode_server.scoring.conversations import Conversations
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.model_identity import ModelIdentity
from scoremode_server.scoring.scorer import Scorer
from scoremode_server.scoring.tokenizer import Tokenizer
from scoremode_server.vllm_compat.served_models import ResolvedModel, ServedModels


@dataclass(slots=True)
class Core:
    """Holds what all routes share, as `app.state.scoremode`. Made once when an API server starts."""

    client: EngineClient
    """vLLM's engine client."""
    scorer: Scorer
    tokenizer: Tokenizer
    conversations: Conversations
    models: ServedModels
    limits: Limits
    info: ServerInfo
    identity: ModelIdentity
    owner_key: bytes | None
    """A secret of this process that hides API keys in owners' names; None if the server has no API keys."""
    lanes: Mapping[Lane, int]
    """The lanes that the engine has, with the `ScoreSettings.chunk` of each: see `served_lanes`."""
    answers: AnswerSpace = field(default_factory=AnswerSpace)

    @property
    def admission(self) -> Admission:
        return self.scorer.engine.admission

    def owner(self, headers: Mapping[str, str]) -> str:
        """Name the owner of a request, by the API key in its headers. On a server without keys all requests have the
        same owner."""
        key = headers.get("Authorization", "").encode()
        return "" if self.owner_key is None else hmac.new(self.owner_key, key, "sha256").hexdigest()


@asynccontextmanager
async def prepare(
    raw_request: Request, model: str | None
) -> AsyncGenerator[tuple[Core, ResolvedModel, dict[str, Any]], None]:
    """Check that the server is not full. Yields the core, the resolved model and further arguments of the engine's
    `generate`. Work inside this context, such as tokenizing, ends when the server stops."""
    core: Core = raw_request.app.state.scoremode
    core.admission.check()
    async with core.admission.until_stopped():
        served = await core.models.resolve(model)
        yield core, served, await core.models.engine_options(raw_request, served)
