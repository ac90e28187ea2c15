"""Our handlers of completions and of token ids around vLLM's, on the fake engine."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.scale_out.token_in_token_out import api_router
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from scoremode_server.api.generate import is_served, router
from scoremode_server.completions import response_parts
from scoremode_server.completions.generate import ROUTE, ScoringGenerate, read_generate_request
from scoremode_server.completions.handler import ScoringCompletions
from scoremode_server.completions.logprobs_json import LogprobsWriter
from scoremode_server.completions.requests import CompletionReader
from scoremode_server.errors import RequestError
from scoremode_server.metrics import Metrics
from scoremode_server.prefix_cache.admission import EngineSize
from scoremode_server.prefix_cache.engine import ScoringEngine
from scoremode_server.prefix_cache.store import RowStore
from scoremode_server.scoring.token_strings import TokenStrings
from scoremode_server.scoring.turns import Turns
from tests.unit.server.api.calls import client_of, error_of
from tests.unit.server.api.light_app import light_app
from tests.unit.server.prefix_cache.cache_setup import LARGE
from tests.unit.server.prefix_cache.fake_engine import HeldEngine

ECHO = {"prompt": [[5, 6, 7], [8, 9]], "echo": True, "logprobs": 1, "max_tokens": 1}
TRL = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2}
SKYRL = {"prompt": [[5, 6, 7]], "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
PRIME_RL = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1, "logprobs": 1}}


class Engine(HeldEngine):
    """Also what vLLM's handlers ask of an engine client."""

    errored, is_running = False, True

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(16, "v2")
        self.vllm_config, self.model_config, self.input_processor = config, config.model_config, None
        self.renderer = renderer_from_config(config)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None: ...

    async def is_tracing_enabled(self) -> bool:
        return False


class Handlers:
    """Both; each request has the `X-Request-Id` "the same"."""

    def __init__(self, config: VllmConfig, size: EngineSize = LARGE) -> None:
        engine = self.engine = Engine(config)
        models = OpenAIServingModels(engine, [BaseModelPath("m", "m")])
        chat = {"chat_template": None, "chat_template_content_format": "auto"}
        renderer = OnlineRenderer(engine.model_config, engine.renderer, request_logger=None, **chat)
        self.scoring = ScoringEngine(engine, RowStore(16, 0), Metrics(0, CollectorRegistry()), size)
        writer = LogprobsWriter(TokenStrings(lambda: engine.renderer.tokenizer), self.scoring.block_size)
        stock = OpenAIServingCompletion(engine, models, online_renderer=renderer, request_logger=None)
        self._completions = ScoringCompletions(stock, self.scoring, writer, Turns())
        tokens = ServingTokens(engine, models, renderer, request_logger=None)
        self.generate = ScoringGenerate(tokens, self.scoring, writer)

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        raw_request = Request({"type": "http", "headers": [(b"x-request-id", b"the same")], "state": {}})
        content = json.dumps(body).encode()
        answer = (
            await self.generate.generate(read_generate_request(content), raw_request, "")
            if "token_ids" in body
            else await self._completions.create_completion(CompletionReader().read(content), raw_request, "")
        )
        return orjson.loads(answer if isinstance(answer, bytes) else b"".join([part async for part in answer]))


@pytest.fixture(scope="module")
def config(random_model: Path) -> VllmConfig:
    return VllmConfig(model_config=ModelConfig(str(random_model), dtype="float32"))


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize("body", [ECHO, PRIME_RL], ids=["completions", "generate"])
async def test_a_client_that_leaves_aborts_no_request_of_the_same_id(config, body):
    handlers = Handlers(config)
    leaves = asyncio.create_task(handlers.answer(body))
    await settle()
    of_leaving = set(handlers.engine.inside)
    stays = asyncio.create_task(handlers.answer(body))
    await settle()
    assert len(set(handlers.engine.inside)) == handlers.engine.num_running == 2 * len(of_leaving)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    assert handlers.engine.num_running == len(of_leaving)
    assert {each for call in handlers.engine.aborted for each in call} <= of_leaving
    handlers.engine.let_go.set()
    answer = await stays
    assert answer.get("id", answer.get("request_id")).endswith("-the same")


@pytest.mark.parametrize("body", [ECHO, TRL, SKYRL, PRIME_RL, TRL | {"logprobs": 1}, ECHO | {"prompt_logprobs": 3}])
async def test_a_large_response_is_written_in_parts_and_is_the_same(config, monkeypatch, body):
    handlers = Handlers(config)
    handlers.engine.let_go.set()
    at_once = await handlers.answer(body)
    monkeypatch.setattr(response_parts, "WRITTEN_AT_ONCE", 0)
    in_parts = await handlers.answer(body)
    assert in_parts | {"created": 0} == at_once | {"created": 0}


async def test_a_request_moved_between_engines_keeps_the_id_that_they_know(config):
    handlers = Handlers(config)
    handlers.engine.let_go.set()
    await handlers.answer(ECHO | {"kv_transfer_params": {"do_remote_decode": True}})
    assert handlers.engine.inside == ["cmpl-the same-0", "cmpl-the same-1"]


async def test_too_many_tokens_are_refused_with_the_field_s_name(config):
    small = EngineSize(tokens=3072, sequences=192, max_scoring_tokens=2)
    with pytest.raises(RequestError, match="3 tokens to score") as refused:
        await Handlers(config, small).answer(PRIME_RL)
    assert (refused.value.status, refused.value.param) == (413, "token_ids")


async def test_the_generate_route_tells_vllm_which_fields_were_left_out(config, monkeypatch):
    """Without `max_tokens` vLLM generates as many as there is room for, and not 16."""
    given = []

    async def generated(request: GenerateRequest, raw_request: Request) -> JSONResponse:
        given.append([request.is_sampling_param_provided(name) for name in ("max_tokens", "temperature")])
        return JSONResponse({})

    monkeypatch.setattr(api_router, "generate", generated)
    handlers, app = Handlers(config), FastAPI()
    handlers.engine.let_go.set()
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.scoremode = SimpleNamespace(
        generate=handlers.generate,
        admission=handlers.scoring.admission,
        limits=SimpleNamespace(max_request_bytes=200),
        owner=lambda request: "",
    )
    init_exception_handler(app)
    app.include_router(router)
    async with client_of(app) as client:
        await client.post(ROUTE, json=PRIME_RL | {"sampling_params": {"temperature": 0}})
        assert given == [[False, True]]
        first, second, third = (await client.post(ROUTE, json=PRIME_RL)).json()["prompt_logprobs"]
        assert (first, next(iter(second)), next(iter(third))) == (None, "6", "7")
        assert error_of(await client.post(ROUTE, json=PRIME_RL | {"model": "x"}))[:2] == (404, "model")
        assert error_of(await client.post(ROUTE, json=PRIME_RL | {"token_ids": [5, -1]}))[:2] == (400, "token_ids")
        assert error_of(await client.post(ROUTE, json=PRIME_RL | {"token_ids": [5] * 100}))[:2] == (413, None)


def test_the_generate_route_exists_where_vllm_serves_it():
    """Without `--enable-scale-out` vLLM's own refuses, and stays."""
    served, refused = FastAPI(), FastAPI()
    served.include_router(api_router.router)
    refused.add_api_route(ROUTE, lambda: None, methods=["POST"])
    assert is_served(served)
    assert not is_served(refused)
    assert ROUTE not in {route.path for route in light_app().routes if isinstance(route, APIRoute)}
