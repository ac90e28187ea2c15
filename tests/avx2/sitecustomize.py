"""On PYTHONPATH (`make test-avx2`), this makes every Python process take its CPU for one with AVX2 and nothing newer.

torch and oneDNN read an environment variable each. vLLM asks torch what the CPU has, and picks its compiled extension
and its kernels by it.
"""

import os
from contextlib import suppress

os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

# Some tests make environments without torch.
with suppress(ModuleNotFoundError):
    import torch.cpu

    NEWER = ("avx512", "avx10", "avx_vnni", "amx")
    capabilities = {
        name: False if name.startswith(NEWER) else value for name, value in torch.cpu.get_capabilities().items()
    }
    torch.cpu.get_capabilities = lambda: capabilities
