"""What computes, as a worker of a real engine says it."""

from vllm import LLM


def test_a_worker_describes_its_modules(llm: LLM):
    (described,) = llm.collective_rpc("scoremode_computed_by")
    kernels = described.pop("kernels")
    assert [each.partition(":")[0] for each in kernels] == ["UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"]
    assert described == {
        "model_runner": "v1",
        "attention_backends": ["CPU_ATTN"],
        "kv_cache_dtype": "float32",
        "device": "cpu",
        "batch_invariant": False,
    }
