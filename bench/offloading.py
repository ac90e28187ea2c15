"""Recording with all layers in host memory, which vLLM's prefetching offloader copies ahead, next to a server without.

    python bench/offloading.py TOKENIZER LOGS [OPTION...] [any vllm serve flag]

A case is BATCH:STEP[:compiled], for `--max-num-batched-tokens BATCH` and `--offload-prefetch-step STEP`. A STEP of 0
keeps the layers on the GPU. A server runs with `--enforce-eager` unless its case is `compiled`. STEP is the number of
layers that have buffers on the GPU: with one, a layer is copied only after the layer before it was computed, so 2 is
the first STEP that overlaps copies and computation.

Each case has its own server, one after another, with random weights of `--shape`, which are in LOGS while the script
runs. Dummy weights would not do: they are equal in all layers, and differ between a CPU and a GPU. A server scores four
windows one by one, and their logprobs are compared with those of the first case that ran. Then it records windows of
2,048 tokens. A step copies all layers once: the bus allows BATCH tokens in that time, at the speed of copies from
pinned memory, which is measured before. No case begins after `--seconds`, and a case that fails is a row. "Host GiB"
is the memory that became unavailable while the server started.
"""

import argparse
import math
import random
import tempfile
import time
from itertools import groupby
from pathlib import Path

import numpy as np
import psutil
import torch
from loads import WINDOW, random_tokens, record
from quantized_oracle import DEVICE
from safetensors.torch import save_file
from servers import SHAPE_FLAGS, Row, benchmark_parser, log_of, parsed, row_or_failure, server_process
from shapes import write_shape
from tables import table
from torch.utils.benchmark import Timer
from transformers import AutoConfig, AutoModelForCausalLM

from scoremode import ScoreClient

CASES = ("8192:0", "8192:2", "65536:2", "8192:2:compiled", "16384:2", "8192:1", "32768:2")
HEADER = (
    *("case", "start s", "host GiB", "tokens/s", "share of the first", "bus allows, tokens/s"),
    *("largest difference of logprobs", "mean difference"),
)


def write_weights(model: Path) -> int:
    """Write random weights into a model folder, a file for each layer: the bytes of all layers."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).state_dict()
    options = {"generator": torch.Generator(DEVICE).manual_seed(1), "device": DEVICE, "dtype": torch.bfloat16}
    layer_bytes = 0
    parts = groupby(state, lambda name: name.partition("layers.")[2].partition(".")[0])
    for index, (layer, names) in enumerate(parts):
        # Norms' weights are near 1.
        tensors = {name: 0.02 * torch.randn(state[name].shape, **options) + ("norm" in name) for name in names}
        save_file(tensors, model / f"model-{index}.safetensors", {"format": "pt"})
        layer_bytes += sum(tensor.nbytes for tensor in tensors.values()) if layer else 0
    return layer_bytes


def bus_bytes_per_second() -> float:
    """The rate of copies from pinned memory to the GPU."""
    source = torch.ones(2**28, dtype=torch.uint8).pin_memory()
    timer = Timer("target.copy_(source)", globals={"source": source, "target": source.to(DEVICE)})
    return source.nbytes / timer.timeit(40).mean


def measure(options: argparse.Namespace, flags: list[str], case: str) -> Row:
    """The figures of a case."""
    if time.monotonic() > options.deadline:
        raise TimeoutError(f"not begun after {options.seconds} s")
    batch, step, *compiled = case.split(":")
    served = (
        *(*SHAPE_FLAGS, "--load-format", "auto", "--max-num-batched-tokens", batch),
        *(("--gpu-memory-utilization", "0.85") if DEVICE == "cuda" else ()),
        *(() if compiled else ("--enforce-eager",)),
        *(() if step == "0" else ("--offload-group-size", "1", "--offload-prefetch-step", step)),
    )
    log, patience = log_of(case.replace(":", "-"), options.logs), options.case_seconds
    start, available = time.monotonic(), psutil.virtual_memory().available
    with (
        tempfile.TemporaryDirectory(dir=options.logs) as folder,
        server_process(
            options.model, *served, *flags, "--reference-dir", folder, log=log, start_seconds=patience
        ) as server,
    ):
        started, host = time.monotonic() - start, available - psutil.virtual_memory().available
        with ScoreClient(server.url, timeout=patience) as client:
            scores = [client.score([window], use_cache=False)[0].logprob_array[1:] for window in options.windows[:4]]
        # A step of this size comes first, since kernels are compiled or chosen in it.
        record(server.url, "warm-up", options.windows[: int(batch) // WINDOW], patience)
        rate = record(server.url, "measured", options.windows, patience)
    options.results.append((rate.tokens / rate.seconds, np.concatenate(scores)))
    (first_rate, first), (tokens_per_second, mine) = options.results[0], options.results[-1]
    differences = np.abs(mine - first)
    allowed = math.nan if step == "0" else int(batch) * options.bus / options.layer_bytes
    return (
        *(f"{started:.0f}", f"{host / 2**30:.1f}", f"{tokens_per_second:,.0f}"),
        *(f"{tokens_per_second / first_rate:.3f}", f"{allowed:,.0f}"),
        *(f"{differences.max():.2g}", f"{differences.mean():.2g}"),
    )


def main() -> None:
    """Measure the bus, write the weights, and measure each case."""
    parser = benchmark_parser(__doc__, tokenizer=Path, logs=Path)
    parser.add_argument("--shape", default="8b", help="of bench/shapes.py")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="BATCH:STEP[:compiled]")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--case-seconds", type=float, default=150, help="at most, for a start and for each request")
    parser.add_argument("--seconds", type=float, default=420, help="after which no case begins")
    options, flags = parsed(parser)
    options.deadline, options.results = time.monotonic() + options.seconds, []
    rng = random.Random(7)
    options.windows = [random_tokens(rng, WINDOW) for _ in range(options.windows)]
    options.bus = bus_bytes_per_second() if DEVICE == "cuda" else math.nan
    with tempfile.TemporaryDirectory(dir=options.logs) as folder:
        options.model = write_shape(options.shape, options.tokenizer, Path(folder))
        options.layer_bytes = write_weights(options.model)
        print(f"{options.layer_bytes:,} bytes of layers, {options.bus / 1e9:.1f} GB/s to the GPU", flush=True)
        rows = []
        for case in options.cases:
            rows.append(row_or_failure((case,), measure, options, flags, case))
            print(*rows[-1], sep=" | ", flush=True)
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
