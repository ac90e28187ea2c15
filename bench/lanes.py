"""The decode lane of each format: its rate next to plain greedy generation, floors, and memory of the GPU.

    python bench/lanes.py TOKENIZER LOGS [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any model's tokenizer, LOGS a folder for logs, shapes and references. Servers with dummy
weights of `--shape` start at once and are measured one after another: in each turn one generates greedily after BATCH
prompts of 33 random tokens up to LENGTH tokens, then scores what it generated in the decode lane, and compares the
windows of a reference in the decode lane. The tables have rates in tokens a second and paired ratios over generation's;
the mean absolute difference of logprobs from those that generation itself returned; KL divergence of each lane from the
reference, which is the floor; and the largest memory of the GPU during generation and during the lane.
`python -m tests.gpu.lanes` plants faults, and `bench/formats.py --parts lanes` has the numbers of real weights.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from loads import random_tokens
from memory import sampled_memory
from paired import paired_ratio
from servers import ServerError, has_gpu, shape_server, starting
from tables import table

from scoremode import AsyncScoreClient, ScoreClient

CONTEXT = 33
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bf16": ("", ()),
    "w4a16": ("-w4a16", ()),
    "fp8": ("", ("--quantization", "fp8")),
    "fp8-kv-cache": ("", ("--kv-cache-dtype", "fp8")),
}
HEADER = ("format", "generation", "decode lane", "ratio", "KL divergence", "ratio")
FLOORS = ("format", "decode - generation", "prefill - generation", "KLD prefill", "KLD decode", "batch", "MiB more")


def generate(url: str, model: str, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], np.ndarray]:
    """Prompts with what is generated greedily, and vLLM's logprobs of all but the first generated token."""
    body = {"model": model, "prompt": prompts, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 0, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=900)
    answer.raise_for_status()
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    logprobs = np.array([choice["logprobs"]["token_logprobs"][1:] for choice in choices])
    return [prompt + choice["token_ids"] for prompt, choice in zip(prompts, choices, strict=True)], logprobs


async def divergence(url: str, num_windows: int, lane: str) -> tuple[float, int]:
    """Mean KL divergence of the windows of the reference, all in flight, and their positions."""
    async with AsyncScoreClient(url, timeout=900) as client:
        asked = [client.kld("lanes", (index, index + 1), lane=lane) for index in range(num_windows)]
        found = [result.data[0].positions.kld for result in await asyncio.gather(*asked)]
    return float(np.concatenate(found).mean(dtype="f8")), sum(map(len, found))


def measure(url: str, name: str, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """The row of each table."""
    rng, new = random.Random(11), options.length - CONTEXT
    rates: dict[str, list[float]] = {"generation": [], "decode": [], "kld": []}
    apart, peaks = [], {"generation": 0, "decode": 0}
    with ScoreClient(url, timeout=900) as client:
        text = random_tokens(rng, options.batch * options.length + 1)
        windows: dict[str, Any] = {"method": "disjoint", "context_length": options.length}
        client.record_reference("lanes", text, **windows)
        for turn in range(-1, options.turns):
            prompts = [random_tokens(rng, CONTEXT) for _ in range(options.batch)]
            start = time.perf_counter()
            with sampled_memory() as samples:
                texts, own = generate(url, options.shape, prompts, new)
            middle = time.perf_counter()
            peaks["generation"] = max([peaks["generation"], *samples])
            with sampled_memory() as samples:
                decode = client.score(texts, lane="decode", logprobs_from=CONTEXT + 1)
            end = time.perf_counter()
            peaks["decode"] = max([peaks["decode"], *samples])
            prefill = client.score(texts, logprobs_from=CONTEXT + 1, use_cache=False)
            by_lane = [np.stack([score.logprob_array for score in lane]) for lane in (decode, prefill)]
            apart.append([float(np.abs(each - own).mean()) for each in by_lane])
            began = time.perf_counter()
            decode_kld, num_positions = asyncio.run(divergence(url, options.batch, "decode"))
            seconds = time.perf_counter() - began
            if turn >= 0:
                rates["generation"].append(options.batch * new / (middle - start))
                rates["decode"].append(options.batch * (new - 1) / (end - middle))
                rates["kld"].append(num_positions / seconds)
        prefill_kld, _ = asyncio.run(divergence(url, options.batch, "prefill"))
        # Of the beginnings: the batch is that of whole texts.
        fields = {"prompt": [each[:256] for each in texts], "lane": "decode", "model": None}
        mean_batch = httpx.post(f"{url}/v1/score", json=fields, timeout=900).json()["mean_batch"]
    means = {key: f"{np.mean(values):,.0f}" for key, values in rates.items()}
    ratios = [str(paired_ratio(rates[each], rates["generation"])) for each in ("decode", "kld")]
    yield name, means["generation"], means["decode"], ratios[0], means["kld"], ratios[1]
    floors = [f"{value:.6f}" for value in (*np.mean(apart, axis=0), prefill_kld, decode_kld)]
    yield name, *floors, f"{mean_batch:.1f}", f"{peaks['decode'] - peaks['generation']:+d}"


def main() -> None:
    """One server after another, and both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--shape", default="8b", help="of bench/shapes.py")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--length", type=int, default=2048, help="25 windows of 2,048 have 51,175 positions")
    parser.add_argument("--turns", type=int, default=3)
    options, flags = parser.parse_known_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, ...]] = []
    servers = {}
    for name in options.formats:
        suffix, more = FORMATS[name]
        references = options.logs / f"references-{name}-{time.time_ns()}"
        references.mkdir()
        served = ("--served-model-name", options.shape, "--reference-dir", str(references), *more, *flags)
        on_cpu = () if has_gpu() else ("--dtype", "float32", "--enforce-eager")
        servers[name] = shape_server(options.shape + suffix, options.tokenizer, options.logs, (*on_cpu, *served))
    with starting(servers, options.logs) as futures:
        # While servers start, they would take the time of one that is measured.
        wait(futures.values())
        for name, future in futures.items():
            try:
                for row in measure(future.result().url, name, options):
                    print(*row, sep=" | ", flush=True)
                    rows.append(row)
            except (ServerError, httpx.HTTPError) as error:
                print(f"{name}: {str(error)[-3000:]}", flush=True)
    print(table(HEADER, rows[::2]), table(FLOORS, rows[1::2]), sep="\n\n")


if __name__ == "__main__":
    main()
