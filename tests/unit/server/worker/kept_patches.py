"""Sets back after a test what `runners.patch_v1` and `patch_v2` set in vLLM."""

import pytest
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PROFILED = ("_dummy_sampler_run", "profile_run")
PATCHED = (
    (GPUModelRunner, (*PROFILED, "_get_prompt_logprobs_dict", "_model_forward", "_dummy_run", "sample_tokens")),
    (GPUModelRunnerV2, (*PROFILED, "load_model", "prepare_inputs", "execute_model")),
    (SamplerV2, ("__call__",)),
    (prompt_logprob.PromptLogprobsWorker, ("add_request", "remove_request", "compute_prompt_logprobs")),
    (prompt_logprob, ("CHUNK_SIZE",)),
)


def set_back_at_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back at the end of the test what it patches from here on."""
    for owner, names in PATCHED:
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    for runner in (GPUModelRunner, GPUModelRunnerV2):
        monkeypatch.setattr(runner, "_scoremode_sinks", None, raising=False)
