"""Every format that is deployed, served and scored, beside an oracle that applies the same quantization in torch.

    python bench/formats.py MODEL TEXT LOGS [OPTION...] [any vllm serve flag]

MODEL is the folder of a Llama-shaped model in bfloat16 safetensors with its tokenizer, TEXT a file or folder of text
(parquet, jsonl, txt), LOGS a folder for checkpoints and the servers' logs. All servers start at once on one GPU, and
oracles are computed meanwhile, on the same GPU. docs/formats.md says what the columns are.
"""

import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from agreement import Agreement, Logprobs, Windows, cut_windows, perplexity, served_logprobs, windows_parser  # noqa: E402
from checkpoints import write_checkpoint  # noqa: E402
from model_servers import Server, failed_row, kernels, lacking, log_of, reason, starting  # noqa: E402
from quantized_oracle import logprobs, oracle_model  # noqa: E402
from servers import Settings  # noqa: E402
from tables import table  # noqa: E402

from local_server import has_gpu  # noqa: E402


@dataclass(frozen=True, slots=True)
class Case:
    """A format as it is served."""

    checkpoint: str | None = None
    """Of `checkpoints.FORMATS`; MODEL itself without."""
    dtype: str = "bfloat16"
    flags: tuple[str, ...] = ()
    attention: tuple[str, ...] = ("sdpa",)
    """The oracle's; where there are several, the table has the first and the others are printed beside it."""


CASES: dict[str, Case] = {
    "float32": Case(dtype="float32"),
    "bf16": Case(),
    "fp16": Case(dtype="float16"),
    "w4a16": Case("w4a16"),
    "nvfp4a16": Case("nvfp4a16"),
    "fp8": Case("fp8"),
    "int8": Case("int8"),
    # Without scales in the checkpoint vLLM takes 1.0 for keys and values.
    "fp8-kv-cache": Case(flags=("--kv-cache-dtype", "fp8"), attention=("fp8_attention", "fp8_cache")),
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a case should score."""

    oracle: Logprobs
    decompressed: Logprobs
    """The same weights, nothing else quantized, in float32."""
    own_dtype: Agreement
    """The oracle with its arithmetic in the served dtype, to itself in float32: what rounding alone may do."""
    others: dict[str, Logprobs]
    """Oracles with other kinds of attention."""


def expect(case: Case, folder: Path, windows: Windows) -> Expected:
    """Run the oracles of a case."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, case.dtype)

    def run(attention: str, arithmetic: torch.dtype = torch.float32, quantized_activations: bool = True) -> Logprobs:
        model = oracle_model(
            folder,
            quantized_activations=quantized_activations,
            attention=attention,
            # Serving a bfloat16 checkpoint in float16 rounds its smallest weights.
            weights_dtype=dtype if case.dtype == "float16" else None,
            dtype=arithmetic,
            device=device,
        )
        return logprobs(model, windows)

    oracles = {attention: run(attention) for attention in case.attention}
    first, *others = case.attention
    return Expected(
        oracles[first],
        run("sdpa", quantized_activations=False),
        Agreement.of(run(first, dtype), oracles[first]),
        {name: oracles[name] for name in others},
    )


def row(name: str, served: Logprobs, expected: Expected, log: Path) -> tuple[str, ...]:
    """One line of the table; details are printed at once."""
    agreement, decompressed = (Agreement.of(served, each) for each in (expected.oracle, expected.decompressed))
    print(f"{name}: to the oracle {agreement}; to decompressed weights {decompressed}", flush=True)
    print(f"  the oracle's own arithmetic in the served dtype: {expected.own_dtype}")
    for other, values in expected.others.items():
        print(f"  oracle {other}: perplexity {perplexity(values):.4f}, {Agreement.of(served, values)}")
    for line in lacking(log):
        print(f"  vLLM: {line}", flush=True)
    return (
        name,
        ", ".join(kernels(log)) or "-",
        *(f"{perplexity(values):.4f}" for values in (served, expected.oracle, expected.decompressed)),
        f"{agreement.perplexity_ratio:+.3%}",
        f"{agreement.mean:.4f}",
        f"{agreement.largest:.3f}",
        f"{expected.own_dtype.mean:.4f}",
        f"{decompressed.mean:.4f}",
    )


HEADER = (
    *("format", "kernels", "perplexity", "oracle's", "decompressed", "to the oracle's"),
    *("mean difference", "max", "oracle's own rounding", "to decompressed"),
)


def measure(name: str, case: Case, folder: Path, url: Future[str], windows: Windows, log: Path) -> tuple[str, ...]:
    """A row of the table, or the reason why there is none."""
    try:
        start = time.perf_counter()
        expected = expect(case, folder, windows)
        print(f"{name}: oracles took {time.perf_counter() - start:.1f} s", flush=True)
        served = served_logprobs(url.result(), windows)
        return row(name, served, expected, log)
    except Exception as error:
        print(f"{name}: {reason(error)}", *(f"\n  vLLM: {line}" for line in lacking(log)), flush=True)
        return failed_row(HEADER, name, error=error)


def main() -> None:
    """Write checkpoints, start servers, run oracles, compare."""
    parser = windows_parser(__doc__)
    parser.add_argument("--formats", nargs="+", choices=CASES, default=list(CASES))
    options, flags = parser.parse_known_args()
    torch.set_float32_matmul_precision("highest")
    windows = cut_windows(options.text, options.model, options.windows, options.length)
    cases = {name: CASES[name] for name in options.formats}
    start = time.perf_counter()
    folders = {
        name: write_checkpoint(options.model, options.logs / "checkpoints" / case.checkpoint, case.checkpoint)
        if case.checkpoint
        else options.model
        for name, case in cases.items()
    }
    print(f"{sum(map(len, windows)):,} tokens; checkpoints took {time.perf_counter() - start:.1f} s", flush=True)
    servers = {
        # bfloat16 is emulated, and slow, on many a CPU.
        name: Server(folders[name], Settings(("--dtype", case.dtype if has_gpu() else "float32", *case.flags)))
        for name, case in cases.items()
    }
    with starting(servers, options.logs, "--max-model-len", str(options.length + 1), *flags) as urls:
        rows = [
            measure(name, case, folders[name], urls[name], windows, log_of(name, options.logs))
            for name, case in cases.items()
        ]
    print(table(HEADER, rows), flush=True)


if __name__ == "__main__":
    main()
