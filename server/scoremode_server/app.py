"""Makes the objects that routes share, once when an API server starts."""

import asyncio
import gc
import secrets
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import vllm
from starlette.datastructures import State
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.envs import enable_envs_cache
from vllm.logger import init_logger

from scoremode.wire.protocol import MAX_CANDIDATES, Bounds, ServerInfo
from scoremode.wire.references import ReferenceRequest
from scoremode_server.completions import routes as completions
from scoremode_server.engine.admission import MAX_WAITING_SEQUENCES, Admission, EngineSize, RequestQueue
from scoremode_server.engine.engine import ScoringEngine, make_store
from scoremode_server.engine.passes import run_engine
from scoremode_server.engine.sequence import EnginePass, ScoreSettings, TokenSequence
from scoremode_server.http import json_fields, page
from scoremode_server.metrics import Metrics
from scoremode_server.references import routes as references
from scoremode_server.scoring import rendering
from scoremode_server.scoring import routes as scoring
from scoremode_server.scoring.conversations import MAX_MESSAGES, Conversations
from scoremode_server.scoring.core import Core
from scoremode_server.scoring.limits import MAX_VALUES, MAX_VALUES_PER_SEQUENCE, Limits
from scoremode_server.scoring.model_files import model_identity
from scoremode_server.scoring.model_identity import ModelIdentity
from scoremode_server.scoring.scorer import Pacer, Scorer, check_engine, served_lanes
from scoremode_server.scoring.tokenizer import Tokenizer
from scoremode_server.settings import BYTES_AHEAD, EXPORTED_BYTES, logprob_bytes
from scoremode_server.threads import drop_canceled
from scoremode_server.vllm_compat.computed_by import what_computes
from scoremode_server.vllm_compat.engine_client import (
    bound_generation_alone,
    drain_before_shutdown,
    drop_canceled_texts,
)
from scoremode_server.vllm_compat.served_models import ServedModels
from scoremode_server.worker.row_spec import guard_rows

# vLLM prints the messages of loggers below its own.
logger = init_logger("vllm.scoremode.app")


def routers(app: Any) -> list[Any]:
    """The routers to include in vLLM's app, in the order of the OpenAPI description. Each route replaces vLLM's route
    of the same path."""
    return [
        *completions.routers(app),
        scoring.router,
        references.router,
        page.router,
    ]


def start_extensions(core: Core, state: State) -> None:
    completions.start(core, state)
    references.start(core, state)


async def start(client: EngineClient, state: State, settings: Namespace, *, has_api_keys: bool) -> None:
    """Make the `Core` of an engine client, and put it into vLLM's app state. ValueError if a setting of the server
    changes what logprobs mean."""
    check_engine(client.vllm_config)
    asyncio.get_running_loop().set_default_executor(drop_canceled(ThreadPoolExecutor()))
    drop_canceled_texts(client)
    limits = Limits.from_model(client.model_config, settings.max_request_sequences, settings.max_request_bytes)
    store = make_store(client.vllm_config, settings.score_cache_bytes)
    metrics = Metrics(logprob_bytes())
    engine = ScoringEngine(client, store, metrics, engine_size(client.vllm_config, settings))
    await _warm_up(client, engine.admission, limits)
    bound_generation_alone(client)
    drain_before_shutdown(client, engine.admission.drain)
    tokenizer = Tokenizer(client.renderer)
    if client.renderer.tokenizer is not None:
        await asyncio.to_thread(tokenizer.strings.fill_vocabulary)
    models = ServedModels(state.openai_serving_models, client.model_config)
    conversations = Conversations(state.online_renderer, client.model_config, limits, metrics)
    identity = await asyncio.to_thread(
        model_identity,
        client.vllm_config,
        client.renderer.tokenizer,
        await what_computes(client),
        conversations.ends,
        conversations.templates(),
        vllm.__version__,
    )
    info = await _server_info(
        client, models, tokenizer, limits, published_bounds(limits, engine.admission.size), identity
    )
    guard_rows(client)
    state.scoremode = core = Core(
        client=client,
        scorer=Scorer(engine, Pacer()),
        tokenizer=tokenizer,
        conversations=conversations,
        models=models,
        limits=limits,
        info=info,
        identity=identity,
        owner_key=secrets.token_bytes(32) if has_api_keys else None,
        lanes=served_lanes(client.vllm_config),
    )
    start_extensions(core, state)
    page_path = "" if settings.no_page else ", /scoremode (in a browser)"
    logger.info("%s can be scored: POST /v1/score, POST /v1/perplexity%s", info.model, page_path)


