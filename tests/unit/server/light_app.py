"""Scoremode's routes and vLLM's error handlers on the fake engine, without a model, and requests to them."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.datastructures import State
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from scoremode_server.app import start_extensions
from scoremode_server.completions import routes
from scoremode_server.engine.admission import EngineSize
from scoremode_server.engine.engine import ScoringEngine
from scoremode_server.engine.store import RowStore
from scoremode_server.metrics import Metrics
from scoremode_server.plugin import ScoremodeEndpoints
from scoremode_server.scoring.conversations import Conversations
from scoremode_server.scoring.core import Core
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.scorer import Pacer, Scorer
from scoremode_server.scoring.tokenizer import Tokenizer
from scoremode_server.settings import MAX_REQUEST_BYTES, MAX_SEQUENCES, REFERENCE_VARIABLE, WORKER_EXTENSION
from scoremode_server.vllm_compat.served_models import ServedModels
from tests.unit.server.engine.cache_setup import LARGE
from tests.unit.server.engine.fake_engine import MAX_TOP, VOCABULARY, FakeEngine, HeldEngine

BLOCK_SIZE = 16
MODEL = SimpleNamespace(max_model_len=2048)


def light_app(
    engine: FakeEngine | None = None,
    *,
    max_request_bytes: int = MAX_REQUEST_BYTES,
    size: EngineSize = LARGE,
    tokenizer: Any = None,
) -> FastAPI:
    """The app. A request that vLLM's own routes would answer fails with 500."""
    engine = engine or FakeEngine(BLOCK_SIZE)
    renderer = SimpleNamespace(tokenizer=tokenizer)
    scoring = ScoringEngine(engine, RowStore(BLOCK_SIZE, 1 << 20), Metrics(0, CollectorRegistry()), size)
    client = SimpleNamespace(model_config=MODEL, renderer=renderer, input_processor=None)
    # Routes find all that they use in their app's state, so apps share them: FastAPI needs 30 ms to make them.
    app = copy(_app_with_default_flags())
    app.state = State({"args": app.state.args})
    app.state.scoremode = core = Core(
        client=engine,
        scorer=Scorer(scoring, Pacer()),
        tokenizer=Tokenizer(renderer),
        models=ServedModels(OpenAIServingModels(client, [BaseModelPath("m", "m")]), MODEL),
        limits=Limits(MODEL.max_model_len, VOCABULARY, MAX_TOP, MAX_SEQUENCES, max_request_bytes),
        conversations=None,
        info=SimpleNamespace(prefix_token_id=0, chunk_token_id=None),
        identity=getattr(engine, "identity", None),
        owner_key=None,
        lanes={"prefill": 0, "decode": 1},
    )
    _start_extensions(core, app.state)
    return app


def _start_extensions(core: Core, state: State) -> None:
    """As the plugin does, with the engine's folder for references, if it has one."""
    with patch.dict(os.environ, {REFERENCE_VARIABLE: str(core.client.reference_root)}):
        start_extensions(core, state)


def app_with_flags(**flags: Any) -> FastAPI:
    """An app with the plugin's routes, as vLLM makes it with these flags."""
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False, **flags)
    ScoremodeEndpoints().attach_router(app)
    init_exception_handler(app)
    return app


@cache
def _app_with_default_flags() -> FastAPI:
    return app_with_flags(api_key=None)


def app_with_completions(model: Path, size: EngineSize = LARGE, engine: HeldEngine | None = None) -> FastAPI:
    """The app with our handlers of completions and of token ids around vLLM's. Its engine is not held."""
    model_config = ModelConfig(str(model), dtype="float32")
    config, engine = VllmConfig(model_config=model_config), engine or HeldEngine(BLOCK_SIZE)
    config.parallel_config.worker_extension_cls = WORKER_EXTENSION
    engine.let_go.set()
    # vLLM's handlers use these attributes of an engine client.
    engine.vllm_config, engine.model_config, engine.input_processor = config, model_config, None
    engine.errored, engine.is_running, engine.is_tracing_enabled = False, True, AsyncMock(return_value=False)
    engine.check_admission, engine.renderer = Mock(), renderer_from_config(config)
    app = app_with_flags(api_key=None)
    app.include_router(routes.generate_router)
    core = app.state.scoremode = light_app(engine, size=size).state.scoremode
    models = OpenAIServingModels(engine, [BaseModelPath("m", "m")])
    renderer = OnlineRenderer(
        model_config,
        engine.renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
    core.limits, core.tokenizer = Limits.from_model(model_config), Tokenizer(engine.renderer)
    core.conversations = Conversations(renderer, model_config, core.limits, Metrics(0, CollectorRegistry()))
    app.state.openai_serving_completion = OpenAIServingCompletion(
        engine, models, online_renderer=renderer, request_logger=None
    )
    app.state.serving_tokens = ServingTokens(engine, models, renderer, request_logger=None)
    _start_extensions(core, app.state)
    return app


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client; nothing may be left in the engine at the end."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://light", timeout=60) as client:
        yield client
    admission = app.state.scoremode.admission
    assert (admission.num_sequences, admission.num_tokens, admission.num_running) == (0, 0, 0)


async def ask(app: Any, path: str, *, method: str = "GET", root_path: str = "", headers: Any = ()) -> httpx.Response:
    """The answer to a path as it is written: httpx would tidy it up."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
    async with httpx.AsyncClient(transport=transport) as client:
        return await client.request(
            method, httpx.URL("http://light").copy_with(raw_path=path.encode()), headers=headers
        )


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    """Status, field, message."""
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def check_error(answer: httpx.Response, status: int, param: str | None, part: str) -> None:
    """Check an error's status, its field, and a part of its message."""
    *found, message = error_of(answer)
    assert found == [status, param]
    assert part in message


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def leaving(
    app: FastAPI,
    path: str,
    body: dict[str, Any] | None,
    leave: asyncio.Event,
    request_id: str = "",
    read: Any = None,
    method: str = "POST",
) -> list[dict[str, Any]]:
    """Return the messages sent to a client that disconnects after its request, and that calls `read` for each part of
    the body."""
    requests, sent = [{"type": "http.request", "body": json.dumps(body).encode()}], []

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if read is not None and message["type"] == "http.response.body":
            await read()

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
    }
    await app(scope, receive, send)
    return sent
