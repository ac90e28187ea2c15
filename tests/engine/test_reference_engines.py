"""References on real engines without a server: a large vocabulary, capped logits, windows that span several steps."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from scoremode.kld import KldPositions
from scoremode.windows import cut_windows
from scoremode_server.app import ReferenceParts
from scoremode_server.metrics import Metrics
from scoremode_server.prefix_cache.engine import EngineSize, ScoringEngine
from scoremode_server.prefix_cache.store import RowStore
from scoremode_server.scoring.model_identity import model_identity
from scoremode_server.scoring.scorer import ScoreSettings
from scoremode_server.scoring.text_windows import TextDocument, TextWindows
from scoremode_server.scoring.turns import Turns
from scoremode_server.settings import REFERENCE_VARIABLE, WORKER_EXTENSION
from tests import models, oracle

VOCABULARY = 262_144
LENGTH, STRIDE, STEP_TOKENS = 96, 48, 40
SIZE = EngineSize(2 * STEP_TOKENS, 8, 100_000)


@asynccontextmanager
async def references_of(model: Path, folder: Path) -> AsyncIterator[tuple[ReferenceParts, ScoringEngine]]:
    """What a server of a model would serve, without the server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(REFERENCE_VARIABLE, str(folder))
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                str(model),
                dtype="float32",
                max_model_len=LENGTH,
                max_num_seqs=4,
                max_num_batched_tokens=STEP_TOKENS,
                enforce_eager=True,
                skip_tokenizer_init=True,
                worker_extension_cls=WORKER_EXTENSION,
            )
        )
    try:
        scoring = ScoringEngine(engine, RowStore(16, 0), Metrics(1, CollectorRegistry()), SIZE)
        yield (
            ReferenceParts.from_folder(folder, engine, scoring, Turns(), model_identity(engine.vllm_config, None)),
            scoring,
        )
    finally:
        engine.shutdown()


def cut(tokens: list[int]) -> TextWindows:
    windows = cut_windows(len(tokens), "sliding", LENGTH, STRIDE)
    return TextWindows("sliding", LENGTH, STRIDE, [TextDocument(tokens, None, windows)])


@pytest.mark.slow
async def test_a_large_vocabulary_with_capped_logits_equals_transformers(tmp_path):
    base = models.random_gemma(tmp_path / "base", seed=1, vocab_size=VOCABULARY)
    other = models.disturbed(base, tmp_path / "other", 0.05)
    tokens = np.random.default_rng(3).integers(3, VOCABULARY, 160).tolist()
    texts = cut(tokens)
    async with references_of(base, tmp_path / "references") as (references, engine):
        async with engine.admission.request() as queue:
            reference = await references.recorder.begin("base", texts)
            settings = ScoreSettings(request_id="record", queue=queue)
            async with aclosing(references.recorder.record(reference, settings)) as windows:
                nlls = [window.nlls async for window in windows]
        await references.recorder.finish(reference, nlls)
        itself = await compared(references, engine)
        assert itself.kld.max() < 1e-6
    async with references_of(other, tmp_path / "references") as (references, engine):
        found = await compared(references, engine)
    sequences = list(texts)
    expected = oracle.divergences(base, other, [tokens for tokens, _ in sequences])
    for name in ("kld", "reverse_kld", "acceptance", "logprobs", "reference_logprobs"):
        theirs = np.concatenate(
            [getattr(each, name)[first - 1 :] for each, (_, first) in zip(expected, sequences, strict=True)]
        )
        oracle.assert_close(getattr(found, name), theirs)
    assert found.kld.mean() > 0.01


async def compared(references: ReferenceParts, engine: ScoringEngine) -> KldPositions:
    """All windows through the engine."""
    reference = await references.stored.open("base")
    await references.comparer.check(reference, VOCABULARY, LENGTH)
    async with engine.admission.request() as queue:
        settings = ScoreSettings(request_id="compare", queue=queue)
        indices = list(range(reference.manifest.text.num_windows))
        async with aclosing(references.comparer.compare(reference, indices, 0, settings)) as windows:
            return KldPositions.concatenate([window.positions async for window in windows])
