"""What is read off a server's log: the kernels that vLLM chose, what the device lacks, why a server failed."""

from pathlib import Path

import pytest
from model_servers import failed_row, kernels, lacking, reason

from local_server import ServerError

LOG = """\
(EngineCore pid=7) INFO 11-21 09:16:30 [__init__.py:1196] Using MarlinNvFp4LinearKernel for NVFP4 GEMM
(EngineCore pid=7) WARNING 11-21 09:16:30 [marlin.py:38] Your GPU does not have native support for FP4 computation but \
FP4 quantization is being used.
(EngineCore pid=7) INFO 11-21 09:16:31 [__init__.py:846] Selected CutlassFP8ScaledMMLinearKernel for A
(EngineCore pid=7) INFO 11-21 09:16:31 [cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: [X].
(EngineCore pid=7) INFO 11-21 09:16:32 [__init__.py:1196] Using MarlinNvFp4LinearKernel for NVFP4 GEMM
(EngineCore pid=7) INFO 11-21 09:16:32 [utils.py:347] Using LBHNC KV cache layout.
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(LOG)
    return path


def test_kernels_are_named_once_in_the_order_of_the_log(log: Path):
    assert kernels(log) == ["MarlinNvFp4LinearKernel", "CutlassFP8ScaledMMLinearKernel", "FLASH_ATTN"]


def test_what_the_device_lacks_is_told_without_the_logs_prefix(log: Path):
    (line,) = lacking(log)
    assert line.startswith("Your GPU does not have native support for FP4 computation")


def test_a_failed_server_is_explained_by_its_first_error():
    error = ServerError(
        "the server ended with status 1\n"
        "(Worker pid=8) ERROR 11-21 09:16:56 [multiproc_executor.py:1063]     raise AttributeError(\n"
        "(Worker pid=8) ERROR 11-21 09:16:56 [multiproc_executor.py:1063] AttributeError: no attribute 'gemm'\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    )
    assert reason(error) == "ServerError: AttributeError: no attribute 'gemm'"


def test_any_other_error_is_its_first_line():
    assert reason(ValueError("one\ntwo")) == "ValueError: one"


def test_a_row_without_figures_is_as_long_as_the_others():
    header = ("format", "kernels", "mean", "max")
    assert failed_row(header, "fp8", error=ValueError("one")) == ("fp8", "failed: ValueError: one", "", "")
