"""The step from logits to prompt logprobs on a GPU: ours and vLLM's V2 kernels, beside the projection before them.

    python bench/prompt_logprobs_kernel.py [LOG] [--quick]

Needs torch, triton and vLLM, no model. Every part first compares with float64 on some rows, then prints median
milliseconds; the projection is hidden states times a random bfloat16 weight. The floor is the time that reading the
logits once takes at the bandwidth of a large copy on the same GPU. All is also written to LOG.

`--quick` tries everything out with tiny shapes, on a CPU in Triton's interpreter where there is no GPU.
"""

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "client"), str(ROOT / "server")]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402

from scoremode_server.kernels import fused_logprobs, triton_kernels  # noqa: E402
from scoremode_server.kernels.reduced_rows import ReducedRows  # noqa: E402
from scoremode_server.kernels.tiling import Tiling  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(49152, 576), (128256, 2048), (128256, 4096), (262144, 2048)]
ROWS = [512, 1024, 2048]
TOPS = [0, 1, 20]
TILINGS = [
    Tiling(1024, 8, 8, 1),
    Tiling(1024, 8, 4, 1),
    Tiling(512, 8, 4, 1),
    Tiling(2048, 8, 8, 1),
    Tiling(2048, 8, 16, 1),
    Tiling(1024, 16, 8, 1),
    Tiling(1024, 8, 8, 3),
    Tiling(512, 8, 4, 3),
]
STEP_ROWS, STEP_CHUNK = 8192, 1024
CHECKED_ROWS = 16

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


def stock() -> Any:
    """vLLM's module, or None where its kernels are missing (a CPU)."""
    if DEVICE == "cpu":
        return None
    from vllm.v1.worker.gpu.sample import prompt_logprob

    return prompt_logprob


class Report:
    """Prints lines and keeps them in a file."""

    def __init__(self, log: Path | None) -> None:
        self.file: TextIO | None = log.open("w") if log else None

    def __call__(self, *cells: Any) -> None:
        line = " ".join(f"{cell:>10.3f}" if isinstance(cell, float) else f"{cell!s:>10}" for cell in cells)
        print(line, flush=True)
        if self.file:
            print(line, file=self.file, flush=True)


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


