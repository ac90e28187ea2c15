"""What a server says of its model and of what computes."""

from scoremode import ScoreClient
from scoremode.wire.protocol import ComputedBy


def test_a_server_without_references_knows_its_kernels(int8_server: str):
    with ScoreClient(int8_server) as client:
        info = client.info()
    assert info.fingerprint is not None
    assert info.fingerprint.startswith("v2-")
    assert info.computed_by is not None
    kernels = info.computed_by.kernels
    assert kernels is not None
    assert any("CompressedTensorsW8A8Int8, CPU" in each for each in kernels)
    assert info.computed_by == ComputedBy(
        model_runner="v1",
        attention_backends=["CPU_ATTN"],
        kernels=kernels,
        kv_cache_dtype="float32",
        device="cpu",
        num_devices=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        expert_parallel=False,
        speculative_method="none",
        batch_invariant=False,
    )
