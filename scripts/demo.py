"""`make demo`: a small real model on a real server, its perplexity, and how far a copy of 4 bits is from it."""

import platform
import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path

from demo_model import NAME, SOURCE, cache_root, demo_model, made_once
from local_server import CPU_FLAGS, has_gpu, server_process
from rounded_model import rounded_model

ROUNDED = f"{NAME}-4bit"
PERPLEXITY = ("--dataset", "pydoc", "--max-tokens", "4096", "--context-length", "1024", "--stride", "512")
# A model that runs eagerly starts in half the time.
FLAGS = ("--max-model-len", "2048", "--enforce-eager")
REFERENCE = ("--dataset", "pydoc", "--max-tokens", "2048", "--context-length", "512", "--stride", "256")


def main() -> int:
    """Serve, score and record one model, then compare another; the exit status is that of the first failure."""
    print(f"Preparing {NAME}: {SOURCE} (once, then cached) ...", flush=True)
    model = demo_model()
    name = reference_name(model)
    commands = [PERPLEXITY, ("record", "--reference", name, *REFERENCE)]
    if status := ask(model, NAME, commands):
        return status
    print(f"\nPreparing {ROUNDED}, the same weights rounded to 4 bits and kept as float32 ...", flush=True)
    rounded = made_once(cache_root() / ROUNDED, lambda folder: rounded_model(model, folder))
    if status := ask(rounded, ROUNDED, [("kld", "--reference", name)]):
        return status
    programs = Path(sys.executable).parent
    print(
        f"\nKept: {model} and {rounded}, and the reference. To serve one, and to score on it in another terminal:\n"
        f"  make serve MODEL={model} ARGS='{' '.join((*FLAGS, *(() if has_gpu() else CPU_FLAGS)))}'\n"
        f"  {programs}/ppl-client --url http://localhost:8000 --dataset pydoc --max-tokens 2048 --context-length 512"
    )
    return 0


def reference_name(model: Path) -> str:
    """For what is recorded: pydoc is another text in another Python, and another folder or device is another model."""
    recorded = (model, has_gpu(), platform.python_version(), REFERENCE)
    return f"{NAME}-{blake2b(repr(recorded).encode(), digest_size=4).hexdigest()}"


def ask(model: Path, name: str, commands: list[tuple[str, ...]]) -> int:
    """Serve a model while `ppl-client` runs with each of these arguments, until one fails."""
    references = cache_root() / "demo-references"
    with tempfile.TemporaryDirectory() as folder:
        print(f"$ scoremode serve {model} --reference-dir {references}      (a minute or two)", flush=True)
        log = Path(folder) / "server.log"
        flags = ("--served-model-name", name, *FLAGS, "--reference-dir", str(references))
        with server_process(model, *flags, log=log) as server:
            for command in commands:
                arguments = [*command, "--url", server.url]
                print(f"\n$ ppl-client {' '.join(arguments)}", flush=True)
                if status := subprocess.run([sys.executable, "-m", "scoremode.cli", *arguments]).returncode:
                    return status
    print("The server is stopped.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