def check(logits: torch.Tensor, targets: torch.Tensor, scores: tuple[torch.Tensor, ...]) -> float:
    """Largest difference from float64 logprobs on some rows; ranks, tokens of the top k and shapes must be exact."""
    ids, logprobs, ranks = (tensor[:: max(1, len(targets) // CHECKED_ROWS)] for tensor in scores)
    logits, targets = (tensor[:: max(1, len(targets) // CHECKED_ROWS)] for tensor in (logits, targets))
    exact = logits.double()
    oracle = exact.log_softmax(-1)
    actual = exact.gather(1, targets[:, None])
    assert torch.equal(ids[:, 0].long(), targets)
    assert torch.equal(ranks.long(), (exact >= actual).sum(1))
    top = ids[:, 1:].long()
    assert torch.equal(exact.gather(1, top), exact.topk(top.shape[1]).values)
    assert all(len(set(row)) == len(row) for row in top.tolist())
    return (logprobs - oracle.gather(1, ids.long())).abs().max().item()


def once(logits: torch.Tensor, targets: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    """Ours on logits that are there."""
    return fused_logprobs.compute(targets, logits, lambda rows: rows, top, len(logits))


def stock_once(module: Any, logits: torch.Tensor, targets: torch.Tensor, top: int) -> Any:
    return module.compute_topk_scores(logits, top, targets)


def made(rows: int, vocab: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states, weight, targets); logits come out with a standard deviation of about 3."""
    generator = torch.Generator(DEVICE).manual_seed(rows + vocab)
    options: dict[str, Any] = {"device": DEVICE, "generator": generator}
    states = torch.randn(rows, hidden, **options).bfloat16()
    weight = torch.randn(vocab, hidden, **options).mul_(3 / math.sqrt(hidden)).bfloat16()
    return states, weight, torch.randint(vocab, (rows,), **options)


def hard(report: Report, vocab: int) -> None:
    """Columns that are no multiple of anything, other dtypes, ties, -inf and NaN."""
    errors = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        padded = torch.randn(64, vocab + 47, device=DEVICE).mul_(3).round_(decimals=1).to(dtype)
        padded[:, vocab:] = math.inf
        logits = padded[:, :vocab]
        logits[::4, 1::2] = -math.inf
        logits[8] = -math.inf
        logits[8, ::97] = 1.0
        targets = torch.randint(vocab, (64,), device=DEVICE)
        targets[::5] = vocab - 1
        for top in TOPS:
            scores = once(logits, targets, top)
            exact = logits.double()
            actual = exact.gather(1, targets[:, None])
            oracle = exact.log_softmax(-1).gather(1, scores[0].long())
            assert torch.equal(scores[2].long(), (exact >= actual).sum(1))
            assert torch.equal(exact.gather(1, scores[0][:, 1:].long()), exact.topk(top).values)
            assert torch.equal(scores[1].isinf(), oracle.isinf())
            errors.append((scores[1] - oracle).masked_fill(oracle.isinf(), 0).abs().max().item())
            spoilt = logits.clone()
            spoilt[3, vocab - 1] = math.nan
            spoilt[5] = math.nan
            rows = once(spoilt, targets, top)[1].isnan()
            assert rows[[3, 5]].all()
            assert rows.any(1).sum() == 2
    report(f"hard rows: errors of {max(errors):.1e} at most; -inf, NaN and ranks right")


def sweep(report: Report, vocabs: list[int], rows: int, bandwidth: float) -> None:
    """Median time of the reducing kernel by its tiling, and its share of the floor's speed."""
    report(f"{'lanes':>10}", *["width", "warps", "stages"], *[f"V={vocab}" for vocab in vocabs], f"(ms, {rows} rows)")
    made_logits = [torch.randn(rows, vocab, device=DEVICE).mul_(3).bfloat16() for vocab in vocabs]
    reduced = ReducedRows.empty(rows, 1, torch.device(DEVICE))
    reduced.logits.zero_()
    report("floor", "", "", "", *[logits.nbytes / bandwidth for logits in made_logits])
    for tiling in TILINGS:
        times: list[Any] = []
        for logits, vocab in zip(made_logits, vocabs, strict=True):
            run = partial(triton_kernels.reduce_rows, logits, 0, vocab, reduced, tiling=tiling)
            try:
                times.append(milliseconds(run))
            except Exception as error:
                times.append(type(error).__name__)
        report(tiling.lanes, tiling.width, tiling.num_warps, tiling.num_stages, *times)


def compare(report: Report, module: Any, shape: tuple[int, int], rows: int, bandwidth: float) -> None:
    """Projection, vLLM's kernels and ours on one chunk."""
    vocab, hidden = shape
    states, weight, targets = made(rows, vocab, hidden)
    logits = states @ weight.T
    projection = milliseconds(lambda: states @ weight.T)
    floor = logits.nbytes / bandwidth
    for top in TOPS:
        error = check(logits, targets, once(logits, targets, top))
        ours = milliseconds(partial(once, logits, targets, top))
        theirs = milliseconds(partial(stock_once, module, logits, targets, top)) if module else math.nan
        report(rows, vocab, hidden, top, projection, theirs, ours, theirs / ours, ours / floor, f"{error:.1e}")


def step(report: Report, module: Any, shape: tuple[int, int], rows: int) -> None:
    """A whole step's prompt logprobs, projection included, in chunks."""
    vocab, hidden = shape
    states, weight, targets = made(rows, vocab, hidden)

    def project(part: torch.Tensor) -> torch.Tensor:
        return part @ weight.T

    times = [milliseconds(lambda: [project(part) for part in states.split(STEP_CHUNK)])]
    for top in TOPS:
        if module:
            module.CHUNK_SIZE = STEP_CHUNK
            run = partial(module.compute_prompt_logprobs_with_chunking, targets, states, project, top)
            times.append(milliseconds(run))
        times.append(milliseconds(partial(fused_logprobs.compute, targets, states, project, top, STEP_CHUNK)))
    report(rows, vocab, hidden, *times)


def chunking(report: Report, shape: tuple[int, int], rows: int) -> None:
    """Projection of a number of rows just over a chunk: the rest apart, and in equal parts."""
    states, weight, _ = made(rows, *shape)
    equal = fused_logprobs.chunk_rows(rows, STEP_CHUNK)
    times = [
        milliseconds(partial(lambda size: [part @ weight.T for part in states.split(size)], size))
        for size in (STEP_CHUNK, equal)
    ]
    report(rows, *shape, equal, *times)


def attempt(report: Report, function: Callable[..., None], *arguments: Any) -> None:
    try:
        function(report, *arguments)
    except Exception:
        report("FAILED", function.__name__, *arguments, traceback.format_exc())
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", nargs="?", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    shapes, rows, step_rows = ([(1000, 16)], [8], 20) if options.quick else (SHAPES, ROWS, STEP_ROWS)
    report, module = Report(options.log), stock()
    start = time.perf_counter()
    bandwidth = copied_bytes_per_millisecond()
    report(f"torch {torch.__version__}, triton {triton.__version__}, copy {bandwidth / 1e9:.2f} TB/s")
    for vocab in (131, 257) if options.quick else (50257, 131, 8192):
        attempt(report, hard, vocab)
    attempt(report, sweep, sorted({vocab for vocab, _ in shapes}), max(rows) // 2, bandwidth)
    report("\n", "rows", "vocab", "hidden", "k", "projection", "vLLM", "ours", "ratio", "/ floor", "error")
    for shape in shapes:
        for count in rows:
            attempt(report, compare, module, shape, count, bandwidth)
    names = [f"{who} k={top}" for top in TOPS for who in (("vLLM", "ours") if module else ("ours",))]
    report("\n", "rows", "vocab", "hidden", "projection", *names)
    for shape in shapes:
        attempt(report, step, module, shape, step_rows)
    report("\n", "rows", "vocab", "hidden", "equal", f"by {STEP_CHUNK}", "equally")
    for shape in shapes:
        for count in [(30,), (1100, 2200)][not options.quick]:
            attempt(report, chunking, shape, count)
    report(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
