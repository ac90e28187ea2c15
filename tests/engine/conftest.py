"""One engine for all tests of this folder that do not need one of their own: it takes half a minute to start."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from scoremode_server import enable
from scoremode_server.kernels.working_memory import LogitsShape, block_bytes, row_bytes_fused
from scoremode_server.settings import LOGPROB_VARIABLE, REFERENCE_VARIABLE, WORKER_EXTENSION

CHUNK = 7
BLOCK = block_bytes(LogitsShape(1024, 4))
SMALL_BUDGET = BLOCK + CHUNK * row_bytes_fused(LogitsShape(1024, 4), 5, 1)
"""Seven rows of 1,024 float32 logits with six tokens' results, and of one token's no more than that."""
STEP_TOKENS = 48
LENGTH = 192
MAX_LOGPROBS = 5


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Set up for each module, so that the modules of other folders, which run in the same process, do not have it."""
    with engine_environment():
        yield


@contextmanager
def engine_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # The worker has a process, and one for the scheduler would take ten seconds more to start.
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # Lets `collective_rpc` send functions.
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        # Restored at the end, whatever `enable` makes of it.
        patch.setenv("VLLM_PLUGINS", "")
        enable()
        yield


def small_engine(model: Path, **settings: Any) -> LLM:
    """An engine of a model in float32."""
    return LLM(str(model), dtype="float32", enforce_eager=True, distributed_executor_backend="mp", **settings)


@pytest.fixture(scope="package")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the engine's references."""
    return tmp_path_factory.mktemp("references")


@pytest.fixture(scope="package")
def llm(random_model: Path, references: Path) -> Iterator[LLM]:
    """`random_model`, whose steps hold 48 tokens, whose working memory holds 7 rows of logprobs, and whose cache holds
    the keys and values of two whole sequences."""
    with engine_environment(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOGPROB_VARIABLE, str(SMALL_BUDGET))
        patch.setenv(REFERENCE_VARIABLE, str(references))
        engine = small_engine(
            random_model,
            max_model_len=LENGTH,
            max_num_seqs=4,
            max_num_batched_tokens=STEP_TOKENS,
            max_logprobs=MAX_LOGPROBS,
            enable_prefix_caching=True,
            worker_extension_cls=WORKER_EXTENSION,
            # Each of 128 tokens, and one of none. A sequence may begin without space for its end.
            num_gpu_blocks_override=5,
            scheduler_reserve_full_isl=False,
        )
    yield engine
    engine.llm_engine.engine_core.shutdown()
