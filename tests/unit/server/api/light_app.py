"""An app with Scoremode's routes and vLLM's error handlers, on the fake engine: everything but a model, a tokenizer and
vLLM's completions."""

from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.datastructures import State
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from scoremode_server.app import ReferenceParts
from scoremode_server.metrics import Metrics
from scoremode_server.plugin import ScoremodeEndpoints
from scoremode_server.prefix_cache.admission import EngineSize
from scoremode_server.prefix_cache.engine import ScoringEngine
from scoremode_server.prefix_cache.store import RowStore
from scoremode_server.references.manifest import ModelIdentity
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.scorer import Scorer
from scoremode_server.scoring.tokenizer import Tokenizer
from scoremode_server.scoring.turns import Turns
from scoremode_server.settings import MAX_REQUEST_BYTES, MAX_SEQUENCES
from scoremode_server.vllm_patches.served_models import ServedModels
from tests.unit.server.prefix_cache.cache_setup import LARGE
from tests.unit.server.prefix_cache.fake_engine import MAX_TOP, VOCABULARY, FakeEngine

BLOCK_SIZE = 16
ARGS = SimpleNamespace(log_error_stack=False, api_key=None)
MODEL = SimpleNamespace(max_model_len=2048)
NO_REFERENCES = Path(__file__).parent / "no-references"
"""A folder that is not there."""
IDENTITY = ModelIdentity(
    model="m",
    revision=None,
    dtype="float32",
    quantization=None,
    scoremode_version="0",
    vllm_version="0",
    fingerprint="",
    tokenizer_fingerprint="",
)


def no_references(scoring: ScoringEngine, turns: Turns) -> ReferenceParts:
    """What a server has whose folder for references is empty."""
    return ReferenceParts.of(NO_REFERENCES, FakeEngine(BLOCK_SIZE, "v2"), scoring, turns, IDENTITY)


def light_app(
    max_request_bytes: int = MAX_REQUEST_BYTES,
    engine: FakeEngine | None = None,
    references: Callable[[ScoringEngine, Turns], ReferenceParts] | None = None,
    size: EngineSize = LARGE,
    tokenizer: Any = None,
) -> FastAPI:
    """The app; a request that vLLM would have to answer fails with 500."""
    app = copy(_app_without_state())
    app.state = State()
    app.state.args = ARGS
    app.state.scoremode = _state(max_request_bytes, engine or FakeEngine(BLOCK_SIZE, "v2"), references, size, tokenizer)
    return app


@cache
def _app_without_state() -> FastAPI:
    """Made once, because FastAPI takes 30 ms for the routes, which find all that they use in an app's state."""
    app = FastAPI()
    app.state.args = ARGS
    ScoremodeEndpoints().attach_router(app)
    init_exception_handler(app)
    return app


def _state(max_request_bytes: int, engine: FakeEngine, references: Any, size: EngineSize, tokenizer: Any) -> Any:
    renderer = SimpleNamespace(tokenizer=tokenizer)
    scoring = ScoringEngine(engine, RowStore(BLOCK_SIZE, 1 << 20), Metrics(0, CollectorRegistry()), size)
    turns = Turns()
    client = SimpleNamespace(model_config=MODEL, renderer=renderer, input_processor=None)
    models = OpenAIServingModels(client, [BaseModelPath("m", "m")])
    return SimpleNamespace(
        scorer=Scorer(scoring, turns),
        tokenizer=Tokenizer(renderer),
        models=ServedModels(models, MODEL),
        limits=Limits(MODEL.max_model_len, VOCABULARY, MAX_TOP, MAX_SEQUENCES, max_request_bytes),
        info=SimpleNamespace(prefix_token_id=0, chunk_token_id=None),
        admission=scoring.admission,
        references=references and references(scoring, turns),
        owner=lambda request: "",
    )
