"""Prompt logprobs of a real engine on several GPUs: stock vLLM's beside Scoremode's, row by row, and their times.

    python bench/parallel_logprobs.py LOGS [--ranks 2] [--shape 1b] [--tokens 8192] [any LLM argument as NAME=JSON]

Needs Scoremode installed, so that vLLM's processes find its plugins. Both engines run one after the other on the same
dummy weights, without a prefix cache. LOGS gets what they write; Scoremode's says whether ranks keep to their own parts
of the vocabulary. `--ranks 1` compares on one GPU, `--shape tiny dtype='"float32"'` tries it out on a CPU (V1 runner).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench")]

from shapes import write_shape  # noqa: E402

TOPS = (0, 1, 20)
PROMPT_TOKENS = 2047
ENGINES = {"stock": "", "scoremode": "scoremode"}
TIMEOUT_SECONDS = 600


def scores(engine: Any, prompts: list[Any], top: int) -> dict[str, np.ndarray]:
    """Logprobs [rows, top + 1] and ranks [rows, top + 1] of all prompts' rows, one after the other."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=top, flat_logprobs=True, detokenize=False)
    outputs = [output.prompt_logprobs for output in engine.generate(prompts, params, use_tqdm=False)]
    # A flat row has the actual token first, and the top k after it.
    width = top + 1
    return {
        name: np.concatenate([np.array(getattr(flat, name)).reshape(-1, width) for flat in outputs])
        for name in ("logprobs", "ranks")
    }


def child(model: Path, out: Path, tokens: int, arguments: dict[str, Any]) -> None:
    """Score the same random prompts with each k, twice, and keep the second time."""
    from vllm import LLM, TokensPrompt

    engine = LLM(str(model), skip_tokenizer_init=True, load_format="dummy", **arguments)
    generator = np.random.default_rng(1)
    count = max(1, tokens // PROMPT_TOKENS)
    prompts = [
        TokensPrompt(prompt_token_ids=generator.integers(3, 49000, PROMPT_TOKENS).tolist()) for _ in range(count)
    ]
    results: dict[str, Any] = {}
    for top in TOPS:
        scores(engine, prompts, top)
        start = time.perf_counter()
        found = scores(engine, prompts, top)
        results[f"seconds {top}"] = time.perf_counter() - start
        results |= {f"{name} {top}": values for name, values in found.items()}
    np.savez(out, **results)


def run(name: str, model: Path, options: argparse.Namespace, arguments: dict[str, Any]) -> Any:
    out = model.parent / f"{name}.npz"
    command = [sys.executable, __file__, str(options.logs), "--child", str(model), str(out)]
    command += ["--tokens", str(options.tokens), *(f"{key}={json.dumps(value)}" for key, value in arguments.items())]
    with (options.logs / f"{name}.log").open("w") as log:
        subprocess.run(
            command,
            env=os.environ | {"VLLM_PLUGINS": ENGINES[name]},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=True,
        )
    return np.load(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_intermixed_args()
    arguments = {name: json.loads(value) for name, _, value in (item.partition("=") for item in options.arguments)}
    if options.child:
        child(*options.child, options.tokens, arguments)
        return
    options.logs.mkdir(parents=True, exist_ok=True)
    arguments = {
        "tensor_parallel_size": options.ranks,
        "max_model_len": 4096,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "max_logprobs": max(TOPS),
    } | arguments
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(options.shape, Path(folder) / "none", Path(folder))
        found = {name: run(name, model, options, arguments) for name in ENGINES}
    said = [line for line in (options.logs / "scoremode.log").read_text().splitlines() if "Prompt logprobs" in line]
    print(*(said[:1] or ["no word of Scoremode's on its way: see its log"]), sep="\n")
    print(f"{'k':>3} {'rows':>6} {'logprobs off by':>16} {'ranks unequal':>14} {'stock, s':>9} {'scoremode, s':>13}")
    for top in TOPS:
        stock, ours = (
            {key: found[name][f"{key} {top}"] for key in ("logprobs", "ranks", "seconds")} for name in ENGINES
        )
        off = np.abs(stock["logprobs"] - ours["logprobs"]).max()
        unequal = int((stock["ranks"][:, 0] != ours["ranks"][:, 0]).sum())
        rows, seconds = len(ours["logprobs"]), [float(one["seconds"]) for one in (stock, ours)]
        print(f"{top:>3} {rows:>6} {off:>16.2e} {unequal:>14} {seconds[0]:>9.3f} {seconds[1]:>13.3f}", flush=True)


if __name__ == "__main__":
    main()
