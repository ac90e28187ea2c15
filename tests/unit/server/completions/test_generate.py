"""Our answers on vLLM's generate route, by vLLM's handler, on the fake engine."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from starlette.requests import Request
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.scale_out.token_in_token_out import api_router
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from scoremode_server.api.generate import is_served, router
from scoremode_server.completions import response_parts
from scoremode_server.completions.generate import ROUTE, ScoringGenerate, is_scoring, read_generate_request
from scoremode_server.completions.logprobs_json import LogprobsWriter
from scoremode_server.errors import RequestError
from scoremode_server.metrics import Metrics
from scoremode_server.prefix_cache.admission import EngineSize
from scoremode_server.prefix_cache.engine import ScoringEngine
from scoremode_server.prefix_cache.store import RowStore
from scoremode_server.scoring.token_strings import TokenStrings
from tests.unit.server.api.light_app import light_app
from tests.unit.server.completions.test_handler import Engine, online_renderer, settle
from tests.unit.server.prefix_cache.cache_setup import LARGE
from tests.unit.server.prefix_cache.fake_engine import expected_rows

BODY = {"model": "m", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}


@pytest.fixture(scope="module")
def config(random_model: Path) -> VllmConfig:
    return VllmConfig(model_config=ModelConfig(str(random_model), dtype="float32"))


class Generate:
    """The handler; each request has the `X-Request-Id` "the same"."""

    def __init__(self, config: VllmConfig, size: EngineSize = LARGE) -> None:
        self.engine = Engine(config)
        models = OpenAIServingModels(self.engine, [BaseModelPath("m", "m")])
        stock = ServingTokens(self.engine, models, online_renderer(self.engine), request_logger=None)
        self.scoring = ScoringEngine(self.engine, RowStore(16, 1 << 20), Metrics(0, CollectorRegistry()), size)
        writer = LogprobsWriter(TokenStrings(lambda: self.engine.renderer.tokenizer), self.scoring.block_size)
        self.handler = ScoringGenerate(stock, self.scoring, writer)

    async def answer(self, **fields: Any) -> Any:
        request = read_generate_request(json.dumps(BODY | fields).encode())
        scope = {"type": "http", "headers": [(b"x-request-id", b"the same")], "state": {}}
        return await self.handler.generate(request, Request(scope), "")


async def test_prompt_logprobs_are_in_vllms_answer(config: VllmConfig):
    generate = Generate(config)
    generate.engine.let_go.set()
    answer = orjson.loads(await generate.answer())
    assert answer["request_id"] == "generate-tokens-the same"
    assert answer["model"] == "m"
    assert answer["choices"][0]["token_ids"] == [7]
    assert answer["usage"]["prompt_tokens"] == 3
    ids, logprobs, _ = expected_rows([5, 6, 7], 2)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [list(position) for position in others] == [[str(token_id) for token_id in row] for row in ids]
    assert [position[str(row[0])]["logprob"] for position, row in zip(others, ids, strict=True)] == logprobs[
        :, 0
    ].tolist()


async def test_the_sampled_tokens_logprobs_are_vllms(config: VllmConfig):
    generate = Generate(config)
    generate.engine.let_go.set()
    answer = orjson.loads(await generate.answer(sampling_params={"max_tokens": 1, "prompt_logprobs": 0, "logprobs": 1}))
    (content,) = answer["choices"][0]["logprobs"]["content"]
    assert content["token_id"] == 7
    assert content["rank"] >= 1


async def test_a_client_that_leaves_aborts_its_request_alone(config: VllmConfig):
    generate = Generate(config)
    leaves = asyncio.create_task(generate.answer())
    await settle()
    of_leaving = set(generate.engine.inside)
    stays = asyncio.create_task(generate.answer())
    await settle()
    leaves.cancel()
    await settle()
    assert len(set(generate.engine.inside)) == 2
    generate.engine.let_go.set()
    assert len(orjson.loads(await stays)["prompt_logprobs"]) == 3
    assert of_leaving


async def test_a_model_that_is_not_served_is_vllms_to_refuse(config: VllmConfig):
    refusal = await Generate(config).answer(model="gpt-5")
    assert (refusal.error.code, refusal.error.param) == (404, "model")


async def test_more_tokens_than_may_wait_are_refused_by_the_fields_name(config: VllmConfig):
    small = EngineSize(tokens=3072, sequences=192, max_scoring_tokens=2)
    with pytest.raises(RequestError, match="3 tokens to score") as refused:
        await Generate(config, small).answer()
    assert (refused.value.status, refused.value.param) == (413, "token_ids")


@pytest.mark.parametrize(
    ("change", "scores"),
    [
        ({}, True),
        ({"sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.7, "logprobs": 1}}, True),
        ({"return_token_ids": True, "cache_salt": "s"}, True),
        ({"sampling_params": {"max_tokens": 1}}, False),
        ({"sampling_params": {"max_tokens": 2, "prompt_logprobs": 1}}, False),
        # vLLM then generates as many as there is room for.
        ({"sampling_params": {"prompt_logprobs": 1}}, False),
        ({"sampling_params": {"max_tokens": 1, "prompt_logprobs": -1}}, False),
        ({"sampling_params": {"max_tokens": 1, "prompt_logprobs": 1, "detokenize": False}}, False),
        ({"stream": True}, False),
        ({"output_mode": "text"}, False),
    ],
)
def test_what_is_answered_here(change: dict[str, Any], scores: bool):
    assert is_scoring(read_generate_request(json.dumps(BODY | change).encode())) is scores


@pytest.mark.parametrize("change", [{}, {"token_ids": [5, "6"]}, {"token_ids": [5.0, True]}, {"priority": 1}], ids=str)
def test_a_body_is_read_as_vllms_model_reads_it(change: dict[str, Any]):
    body = BODY | change
    request, expected = read_generate_request(json.dumps(body).encode()), GenerateRequest.model_validate(body)
    assert request.model_dump(exclude={"request_id"}) == expected.model_dump(exclude={"request_id"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [5, "six"]}, r"token_ids\[1\] must be a token id, not a string"),
        ({"token_ids": [5, 6.5]}, r"token_ids\[1\] must be a token id, not a float"),
        ({"token_ids": [5, "6"], "sampling_params": None}, "sampling_params"),
        (
            {"token_ids": [5, "6"], "output_mode": "text", "sampling_params": {"max_tokens": 1, "detokenize": False}},
            "output_mode='text' requires",
        ),
        # vLLM's model would take them, but slowly.
        ({"token_ids": [5, "6"] * 20_000}, r"token_ids\[1\] must be a token id, not a string"),
        ({"token_ids": [5, -1]}, "must not contain negative values"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"sampling_params": {"max_tokens": "one"}}, "sampling_params"),
        ({"sampling_params": None}, "sampling_params"),
    ],
)
def test_bodies_that_are_refused(change: dict[str, Any], message: str):
    with pytest.raises((RequestError, ValidationError), match=message):
        read_generate_request(json.dumps(BODY | change).encode())


@pytest.fixture
def client(config: VllmConfig) -> httpx.AsyncClient:
    """Of an app with our route alone."""
    fake = Generate(config)
    fake.engine.let_go.set()
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)
    app.include_router(router)
    app.state.scoremode = SimpleNamespace(
        generate=fake.handler,
        admission=fake.scoring.admission,
        limits=SimpleNamespace(max_request_bytes=200),
        owner=lambda request: "",
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_a_large_answer_is_sent_in_parts(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch):
    at_once = await client.post(ROUTE, json=BODY)
    monkeypatch.setattr(response_parts, "WRITTEN_AT_ONCE", 0)
    in_parts = await client.post(ROUTE, json=BODY)
    assert "content-length" in at_once.headers
    assert "content-length" not in in_parts.headers
    assert in_parts.headers["content-type"] == at_once.headers["content-type"] == "application/json"
    assert in_parts.json()["prompt_logprobs"] == at_once.json()["prompt_logprobs"]


async def test_vllm_is_told_what_the_client_has_left_out(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch):
    """Where there is no `max_tokens`, it generates as many as there is room for, and not 16."""
    given = []

    async def generated(request: GenerateRequest, raw_request: Request) -> JSONResponse:
        given.append([request.is_sampling_param_provided(name) for name in ("max_tokens", "temperature")])
        return JSONResponse({})

    monkeypatch.setattr(api_router, "generate", generated)
    await client.post(ROUTE, json=BODY | {"sampling_params": {"temperature": 0}})
    assert given == [[False, True]]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"token_ids": [5, -1]}, 400, "token_ids"),
        ({"token_ids": None}, 400, "token_ids"),
        ({"sampling_params": {"max_tokens": "one"}}, 400, "sampling_params"),
        ({"model": "gpt-5"}, 404, "model"),
        ({"token_ids": [5] * 100}, 413, None),
    ],
)
async def test_a_refusal_names_the_field(
    client: httpx.AsyncClient, change: dict[str, Any], status: int, param: str | None
):
    response = await client.post(ROUTE, json=BODY | change)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_the_route_is_there_where_vllm_serves_it():
    """Without `--enable-scale-out` vLLM has one that refuses, and it stays."""
    served, refused = FastAPI(), FastAPI()
    served.include_router(api_router.router)
    refused.add_api_route(ROUTE, lambda: None, methods=["POST"])
    assert is_served(served)
    assert not is_served(refused)
    assert ROUTE not in {route.path for route in light_app().routes if isinstance(route, APIRoute)}
