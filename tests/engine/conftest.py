"""One engine for all tests of this folder that do not need one of their own: it takes half a minute to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import LLM

from scoremode_server import enable
from scoremode_server.kernels.working_memory import LogitsShape, block_bytes, row_bytes_fused

CHUNK = 7
BLOCK = block_bytes(LogitsShape(1024, 4))
SMALL_BUDGET = BLOCK + CHUNK * row_bytes_fused(LogitsShape(1024, 4), 5, 1)
"""Seven rows of 1,024 float32 logits with six tokens' results, and of one token's no more than that."""
STEP_TOKENS = 48
LENGTH = 192
MAX_LOGPROBS = 5


@pytest.fixture(scope="package", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # Lets `collective_rpc` send functions.
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        # Restored at the end, whatever `enable` makes of it.
        patch.setenv("VLLM_PLUGINS", "")
        enable()
        yield


@pytest.fixture(scope="package")
def llm(random_model: Path, environment: None) -> Iterator[LLM]:
    """`random_model` in float32, whose steps hold 48 tokens and whose working memory holds 7 rows of logprobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCOREMODE_LOGPROB_BYTES", str(SMALL_BUDGET))
        engine = LLM(
            str(random_model),
            dtype="float32",
            max_model_len=LENGTH,
            max_num_seqs=4,
            max_num_batched_tokens=STEP_TOKENS,
            max_logprobs=MAX_LOGPROBS,
            enable_prefix_caching=True,
            enforce_eager=True,
        )
    yield engine
    engine.llm_engine.engine_core.shutdown()
