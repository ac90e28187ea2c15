"""Scores of one model on one GPU and on several, and what scoring costs on several, beside stock vLLM.

    python bench/tensor_parallel.py MODEL TEXT LOGS [OPTION...] [any vllm serve flag]

MODEL, TEXT and LOGS as for bench/formats.py. vLLM refuses a number of heads that the number of devices does not
divide, and SmolLM2-135M has 9 on 3, so all servers get the same copy of MODEL whose heads are padded with zero ones;
that the copy scores as MODEL does is checked first. Throughput is that of bench/http_throughput.py, dummy weights.
"""

import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from agreement import Agreement, Logprobs, Windows, cut_windows, perplexity, served_logprobs, windows_parser  # noqa: E402
from checkpoints import pad_heads  # noqa: E402
from http_throughput import COUNTS, measure  # noqa: E402
from model_servers import Server, failed_row, reason, starting  # noqa: E402
from quantized_oracle import logprobs, oracle_model  # noqa: E402
from servers import FLAGS, STOCK, Settings  # noqa: E402
from servers import MEMORY as SHAPE_MEMORY  # noqa: E402
from shapes import write_shape  # noqa: E402
from tables import table  # noqa: E402

LARGEST_MEAN = {"bfloat16": 0.05, "float32": 0.005}
"""Nats a token, between any two degrees of parallelism, and between each and the oracle."""
LARGEST_PERPLEXITY_RATIO = 0.001
HEADER = ("dtype", "served", "perplexity", "beside", "to its perplexity", "mean difference", "max", "within the bars")


def compare(dtype: str, one: str, other: str, scored: Mapping[str, Logprobs]) -> tuple[str, ...]:
    """A row: `one` beside `other`."""
    agreement = Agreement.of(scored[one], scored[other])
    within = agreement.mean <= LARGEST_MEAN[dtype] and abs(agreement.perplexity_ratio) <= LARGEST_PERPLEXITY_RATIO
    print(f"{dtype}: {one} to {other}: {agreement}", flush=True)
    return (
        *(dtype, one, f"{perplexity(scored[one]):.4f}", other, f"{agreement.perplexity_ratio:+.4%}"),
        *(f"{agreement.mean:.5f}", f"{agreement.largest:.4f}", "yes" if within else "NO"),
    )


def agreements(
    urls: Mapping[str, Future[str]], dtype: str, degrees: list[int], windows: Windows, oracle: Logprobs
) -> list[tuple[str, ...]]:
    """A row for each degree beside the oracle, and for each but the first beside the first."""
    scored = {"the oracle": oracle}
    rows = []
    for degree in degrees:
        name = f"TP {degree}"
        try:
            scored[name] = served_logprobs(urls[f"{dtype}-tp{degree}"].result(), windows)
        except Exception as error:
            print(f"{dtype}, {name}: {reason(error)}", flush=True)
            rows.append(failed_row(HEADER, dtype, name, error=error))
            continue
        rows += [compare(dtype, name, other, scored) for other in list(scored)[:2] if other != name]
    return rows


def throughput(urls: Mapping[str, Future[str]], shape: str, repeats_of: int) -> None:
    """Measure stock and ours, one at a time."""
    for name in ("stock", "scoremode"):
        try:
            print(f"{shape}, {name}", flush=True)
            rates = measure(urls[name].result(), shape, name == "stock", repeats_of)
            prefill = rates.pop("prefill")
            print(f"  prefill {prefill:,.0f} tok/s", flush=True)
            for kind, rate in rates.items():
                print(f"  {kind} {rate:,.0f} tok/s, / prefill: {rate / prefill:.3f}", flush=True)
        except Exception as error:
            print(f"  {reason(error)}", flush=True)


def main() -> None:
    """Pad the model, start every server, compare scores, measure throughput."""
    parser = windows_parser(__doc__)
    parser.add_argument("--heads", type=int, nargs=2, default=(12, 4), help="query and key-value heads after padding")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2], help="of tensor parallelism")
    parser.add_argument("--dtypes", nargs="+", choices=LARGEST_MEAN, default=list(LARGEST_MEAN))
    parser.add_argument("--shape", default="8b", help="of bench/shapes.py, for throughput at the last degree")
    options, flags = parser.parse_known_args()
    torch.set_float32_matmul_precision("highest")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    windows = cut_windows(options.text, options.model, options.windows, options.length)
    padded = pad_heads(options.model, options.logs / "padded", *options.heads)
    limit = ("--max-model-len", str(options.length + 1))
    servers = {
        f"{dtype}-tp{degree}": Server(padded, Settings((*limit, "--dtype", dtype, *parallel(degree))))
        for dtype in options.dtypes
        for degree in options.degrees
    }
    with tempfile.TemporaryDirectory() as folder:
        shape = write_shape(options.shape, options.model, Path(folder))
        for name, settings in (("stock", STOCK), ("scoremode", Settings())):
            shape_flags = (*FLAGS, *SHAPE_MEMORY, "--served-model-name", options.shape, *parallel(options.degrees[-1]))
            servers[name] = Server(shape, replace(settings, flags=shape_flags))
        with starting(servers, options.logs, *flags) as urls:
            oracle = logprobs(oracle_model(padded, device=device), windows)
            original = logprobs(oracle_model(options.model, device=device), windows)
            print(f"padded to unpadded, both in transformers, float32: {Agreement.of(oracle, original)}", flush=True)
            rows = [
                row for dtype in options.dtypes for row in agreements(urls, dtype, options.degrees, windows, oracle)
            ]
            throughput(urls, options.shape, COUNTS.get(options.shape, 128))
    print(table(HEADER, rows), flush=True)


def parallel(degree: int) -> tuple[str, ...]:
    """The flags for a degree of tensor parallelism."""
    return ("--tensor-parallel-size", str(degree))


if __name__ == "__main__":
    main()
