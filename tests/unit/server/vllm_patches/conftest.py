"""vLLM's output processing as the plugin patches it, for single tests."""

import pytest
from vllm.v1.engine.logprobs import LogprobsProcessor

from scoremode_server.vllm_patches import output_processor


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM patched for one test, also where an engine of an earlier one has patched it already."""
    for name in ("from_new_request", "_update_prompt_logprobs"):
        monkeypatch.setattr(LogprobsProcessor, name, LogprobsProcessor.__dict__[name])
    monkeypatch.setattr(
        output_processor.IncrementalDetokenizer,
        "from_new_request",
        output_processor.IncrementalDetokenizer.__dict__["from_new_request"],
    )
    monkeypatch.setattr(LogprobsProcessor, "_scoremode_patched", False, raising=False)
    output_processor.patch()
