"""What the routes share, made once when the server starts."""

import asyncio
import importlib.metadata
from dataclasses import dataclass

import vllm
from fastapi import Request
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient

from scoremode.protocol import ServerInfo
from scoremode_server.cache_metrics import CacheMetrics
from scoremode_server.caching import CachingEngine, clear_on_changes, make_cache
from scoremode_server.completions import ScoringCompletions
from scoremode_server.engine.bounded_logprobs import budget_from_environment
from scoremode_server.limits import Limits
from scoremode_server.models import ServedModels
from scoremode_server.scoring import Scorer
from scoremode_server.scoring_metrics import MeteredEngine, ScoringMetrics
from scoremode_server.text import TextCodec
from scoremode_server.turns import Turns


@dataclass(frozen=True, slots=True)
class ScoremodeState:
    """The server's parts; `app.state.scoremode`."""

    scorer: Scorer
    codec: TextCodec
    completions: ScoringCompletions
    models: ServedModels
    limits: Limits
    info: ServerInfo
    max_concurrent_windows: int
    """Windows of one perplexity request that are with the engine at once: as many as it runs in a step."""


async def make_state(engine: EngineClient, state: State, score_cache_bytes: int) -> ScoremodeState:
    """Assemble the parts on an engine and vLLM's own app state, with a logprob cache of at most so many bytes.

    Raises:
        ValueError: the server was started with a setting that makes logprobs something else.
    """
    cache = make_cache(engine.vllm_config, score_cache_bytes)
    metrics = CacheMetrics()
    clear_on_changes(engine, cache, metrics.update)
    caching = CachingEngine(engine, cache, metrics.update)
    # Users' requests only: the warm-up goes past it.
    metered = MeteredEngine(caching, ScoringMetrics(budget_from_environment()))
    codec = TextCodec(engine.renderer)
    if engine.renderer.tokenizer is not None:
        await asyncio.to_thread(codec.strings.fill_vocabulary)
    models = ServedModels(state.openai_serving_models, engine.model_config)
    limits = Limits.of(engine.model_config)
    turns = Turns()
    await _warm_up(Scorer(caching, turns), limits)
    info = ServerInfo(
        scoremode_version=importlib.metadata.version("scoremode"),
        vllm_version=vllm.__version__,
        model=(await models.resolve(None)).name,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        max_top_logprobs=limits.max_top_logprobs,
        bos_token_id=codec.bos_token_id,
        eos_token_id=codec.eos_token_id,
        adds_bos=await codec.adds_bos(),
        dtype=str(engine.model_config.dtype).removeprefix("torch."),
        quantization=engine.model_config.quantization,
    )
    return ScoremodeState(
        scorer=Scorer(metered, turns),
        codec=codec,
        completions=ScoringCompletions.like(state.openai_serving_completion, metered, codec.strings, turns),
        models=models,
        limits=limits,
        info=info,
        max_concurrent_windows=engine.vllm_config.scheduler_config.max_num_seqs,
    )


async def _warm_up(scorer: Scorer, limits: Limits) -> None:
    """Score something, so that kernels which are compiled on first use are not compiled in a user's first request."""
    for top_logprobs in range(min(1, limits.max_top_logprobs) + 1):
        await scorer.score(
            [0, 1, 0], request_id=f"scoremode-warm-up-{top_logprobs}", top_logprobs=top_logprobs, use_cache=False
        )


def scoremode_state(request: Request) -> ScoremodeState:
    """The state of the app that a request came to."""
    state: ScoremodeState = request.app.state.scoremode
    return state
