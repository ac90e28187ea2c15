"""One GPU and several, one step and several: neither may show in scores.

    python bench/parallelism.py MODEL TEXT LOGS [--parts scores kld long] [OPTION...] [any vllm serve flag]

MODEL, TEXT and LOGS are those of bench/formats.py. All servers of a part start at once. vLLM refuses a number of heads
that the number of devices does not divide, and SmolLM2-135M has 9 on 3, so `scores` and `kld` run a copy of MODEL whose
heads are padded with zeros. For throughput, run bench/builds.py with `--tensor-parallel-size`.

scores  each degree of tensor parallelism compared with transformers in float32, and with the first degree
kld     each degree records the model in float32 and compares a 4-bit copy with its own recording and the first's
long    a window of 32,768 tokens on a random model, in steps of several sizes (`--max-num-batched-tokens`)
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import cache
from pathlib import Path

import numpy as np
import torch
from agreement import (
    Agreement,
    Logprobs,
    Windows,
    compared,
    cut_windows,
    perplexity,
    served_logprobs,
    windows_parser,
)
from checkpoints import pad_heads
from loads import record
from quantized_oracle import DEVICE, divergences, logprobs, oracle_model
from servers import Row, ServerProcess, model_server, parsed, row_or_failure, starting
from shapes import write_shape
from tables import table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rounded_model import rounded_model

ORACLE = "the oracle"
DTYPES = ("float32", "bfloat16")
TP = "--tensor-parallel-size"

Futures = Mapping[str, "Future[ServerProcess]"]

AGREEMENT_HEADER = (
    *("dtype", "served", "perplexity", "compared with", "to its perplexity"),
    *("mean difference", "max", "mean, last quarter"),
)


def agreement_rows(futures: Futures, dtype: str, windows: Windows, oracle: Logprobs) -> Iterator[Row]:
    """Each server of a dtype compared with the oracle, and each but the first with the first."""

    @cache
    def scores(name: str) -> Logprobs:
        return oracle if name == ORACLE else served_logprobs(futures[name].result().url, windows)

    def figures(name: str, other: str) -> Row:
        found = Agreement.between(scores(name), scores(other))
        last = Agreement.between(last_quarters(scores(name)), last_quarters(scores(other)))
        return (
            *(f"{perplexity(scores(name)):.4f}", other.removeprefix(f"{dtype} "), f"{found.perplexity_ratio:+.4%}"),
            *(f"{found.mean:.2e}", f"{found.largest:.2e}", f"{last.mean:.2e}"),
        )

    names = [name for name in futures if name.startswith(dtype)]
    for name in names:
        for other in (ORACLE, names[0]):
            if other != name:
                yield row_or_failure((dtype, name.removeprefix(f"{dtype} ")), figures, name, other)


def last_quarters(values: Logprobs) -> Logprobs:
    """The last quarter of each window."""
    return [each[-len(each) // 4 :] for each in values]


def score_rows(options: argparse.Namespace, flags: list[str]) -> Iterator[Row]:
    """One per dtype, degree and what it is compared with."""
    windows = cut_windows(options.text, options.model, options.windows, options.length)
    padded = pad_heads(options.model, options.logs / "padded", *options.heads)
    limit = ("--max-model-len", str(options.length + 1))
    servers = {
        f"{dtype} TP {degree}": model_server(padded, dtype, *limit, TP, str(degree), *flags)
        for dtype in options.dtypes
        for degree in options.degrees
    }
    with starting(servers, options.logs) as futures:
        oracle, original = (logprobs(oracle_model(model, device=DEVICE), windows) for model in (padded, options.model))
        print(f"padded compared with unpadded, both in transformers: {Agreement.between(oracle, original)}", flush=True)
        for dtype in options.dtypes:
            yield from agreement_rows(futures, dtype, windows, oracle)


KLD_HEADER = ("recorded by", "compared by", "mean KLD", "to the first", "max", "to the oracle", "max")


def kld_rows(options: argparse.Namespace, flags: list[str]) -> Iterator[Row]:
    """One per pair of degrees."""
    windows = cut_windows(options.text, options.model, options.windows, options.length)
    base = pad_heads(options.model, options.logs / "padded", *options.heads)
    models = {"base": base, "copy": rounded_model(base, options.logs / "padded-4bit")}
    settings = ("--reference-dir", str(options.logs / "references"))
    settings += ("--max-model-len", str(options.length + 1))
    servers = {
        f"{name} TP {degree}": model_server(folder, "float32", *settings, TP, str(degree), *flags)
        for degree in options.degrees
        for name, folder in models.items()
    }
    with starting(servers, options.logs) as futures:
        oracle = divergences(*(oracle_model(folder, device=DEVICE) for folder in models.values()), windows)[:, 0]
        for degree in options.degrees:
            record(futures[f"base TP {degree}"].result().url, f"tp{degree}", windows)
        first = None
        own = [(degree, degree) for degree in options.degrees]
        for recorded, degree in [*own, *((options.degrees[0], degree) for degree in options.degrees[1:])]:
            found = compared(futures[f"copy TP {degree}"].result().url, f"tp{recorded}").kld
            first = found if first is None else first
            yield (
                *(f"TP {recorded}", f"TP {degree}", f"{found.mean():.8f}"),
                *(f"{found.mean() - first.mean():+.2e}", f"{np.abs(found - first).max():.2e}"),
                *(f"{found.mean() - oracle.mean():+.2e}", f"{np.abs(found - oracle).max():.2e}"),
            )


def long_rows(options: argparse.Namespace, flags: list[str]) -> Iterator[Row]:
    """One per dtype, size of steps and what it is compared with."""
    windows = cut_windows(options.text, options.model, 1, options.long_length)
    model = random_model(options.model, options.logs, options.long_length)
    limit = ("--max-model-len", str(options.long_length))
    servers = {
        f"{dtype} {step}": model_server(model, dtype, *limit, "--max-num-batched-tokens", str(step), *flags)
        for dtype in options.dtypes
        for step in options.steps
    }
    with starting(servers, options.logs) as futures:
        oracle = oracle_model(model, device=DEVICE)
        expected, step = logprobs(oracle, windows), min(options.steps)
        # How large a fault of the steps would show.
        exchanged = [[*each[step : 2 * step], *each[:step], *each[2 * step :]] for each in windows]
        fault = Agreement.between(last_quarters(logprobs(oracle, exchanged)), last_quarters(expected))
        print(f"the oracle with the first two steps of {step:,} exchanged, last quarter: {fault}", flush=True)
        for dtype in options.dtypes:
            yield from agreement_rows(futures, dtype, windows, expected)


def random_model(tokenizer: Path, folder: Path, positions: int) -> Path:
    """Four blocks of eight query heads on four, drawn from a fixed seed, in float32.

    Weights of deviation 0.05 in a width of 512 let scores of attention deviate by about 1: enough for positions to
    count, and far from an attention that only ever picks one.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    context = {"max_position_embeddings": positions, "initializer_range": 0.05, "dtype": "float32"}
    vocab_size = len(AutoTokenizer.from_pretrained(tokenizer))
    model = write_shape("tiny", tokenizer, folder, vocab_size=vocab_size, **sizes, **heads, **context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    return model


PARTS: dict[str, tuple[Row, Callable[[argparse.Namespace, list[str]], Iterator[Row]]]] = {
    "scores": (AGREEMENT_HEADER, score_rows),
    "kld": (KLD_HEADER, kld_rows),
    "long": (AGREEMENT_HEADER, long_rows),
}


def main() -> None:
    """Run the parts one after another, each with its own servers."""
    parser = windows_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--heads", type=int, nargs=2, default=(12, 4), help="query and key-value heads after padding")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2], help="of tensor parallelism")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--long-length", type=int, default=32768, help="tokens of the window of `long`")
    parser.add_argument("--steps", type=int, nargs="+", default=[8192, 2048, 32768], help="tokens per step")
    options, flags = parsed(parser)
    for part in options.parts:
        header, rows = PARTS[part]
        print(table(header, list(rows(options, flags))), flush=True)


if __name__ == "__main__":
    main()
