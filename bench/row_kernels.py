"""From logits to prompt logprobs on a GPU: our kernels and vLLM's, next to the projection that makes the logits.

    python bench/row_kernels.py [--quick]

Needs torch, triton and vLLM, no model. Every part first compares some rows with float64, then prints median
milliseconds; the projection is hidden states times a random bfloat16 weight. The floor is the time to read the logits
once at the bandwidth of a large copy on the same GPU. `--quick` tries everything out with tiny shapes, in Triton's
interpreter where there is no GPU.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tables import table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "client"), str(ROOT / "server")]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402

from scoremode_server.kernels import fused_logprobs, triton_kernels  # noqa: E402
from scoremode_server.kernels.reduced_rows import ReducedRows  # noqa: E402
from scoremode_server.kernels.working_memory import Tiling  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(49152, 576), (128256, 2048), (128256, 4096), (262144, 2048)]
ROWS = [512, 1024, 2048]
TOPS = [0, 1, 20]
TILINGS = [
    *(Tiling(1024, 8, 8), Tiling(1024, 8, 4), Tiling(512, 8, 4), Tiling(2048, 8, 8)),
    *(Tiling(2048, 8, 16), Tiling(1024, 16, 8)),
]
STEP_ROWS, STEP_CHUNK = 8192, 1024
CHECKED_ROWS = 16

Row = tuple[str, ...]


def stock() -> Any:
    """vLLM's module, or None where its kernels are missing (a CPU)."""
    if DEVICE == "cpu":
        return None
    from vllm.v1.worker.gpu.sample import prompt_logprob

    return prompt_logprob


def milliseconds(function: Callable[[], Any]) -> float:
    """Median time of a call; with an empty cache on a GPU."""
    if DEVICE == "cuda":
        return float(triton.testing.do_bench(function, warmup=5, rep=20, return_mode="median"))
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1000


def copied_bytes_per_millisecond() -> float:
    """Read and written."""
    source = torch.empty(2**30 if DEVICE == "cuda" else 2**20, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


def once(logits: torch.Tensor, targets: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    """Our kernels on logits that are there: token ids, logprobs and ranks."""
    return fused_logprobs.compute(targets, logits, lambda rows: rows, top, len(logits))


def check(logits: torch.Tensor, targets: torch.Tensor, top: int) -> float:
    """Largest difference from float64 logprobs on some rows; ranks and the top tokens' logits must be exact."""
    ids, logprobs, ranks = (tensor[:: max(1, len(targets) // CHECKED_ROWS)] for tensor in once(logits, targets, top))
    logits, targets = (tensor[:: max(1, len(targets) // CHECKED_ROWS)] for tensor in (logits, targets))
    exact = logits.double()
    oracle = exact.log_softmax(-1).gather(1, ids.long())
    top_ids = ids[:, 1:].long()
    assert torch.equal(ids[:, 0].long(), targets)
    assert torch.equal(ranks.long(), (exact >= exact.gather(1, targets[:, None])).sum(1))
    assert torch.equal(exact.gather(1, top_ids), exact.topk(top).values)
    assert all(len(set(row)) == len(row) for row in top_ids.tolist())
    return (logprobs - oracle).abs().max().item()


def made(rows: int, vocab: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states, weight, targets); logits come out with a standard deviation of about 3."""
    generator = torch.Generator(DEVICE).manual_seed(rows + vocab)
    options: dict[str, Any] = {"device": DEVICE, "generator": generator}
    states = torch.randn(rows, hidden, **options).bfloat16()
    weight = torch.randn(vocab, hidden, **options).mul_(3 / math.sqrt(hidden)).bfloat16()
    return states, weight, torch.randint(vocab, (rows,), **options)


def projected(weight: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Logits."""
    return states @ weight.T


def tilings(shapes: list[tuple[int, int]], rows: int, bandwidth: float) -> Iterator[Row]:
    """Milliseconds of the reducing kernel by its tiling, and of the floor."""
    vocabularies = sorted({vocab for vocab, _ in shapes})
    chunks = [torch.randn(rows, vocab, device=DEVICE).mul_(3).bfloat16() for vocab in vocabularies]
    reduced = ReducedRows.empty(rows, 1, torch.device(DEVICE))
    reduced.logits.zero_()
    yield f"tiling, {rows} rows", *(f"V={vocab}" for vocab in vocabularies)
    yield "floor", *(f"{logits.nbytes / bandwidth:.3f}" for logits in chunks)
    for tiling in TILINGS:
        times = []
        for logits in chunks:
            run = partial(triton_kernels.reduce_rows, logits, 0, logits.shape[1], reduced, tiling=tiling)
            try:
                times.append(f"{milliseconds(run):.3f}")
            except Exception as error:
                times.append(type(error).__name__)
        yield str(tiling), *times


def chunks(shapes: list[tuple[int, int]], counts: list[int], bandwidth: float) -> Iterator[Row]:
    """Projection, vLLM's kernels and ours on one chunk."""
    yield "rows", "vocabulary", "hidden", "k", "projection", "vLLM", "ours", "ratio", "ours / floor", "error"
    module = stock()
    for vocab, hidden in shapes:
        for rows in counts:
            states, weight, targets = made(rows, vocab, hidden)
            logits = projected(weight, states)
            projection = milliseconds(partial(projected, weight, states))
            for top in TOPS:
                error = check(logits, targets, top)
                ours = milliseconds(partial(once, logits, targets, top))
                theirs = math.nan
                if module:
                    theirs = milliseconds(partial(module.compute_topk_scores, logits, top, targets))
                times = (projection, theirs, ours, theirs / ours, ours * bandwidth / logits.nbytes)
                yield *map(str, (rows, vocab, hidden, top)), *(f"{each:.3f}" for each in times), f"{error:.1e}"


def steps(shapes: list[tuple[int, int]], rows: int) -> Iterator[Row]:
    """A whole step's prompt logprobs, projection included, in chunks."""
    module = stock()
    names = [f"{who}, k = {top}" for top in TOPS for who in (("vLLM", "ours") if module else ("ours",))]
    yield "rows", "vocabulary", "hidden", "projection", *names
    for vocab, hidden in shapes:
        states, weight, targets = made(rows, vocab, hidden)
        project = partial(projected, weight)
        times = [milliseconds(lambda states=states, project=project: list(map(project, states.split(STEP_CHUNK))))]
        for top in TOPS:
            if module:
                module.CHUNK_SIZE = STEP_CHUNK
                run = partial(module.compute_prompt_logprobs_with_chunking, targets, states, project, top)
                times.append(milliseconds(run))
            times.append(milliseconds(partial(fused_logprobs.compute, targets, states, project, top, STEP_CHUNK)))
        yield str(rows), str(vocab), str(hidden), *(f"{each:.3f}" for each in times)


def main() -> None:
    """Print a table for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    shapes, rows, step_rows = ([(1000, 16)], [8], 20) if options.quick else (SHAPES, ROWS, STEP_ROWS)
    bandwidth = copied_bytes_per_millisecond()
    print(f"torch {torch.__version__}, triton {triton.__version__}, copy {bandwidth / 1e9:.2f} TB/s", flush=True)
    for part in (tilings(shapes, max(rows) // 2, bandwidth), chunks(shapes, rows, bandwidth), steps(shapes, step_rows)):
        header, *lines = part
        print(table(header, lines), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
