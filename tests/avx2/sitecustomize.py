"""On PYTHONPATH (`make test-avx2`), this makes every Python process take its CPU for one with AVX2 and nothing newer.

torch and oneDNN read an environment variable each. vLLM asks torch what the CPU has, and picks its compiled extension
and its kernels by it. What torch compiled for the CPU as it is has wider vectors, and would count half of a row here.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

CACHE = Path(tempfile.gettempdir(), "scoremode-avx2")
os.environ |= {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
    "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
}

# Some tests make environments without torch.
with suppress(ModuleNotFoundError):
    import torch.cpu

    NEWER = ("avx512", "avx10", "avx_vnni", "amx")
    capabilities = {
        name: False if name.startswith(NEWER) else value for name, value in torch.cpu.get_capabilities().items()
    }
    torch.cpu.get_capabilities = lambda: capabilities