async def _server_info(
    client: EngineClient,
    models: ServedModels,
    tokenizer: Tokenizer,
    limits: Limits,
    bounds: Bounds,
    identity: ModelIdentity,
) -> ServerInfo:
    return ServerInfo(
        model=(await models.resolve(None)).name,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        max_top_logprobs=limits.max_top_logprobs,
        max_num_seqs=client.vllm_config.scheduler_config.max_num_seqs,
        bos_token_id=tokenizer.special_token_id("bos"),
        eos_token_id=tokenizer.special_token_id("eos"),
        adds_bos=await tokenizer.adds_bos(),
        bounds=bounds,
        **identity.model_dump(exclude={"model", "tokenizer_fingerprint"}),
    )


def published_bounds(limits: Limits, size: EngineSize) -> Bounds:
    """Collect the limits that a client can run into, so that it knows them beforehand."""
    return Bounds(
        request_bytes=limits.max_request_bytes,
        recording_bytes=ReferenceRequest.body_factor * limits.max_request_bytes,
        fields=json_fields.MAX_FIELDS,
        lists=json_fields.MAX_LISTS,
        values=json_fields.MAX_VALUES,
        messages=MAX_MESSAGES,
        sequences=limits.max_sequences,
        waiting_sequences=MAX_WAITING_SEQUENCES,
        scoring_tokens=size.max_scoring_tokens,
        sequence_tokens=limits.max_model_len,
        top_logprobs=limits.max_top_logprobs,
        candidates=MAX_CANDIDATES,
        float_values=MAX_VALUES["float"],
        base64_values=MAX_VALUES["base64"],
        sequence_values=MAX_VALUES_PER_SEQUENCE,
        rendering_requests=rendering.MAX_REQUESTS,
        export_bytes=BYTES_AHEAD,
        all_exports_bytes=EXPORTED_BYTES,
        request_seconds=size.request_timeout,
    )


def engine_size(config: VllmConfig, settings: Namespace) -> EngineSize:
    """Compute how many tokens and sequences the server sends to all replicas of an engine at once."""
    scheduler, num_engines = config.scheduler_config, config.parallel_config.data_parallel_size
    step_tokens = scheduler.max_num_batched_tokens * num_engines
    return EngineSize(
        # This fills all steps in flight and one more, so that the engine never waits for this process.
        tokens=(config.max_concurrent_batches + 1) * step_tokens,
        # A replica's steps in flight have at most `max_num_seqs` sequences. As many more are ready to follow.
        sequences=2 * scheduler.max_num_seqs * num_engines,
        reserved_tokens=step_tokens // 8,
        max_scoring_tokens=settings.max_scoring_tokens,
        request_timeout=settings.request_timeout,
    )


async def _warm_up(client: EngineClient, admission: Admission, limits: Limits) -> None:
    """Score something, so that no user's request waits for kernels to be compiled. Metrics do not count it."""
    for top_logprobs in range(min(1, limits.max_top_logprobs) + 1):
        request_id = f"scoremode-warm-up-{top_logprobs}"
        settings = ScoreSettings(request_id=request_id, queue=RequestQueue(admission), top_logprobs=top_logprobs)
        warm_up = EnginePass(TokenSequence(context=[0, 1, 0])).begin(settings, request_id)
        await run_engine(client, warm_up)
        warm_up.check()


def prepare_process() -> None:
    """Collect garbage less often in this API server process, and read each of vLLM's environment variables once."""
    # At Python's default of 700, collections take 6 % of the event loop's time with 64 requests of 701 tokens in
    # flight.
    gc.set_threshold(20_000)
    enable_envs_cache()
