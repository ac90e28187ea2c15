"""A package for PYTHONPATH whose plugin of vLLM plants faults in a server, as the variable PLANTED_FAULT says, with
`+` between them:

    attention:LAYER:FACTOR               the layer's attention output times FACTOR
    single-rows:LAYER:FACTOR             the layer's MLP output times FACTOR, in steps of at most `FEW_ROWS` rows
    k-scale:LAYER:FACTOR                 the scale of the layer's cached keys times FACTOR
    expert:LAYER:EXPERT:FACTOR:BACKEND   the expert's down projection times FACTOR, with `--moe-backend BACKEND` alone
    none                                 no fault

`scoremode serve` allows the plugin unless VLLM_PLUGINS names others. Compiled models and CUDA graphs have the fault
too.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

VARIABLE = "PLANTED_FAULT"
FEW_ROWS = 16
"""A decode step has a row per sequence, so it has at most this many on a server with `--max-num-seqs 16`."""


def install(folder: Path) -> Path:
    """Write this module and the metadata of a package into a folder for PYTHONPATH."""
    (metadata := folder / "planted_fault-1.dist-info").mkdir(parents=True)
    (folder / "planted_fault.py").write_text(Path(__file__).read_text())
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: planted-fault\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted_fault = planted_fault:plugin\n")
    return folder


def plugin() -> None:
    """Have models of this process loaded with the fault; vLLM calls this once in each process."""
    if os.environ.get(VARIABLE, "none") == "none":
        return
    # A server without the fault may have stored the compiled model, and must not load this one's.
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load_model = BaseModelLoader.load_model

    def load_then_plant(self: Any, vllm_config: Any, *args: Any, **options: Any) -> torch.nn.Module:
        model = load_model(self, vllm_config, *args, **options)
        for fault in os.environ[VARIABLE].split("+"):
            plant(model, fault, vllm_config.kernel_config.moe_backend)
        return model

    BaseModelLoader.load_model = load_then_plant


def plant(model: torch.nn.Module, fault: str, moe_backend: str) -> None:
    """Plant a fault in a loaded model."""
    kind, layer, *values, last = fault.split(":")
    modules = {name.partition(f"layers.{layer}.")[2]: module for name, module in model.named_modules()}
    match kind, values:
        case "attention" | "single-rows", []:
            name, most_rows = ("mlp", FEW_ROWS) if kind == "single-rows" else ("self_attn.attn", sys.maxsize)
            modules[name].register_forward_hook(lambda _, __, output: _scaled(output, float(last), most_rows))
        case "k-scale", []:
            attention: Any = modules["self_attn.attn"]
            attention._k_scale.mul_(float(last))
            attention._k_scale_cpu.mul_(float(last))
            attention._k_scale_float *= float(last)
        case "expert", [expert, factor]:
            (weight,) = (
                weight
                for name, weight in model.named_parameters()
                if f"layers.{layer}." in name and name.endswith(".w2_weight")
            )
            weight.data[int(expert)] *= float(factor) if last == moe_backend else 1.0
        case _:
            raise ValueError(f"{VARIABLE}: unknown fault {fault!r}")


@torch.library.custom_op("planted_fault::scaled", mutates_args=())
def _scaled(output: torch.Tensor, factor: float, most_rows: int) -> torch.Tensor:
    """Scale rows unless there are many. An operator of its own, because a compiled model does not decide anew in each
    step."""
    return output * (factor if len(output) <= most_rows else 1.0)


@_scaled.register_fake
def _(output: torch.Tensor, factor: float, most_rows: int) -> torch.Tensor:
    return torch.empty_like(output)
