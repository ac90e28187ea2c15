"""Our handler of completions around vLLM's, on the fake engine."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from scoremode_server.completions import response_parts
from scoremode_server.completions.handler import ScoringCompletions
from scoremode_server.completions.logprobs_json import LogprobsWriter
from scoremode_server.metrics import Metrics
from scoremode_server.prefix_cache.engine import ScoringEngine
from scoremode_server.prefix_cache.store import RowStore
from scoremode_server.scoring.token_strings import TokenStrings
from scoremode_server.scoring.turns import Turns
from tests.unit.server.prefix_cache.cache_setup import LARGE
from tests.unit.server.prefix_cache.fake_engine import HeldEngine, expected_rows

SCORING = {"prompt": [[5, 6, 7], [8, 9]], "echo": True, "logprobs": 1, "max_tokens": 1}


class Engine(HeldEngine):
    """Also what vLLM's handler asks of an engine client."""

    errored, is_running = False, True

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(16, "v2")
        self.vllm_config, self.model_config, self.input_processor = config, config.model_config, None
        self.renderer = renderer_from_config(config)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None: ...

    async def is_tracing_enabled(self) -> bool:
        return False


def online_renderer(engine: Engine) -> OnlineRenderer:
    return OnlineRenderer(
        engine.model_config,
        engine.renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )


@pytest.fixture(scope="module")
def config(random_model: Path) -> VllmConfig:
    return VllmConfig(model_config=ModelConfig(str(random_model), dtype="float32"))


class Completions:
    """The handler; each request has the `X-Request-Id` "the same"."""

    def __init__(self, config: VllmConfig) -> None:
        self.engine = Engine(config)
        models = OpenAIServingModels(self.engine, [BaseModelPath("m", "m")])
        stock = OpenAIServingCompletion(
            self.engine, models, online_renderer=online_renderer(self.engine), request_logger=None
        )
        scoring = ScoringEngine(self.engine, RowStore(16, 0), Metrics(0, CollectorRegistry()), LARGE)
        writer = LogprobsWriter(TokenStrings(lambda: self.engine.renderer.tokenizer), scoring.block_size)
        self._handler = ScoringCompletions(stock, scoring, writer, Turns())

    async def create(self, only: dict[str, Any] = SCORING, **fields: Any) -> Any:
        scope = {"type": "http", "headers": [(b"x-request-id", b"the same")], "state": {}}
        answer = await self._handler.create_completion(CompletionRequest(**only | fields), Request(scope), "")
        return orjson.loads(answer if isinstance(answer, bytes) else b"".join([part async for part in answer]))


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_a_client_that_leaves_aborts_no_request_of_the_same_id(config: VllmConfig):
    completions = Completions(config)
    leaves = asyncio.create_task(completions.create())
    await settle()
    of_leaving = set(completions.engine.inside)
    stays = asyncio.create_task(completions.create())
    await settle()
    leaves.cancel()
    await settle()
    assert [set(call) for call in completions.engine.aborted] == [of_leaving]
    assert len(set(completions.engine.inside)) == 4
    completions.engine.let_go.set()
    answer = await stays
    assert answer["id"] == "cmpl-the same"
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]] == [4, 3]


TRL = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2}
SKYRL = {"prompt": [[5, 6, 7]], "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}


async def test_without_echo_there_are_prompt_logprobs_and_nothing_else_of_the_prompt(config: VllmConfig):
    completions = Completions(config)
    completions.engine.let_go.set()
    choices = (await completions.create(only=TRL))["choices"]
    assert [choice["prompt_logprobs"][0] for choice in choices] == [None, None]
    assert [list(position) for choice in choices for position in choice["prompt_logprobs"][1:]] == [
        [str(token_id) for token_id in row] for prompt in TRL["prompt"] for row in expected_rows(prompt, 3)[0]
    ]
    assert [(choice["text"], choice["logprobs"], choice["token_ids"]) for choice in choices] == [("", None, None)] * 2


async def test_token_ids_come_where_they_are_asked_for(config: VllmConfig):
    completions = Completions(config)
    completions.engine.let_go.set()
    [choice] = (await completions.create(only=SKYRL))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6, 7], [7])
    assert [position and list(position) for position in choice["prompt_logprobs"]] == [None, ["6"], ["7"]]


async def test_logprobs_without_echo_are_of_the_sampled_token(config: VllmConfig):
    completions = Completions(config)
    completions.engine.let_go.set()
    [choice, _] = (await completions.create(only=TRL | {"logprobs": 1}))["choices"]
    assert choice["logprobs"]["text_offset"] == [0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) == 1
    assert len(choice["logprobs"]["top_logprobs"][0]) == 2


@pytest.mark.parametrize("only", [TRL, SKYRL, SCORING, TRL | {"logprobs": 1}, SCORING | {"prompt_logprobs": 3}])
async def test_a_large_response_is_written_in_parts_and_is_the_same(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, only: dict[str, Any]
):
    completions = Completions(config)
    completions.engine.let_go.set()
    at_once = await completions.create(only=only)
    monkeypatch.setattr(response_parts, "WRITTEN_AT_ONCE", 0)
    in_parts = await completions.create(only=only)
    assert in_parts | {"created": 0} == at_once | {"created": 0}


async def test_a_request_that_is_moved_between_engines_has_the_id_by_which_they_know_it(config: VllmConfig):
    completions = Completions(config)
    completions.engine.let_go.set()
    await completions.create(kv_transfer_params={"do_remote_decode": True})
    assert completions.engine.inside == ["cmpl-the same-0", "cmpl-the same-1"]
