"""Every format that is deployed, as served, compared with an oracle that applies the same quantization in torch.

    python bench/formats.py MODEL TEXT LOGS [--parts scores kld lanes repeat] [OPTION...] [any vllm serve flag]

MODEL is the folder of a Llama-like model in bfloat16 safetensors with its tokenizer, TEXT what `ppl-client --dataset`
reads, LOGS a folder for checkpoints, references and the servers' logs. All servers start at once on one GPU.

scores  `/v1/score` of each format; docs/benchmarks.md says what the columns are
kld     each format's divergence from the model as served in bfloat16; the oracle's logits are float32
lanes   the same divergence in the prefill and the decode lane, and what the lanes differ in
repeat  whether sequences get the same logprobs again, with and without batch-invariant kernels
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from checkpoints import write_checkpoint
from loads import record
from quantized_oracle import DEVICE, divergences, logprobs, oracle_model
from servers import Row, Server, ServerProcess, kernels, log_of, model_server, parsed, row_or_failure, starting
from tables import table
from transformers import PreTrainedModel

from scoremode import ScoreClient
from scoremode.runs import lane_difference


@dataclass(frozen=True, slots=True)
class Case:
    """A format as it is served."""

    checkpoint: str | None = None
    """A name in `checkpoints.FORMATS`; None for MODEL itself."""
    dtype: str = "bfloat16"
    flags: tuple[str, ...] = ()
    attention: tuple[str, ...] = ("sdpa",)
    """The oracle's; where there are several, the table has the first."""


CASES: dict[str, Case] = {
    "float32": Case(dtype="float32"),
    "bf16": Case(),
    "fp16": Case(dtype="float16"),
    "w4a16": Case("w4a16"),
    "nvfp4a16": Case("nvfp4a16"),
    "fp8": Case("fp8"),
    "int8": Case("int8"),
    # Without scales in the checkpoint vLLM uses 1.0 for keys and values.
    "fp8-kv-cache": Case(flags=("--kv-cache-dtype", "fp8"), attention=("fp8_attention", "fp8_cache")),
}
BASE = "bf16"
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
VARIANTS: dict[str, dict[str, str]] = {"": {}, " again": {}, " invariant": INVARIANT, " invariant again": INVARIANT}
"""Environments of the servers that `repeat` needs of each format."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Servers that are starting, the folders of their models, and what they score."""

    folders: Mapping[str, Path]
    futures: Mapping[str, "Future[ServerProcess]"]
    windows: Windows
    logs: Path

    def url(self, name: str) -> str:
        """The URL of a server, as soon as it is up."""
        return self.futures[name].result().url

    def client(self, name: str) -> ScoreClient:
        """A client of a server, as soon as it is up."""
        return ScoreClient(self.url(name), timeout=600)

    def kernels(self, name: str) -> str:
        """The kernels that a server's log names."""
        return kernels(log_of(name, self.logs))


SCORES_HEADER = (
    *("format", "kernels", "perplexity", "oracle's", "decompressed", "to the oracle's"),
    *("mean difference", "max", "oracle's own rounding", "to decompressed"),
)


def score_rows(setup: Setup) -> Iterator[Row]:
    """One per format."""
    for name in setup.folders:
        yield row_or_failure((name,), score_row, setup, name)


def score_row(setup: Setup, name: str) -> Row:
    """A format compared with its oracles."""
    case, folder = CASES[name], setup.folders[name]
    dtype = getattr(torch, case.dtype)

    def oracle(attention: str, arithmetic: torch.dtype = torch.float32, **options: Any) -> Logprobs:
        # Serving a bfloat16 checkpoint in float16 rounds its smallest weights.
        options["weights_dtype"] = dtype if case.dtype == "float16" else None
        model = oracle_model(folder, attention=attention, dtype=arithmetic, device=DEVICE, **options)
        return logprobs(model, setup.windows)

    first, *others = case.attention
    expected = oracle(first)
    decompressed = oracle("sdpa", quantized_activations=False)
    # This is how much rounding in the served dtype alone may change.
    rounding = Agreement.between(oracle(first, dtype), expected)
    served = served_logprobs(setup.url(name), setup.windows)
    found = Agreement.between(served, expected)
    print(f"{name}: to the oracle {found}; its own arithmetic in the served dtype: {rounding}", flush=True)
    for other in others:
        values = oracle(other)
        print(f"  oracle {other}: perplexity {perplexity(values):.4f}, {Agreement.between(served, values)}")
    return (
        setup.kernels(name),
        *(f"{perplexity(values):.4f}" for values in (served, expected, decompressed)),
        *(f"{found.perplexity_ratio:+.3%}", f"{found.mean:.4f}", f"{found.largest:.3f}"),
        *(f"{rounding.mean:.4f}", f"{Agreement.between(served, decompressed).mean:.4f}"),
    )


KLD_HEADER = ("format", "kernels", "mean KLD", "oracle's", "mean difference", "max", "reverse, max", "same top p")


def kld_rows(setup: Setup) -> Iterator[Row]:
    """One per format whose checkpoint is of its own, and the base compared with itself."""
    base = oracle_model(setup.folders[BASE], device=DEVICE)
    record(setup.url(BASE), "base", setup.windows)
    for name in setup.folders:
        if name == BASE or CASES[name].checkpoint is not None:
            yield row_or_failure((name,), kld_row, setup, name, base)


