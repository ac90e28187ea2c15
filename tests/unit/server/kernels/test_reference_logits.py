"""A reference's logits beside those of vLLM's own layers, bit for bit.

In a process of their own, as vLLM makes its groups of ranks once in a process.
"""

import socket

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from scoremode_server.kernels.reference_logits import Linear, ReferenceHead, linear_in

HIDDEN, ROWS = 32, 7
CASES = [
    # vocabulary, scale, soft-cap, bias
    (128, 1.0, None, False),
    # Padded to 128 and to 1,024.
    (70, 1.0, None, False),
    (1000, 0.3, 5.0, True),
    (1000, 0.0625, None, True),
    (1000, 1.0, 30.0, False),
]


def made(vocab: int, scale: float, soft_cap: float | None, bias: bool) -> tuple[ParallelLMHead, LogitsProcessor]:
    lm_head = ParallelLMHead(vocab, HIDDEN, bias=bias)
    generator = torch.Generator().manual_seed(vocab)
    for parameter in lm_head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return lm_head, LogitsProcessor(vocab, vocab, scale=scale, soft_cap=soft_cap)


def check(lm_head: ParallelLMHead, processor: LogitsProcessor, linear: Linear, dtype: torch.dtype) -> None:
    """`dtype` is that of the logits; hidden states have the default's."""
    hidden_states = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    hidden_states = hidden_states.to(torch.get_default_dtype())
    bias = None if lm_head.bias is None else lm_head.bias.data
    head = ReferenceHead(
        lm_head.weight.data, bias, processor.org_vocab_size, processor.scale, processor.soft_cap, linear
    )
    logits = head(hidden_states)
    assert logits.dtype == dtype
    assert torch.equal(logits, processor(lm_head, hidden_states, lm_head.bias))


def with_pytorchs_projection(dtype: torch.dtype) -> None:
    """As on a GPU."""
    for case in CASES:
        lm_head, processor = made(*case)
        lm_head.quant_method.apply = lambda layer, rows, bias: torch.nn.functional.linear(rows, layer.weight, bias)
        check(lm_head, processor, torch.nn.functional.linear, dtype)


def with_vllms_projection(dtype: torch.dtype) -> None:
    """On a CPU it is a kernel that has packed the weight."""
    for case in CASES:
        lm_head, processor = made(*case)
        lm_head.quant_method.process_weights_after_loading(lm_head)

        def project(rows: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None, layer: ParallelLMHead = lm_head):
            return layer.quant_method.apply(layer, rows, bias=bias)

        check(lm_head, processor, project, dtype)


def with_a_head_in_float32() -> None:
    for case in CASES:
        lm_head, processor = made(*case)
        processor.head_dtype = torch.float32
        check(lm_head, processor, linear_in(torch.float32), torch.float32)


def alone(_index: int, port: int) -> None:
    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.inference_mode():
            for dtype in (torch.float32, torch.bfloat16):
                torch.set_default_dtype(dtype)
                with_pytorchs_projection(dtype)
                with_vllms_projection(dtype)
            with_a_head_in_float32()


def test_as_vllm():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(alone, (port,), nprocs=1)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_by_hand(soft_cap: float | None):
    head = ReferenceHead(torch.tensor([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]), torch.ones(3), 2, 0.5, soft_cap)
    expected = torch.tensor([[2.0, 5.0]])
    if soft_cap is not None:
        expected = 2.0 * torch.tanh(expected / 2.0)
    assert torch.allclose(head(torch.tensor([[1.0, 2.0]])), expected / 2, atol=1e-7)
