"""Ranks of a tensor-parallel group, each a process on the CPU with vLLM's own layers and collectives."""

import os
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

from local_server import reserved_port
from scoremode_server.references.worker import extension
from scoremode_server.worker import runners


def run_ranks(num_ranks: int, check: Callable[..., None], *arguments: Any) -> None:
    """Call `check(rank, config, *arguments)` in each of `num_ranks` ranks. An error in one of them is raised here."""
    # Forked from one process that has imported vLLM, which takes each process ten seconds.
    torch.multiprocessing.set_forkserver_preload(["vllm.distributed", runners.__name__, extension.__name__])
    with reserved_port() as port:
        torch.multiprocessing.start_processes(
            _one_rank, (num_ranks, port, check, arguments), nprocs=num_ranks, start_method="forkserver"
        )


def _one_rank(rank: int, num_ranks: int, port: int, check: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # Ranks that wait for each other keep their cores busy.
    torch.set_num_threads(1)
    # On CPUs with AVX-512 vLLM exchanges tensors in shared memory, which is not made for all types; ranks that name it
    # differently exchange them through torch.distributed, as on any other CPU.
    os.environ["VLLM_DIST_IDENT"] = f"{port}-{rank}"
    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=num_ranks))
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(num_ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        ensure_model_parallel_initialized(num_ranks, 1)
        check(rank, config, *arguments)