def kld_row(setup: Setup, name: str, base: PreTrainedModel) -> Row:
    """A format's divergence compared with its oracle's."""
    other = base if name == BASE else oracle_model(setup.folders[name], device=DEVICE)
    expected = divergences(base, other, setup.windows)
    found = compared(setup.url(name), "base")
    off, reverse_off = found.kld - expected[:, 0], found.reverse_kld - expected[:, 1]
    return (
        *(setup.kernels(name), f"{found.kld.mean():.6f}", f"{expected[:, 0].mean():.6f}"),
        *(f"{off.mean():+.2e}", f"{np.abs(off).max():.2e}", f"{np.abs(reverse_off).max():.2e}"),
        f"{(found.top_token_ids == found.reference_top_token_ids).mean():.4f}",
    )


LANES_HEADER = (
    *("format", "kernels", "KLD prefill", "KLD decode", "floors"),
    *("NLL decode - prefill", "absolute", "verdict"),
)


def lane_rows(setup: Setup) -> Iterator[Row]:
    """One per format; the base's divergence in the decode lane is the floor."""
    record(setup.url(BASE), "lanes", setup.windows)
    floor = compared(setup.url(BASE), "lanes", "decode").kld.mean()
    for name in setup.folders:
        yield row_or_failure((name,), lane_row, setup, name, floor)


def lane_row(setup: Setup, name: str, floor: float) -> Row:
    """A format's divergences in both lanes, and what its lanes differ in."""
    prefill, decode = (compared(setup.url(name), "lanes", lane) for lane in ("prefill", "decode"))
    positions = np.tile(np.arange(1, len(setup.windows[0])), len(setup.windows))
    nlls = lane_difference(-prefill.logprobs, -decode.logprobs, positions)
    return (
        *(setup.kernels(name), f"{prefill.kld.mean():.6f}", f"{decode.kld.mean():.6f}"),
        *(f"{decode.kld.mean() / floor:.1f}", f"{nlls.mean:+.5f}", f"{nlls.mean_absolute:.5f}"),
        # The base diverges from itself by rounding alone.
        (nlls if name == BASE else lane_difference(prefill.kld, decode.kld, positions)).verdict(),
    )


WAYS = ("alone again", "all at once", "in reverse", "cached", "restarted")
REPEAT_HEADER = ("format", "invariant", "kernels", *WAYS)


def repeat_rows(setup: Setup) -> Iterator[Row]:
    """Sequences of several lengths, compared with what each of them scores alone."""
    count = len(setup.windows)
    sequences = [window[: len(window) * (index + 1) // count] for index, window in enumerate(setup.windows)]
    for name in setup.folders:
        for invariant, server in (("no", name), ("yes", f"{name} invariant")):
            yield row_or_failure((name, invariant), repeat_row, setup, server, sequences)


def repeat_row(setup: Setup, name: str, sequences: list[list[int]]) -> Row:
    """Whether all bytes are equal, or else the largest difference in nats, for each of `WAYS`."""
    with setup.client(name) as client, setup.client(f"{name} again") as restarted:
        return (setup.kernels(name), *repeated(client, restarted, sequences))


def repeated(client: ScoreClient, restarted: ScoreClient, sequences: list[list[int]]) -> list[str]:
    """The figures of `repeat_row`."""

    def scored(asked: list[list[int]], by: ScoreClient = client, *, use_cache: bool = False) -> list[np.ndarray]:
        return [score.logprob_array[1:] for score in by.score(asked, use_cache=use_cache)]

    def alone(by: ScoreClient) -> list[np.ndarray]:
        return [scored([sequence], by)[0] for sequence in sequences]

    expected = np.concatenate(alone(client))
    found = [alone(client), scored(sequences), scored(sequences[::-1])[::-1]]
    scored([sequence[: len(sequence) // 2] for sequence in sequences], use_cache=True)
    found += [scored(sequences, use_cache=True), alone(restarted)]
    off = [np.abs(np.concatenate(each) - expected).max() for each in found]
    return [f"{largest:.1e}" if largest else "equal" for largest in off]


PARTS: dict[str, tuple[Row, Callable[[Setup], Iterator[Row]]]] = {
    "scores": (SCORES_HEADER, score_rows),
    "kld": (KLD_HEADER, kld_rows),
    "lanes": (LANES_HEADER, lane_rows),
    "repeat": (REPEAT_HEADER, repeat_rows),
}


def servers_of(folders: Mapping[str, Path], parts: list[str], common: list[str]) -> dict[str, Server]:
    """A server per format; for `repeat` a second one of each, and two with batch-invariant kernels."""
    variants = VARIANTS if "repeat" in parts else {"": {}}
    return {
        f"{name}{variant}": model_server(
            folder, CASES[name].dtype, *common, *CASES[name].flags, environment=environment
        )
        for name, folder in folders.items()
        for variant, environment in variants.items()
    }


def main() -> None:
    """Write checkpoints, start servers, run oracles, compare."""
    parser = windows_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["scores"])
    parser.add_argument("--formats", nargs="+", choices=CASES, default=list(CASES), help="kld and lanes need bf16")
    options, flags = parsed(parser)
    windows = cut_windows(options.text, options.model, options.windows, options.length)
    folders = {
        name: write_checkpoint(options.model, options.logs / "checkpoints" / kind, kind) if kind else options.model
        for name in options.formats
        for kind in [CASES[name].checkpoint]
    }
    common = ["--max-model-len", str(options.length + 1)]
    common += ["--reference-dir", str(options.logs / "references"), *flags]
    start = time.perf_counter()
    with starting(servers_of(folders, options.parts, common), options.logs) as futures:
        setup = Setup(folders, futures, windows, options.logs)
        # Before servers are stopped, which takes some seconds for each.
        for part in options.parts:
            header, rows = PARTS[part]
            print(table(header, list(rows(setup))), f"{time.perf_counter() - start:.0f} s", sep="\n", flush=True)


if __name__ == "__main__":
    main()
