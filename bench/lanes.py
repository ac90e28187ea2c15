"""The decode lane of each format: its rate next to plain greedy generation, floors, and memory of the GPU.

    python bench/lanes.py TOKENIZER LOGS [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any BPE tokenizer, LOGS a folder for logs, shapes and references. Servers with dummy
weights of `--shape` start at once and are measured one after another: in each turn one generates greedily after BATCH
prompts of 33 random tokens up to LENGTH tokens, then scores what it generated in the decode lane, and compares the
windows of a reference in the decode lane. The table has rates in tokens a second and paired ratios over generation's;
the mean absolute difference of logprobs from those that generation itself returned; KL divergence of each lane from the
reference, which is the floor; and the largest memory of the GPU during generation and during the lane.
`python -m tests.gpu.lanes` plants faults, and `bench/formats.py --parts lanes` has the numbers of real weights.
"""

import argparse
import asyncio
import random
import time
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
from loads import generate, random_tokens, record
from memory import sampled_memory
from paired import paired_ratio
from servers import Row, ServerProcess, benchmark_parser, parsed, row_or_failure, shape_server, starting
from tables import table

from scoremode import AsyncScoreClient, ScoreClient

CONTEXT = 33
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bf16": ("", ()),
    "w4a16": ("-w4a16", ()),
    "fp8": ("", ("--quantization", "fp8")),
    "fp8-kv-cache": ("", ("--kv-cache-dtype", "fp8")),
}
HEADER = (
    *("format", "generation", "decode lane", "ratio", "KL divergence", "ratio", "decode - generation"),
    *("prefill - generation", "KLD prefill", "KLD decode", "batch", "MiB more"),
)


async def divergence(url: str, num_windows: int, lane: str) -> tuple[float, int]:
    """Mean KL divergence of the windows of the reference, all in flight, and their positions."""
    async with AsyncScoreClient(url, timeout=900) as client:
        asked = [client.kld("lanes", (index, index + 1), lane=lane) for index in range(num_windows)]
        found = [result.data[0].positions.kld for result in await asyncio.gather(*asked)]
    return float(np.concatenate(found).mean(dtype="f8")), sum(map(len, found))


def measure(server: "Future[ServerProcess]", options: argparse.Namespace) -> Row:
    """The figures of a format."""
    url = server.result().url
    rng, new = random.Random(11), options.length - CONTEXT
    rates: dict[str, list[float]] = {"generation": [], "decode": [], "kld": []}
    apart, peaks = [], {"generation": 0, "decode": 0}
    with ScoreClient(url, timeout=900) as client:
        record(url, "lanes", [random_tokens(rng, options.length) for _ in range(options.batch)])
        for turn in range(-1, options.turns):
            prompts = [random_tokens(rng, CONTEXT) for _ in range(options.batch)]
            start = time.perf_counter()
            with sampled_memory() as samples:
                choices = asyncio.run(generate(url, prompts, new, ignore_eos=True, logprobs=0))
            middle = time.perf_counter()
            peaks["generation"] = max([peaks["generation"], *samples])
            texts = [prompt + choice["token_ids"] for prompt, choice in zip(prompts, choices, strict=True)]
            with sampled_memory() as samples:
                decode = client.score(texts, lane="decode", logprobs_from=CONTEXT + 1)
            end = time.perf_counter()
            peaks["decode"] = max([peaks["decode"], *samples])
            prefill = client.score(texts, logprobs_from=CONTEXT + 1, use_cache=False)
            by_lane = [np.stack([score.logprob_array for score in lane]) for lane in (decode, prefill)]
            # The first generated token is of a prefill step.
            own = np.array([choice["logprobs"]["token_logprobs"][1:] for choice in choices])
            apart.append([float(np.abs(each - own).mean()) for each in by_lane])
            began = time.perf_counter()
            decode_kld, num_positions = asyncio.run(divergence(url, options.batch, "decode"))
            seconds = time.perf_counter() - began
            if turn >= 0:
                rates["generation"].append(options.batch * new / (middle - start))
                rates["decode"].append(options.batch * (new - 1) / (end - middle))
                rates["kld"].append(num_positions / seconds)
        prefill_kld, _ = asyncio.run(divergence(url, options.batch, "prefill"))
    means = {key: f"{np.mean(values):,.0f}" for key, values in rates.items()}
    ratios = [str(paired_ratio(rates[each], rates["generation"])) for each in ("decode", "kld")]
    floors = [f"{value:.6f}" for value in (*np.mean(apart, axis=0), prefill_kld, decode_kld)]
    return (
        *(means["generation"], means["decode"], ratios[0], means["kld"], ratios[1], *floors),
        *(f"{decode[0].mean_batch:.1f}", f"{peaks['decode'] - peaks['generation']:+d}"),
    )


def main() -> None:
    """One server after another, and the table."""
    parser = benchmark_parser(__doc__, tokenizer=Path, logs=Path)
    parser.add_argument("--shape", default="8b", help="of bench/shapes.py")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--length", type=int, default=2048, help="25 windows of 2,048 have 51,175 positions")
    parser.add_argument("--turns", type=int, default=3)
    options, flags = parsed(parser)
    servers = {}
    for name in options.formats:
        suffix, more = FORMATS[name]
        references = ("--reference-dir", str(options.logs / f"references-{name}-{time.time_ns()}"))
        served = (*references, *more, *flags)
        servers[name] = shape_server(options.shape + suffix, options.tokenizer, options.logs, served)
    with starting(servers, options.logs) as futures:
        # While servers start, they would take the time of one that is measured.
        wait(futures.values())
        rows = []
        for name, future in futures.items():
            rows.append(row_or_failure((name,), measure, future, options))
            print(*rows[-1], sep=" | ", flush=True)
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
