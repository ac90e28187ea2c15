"""Score mode without HTTP: its throughput as a share of prefill only, in one process, beside the floor of exactness.

    python bench/in_process.py TOKENIZER LOGS [SHAPE...] [--turns N]      default: 8b 8b-w4a16 1b; one H200: 3 minutes

TOKENIZER is the folder of any model's tokenizer, LOGS a folder for the engines' logs. Each shape has a process with a
`vllm.LLM` of its own; all start together and are measured one at a time. A turn is 96 prompts of 2,047 random tokens
with one token to generate, not detokenized, and `scoremode_server.score` on 96 others of 2,048, of which it feeds
2,047; the two take turns in going first.

Exact scores need the vocabulary projection for every token, where prefill needs it for the last alone. So the share
cannot exceed body / (body + head): by count of floating-point operations, where both run at one rate, and by time, with
the projection timed by itself as one matrix product in bfloat16 for each step's tokens.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from shapes import write_shape  # noqa: E402

from local_server import CPU_ENVIRONMENT, has_gpu  # noqa: E402
from scoremode_server.settings import allow_plugin  # noqa: E402

BARS = {"8b": 0.92, "8b-w4a16": 0.92, "1b": 0.75}
COUNTS = {"tiny": 2}
PROMPTS = 96
LENGTH = 2047
STEP_TOKENS = 8192
START_SECONDS = 600
TURN_SECONDS = 120
STOP_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """What one engine came to."""

    prefill: list[float]
    """Tokens a second of every turn."""
    score: list[float]
    head_seconds: float | None
    """The projection of `STEP_TOKENS` tokens on the vocabulary; None without a GPU."""
    packed: bool
    """Whether the plugin was at work, which keeps logprobs as arrays."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations for one token: two for each weight of a matrix, four for each pair in attention."""

    linear: float
    attention: float
    head: float

    @classmethod
    def of(cls, config: dict[str, Any], length: int) -> "Flops":
        """Of a Llama `config`, for the mean token of a prompt, which attends to (length + 1) / 2."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        attended = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        weights = 2 * hidden * attended + 2 * hidden * keys + 3 * hidden * config["intermediate_size"]
        return cls(
            linear=2.0 * layers * weights,
            attention=4.0 * layers * attended * (length + 1) / 2,
            head=2.0 * hidden * config["vocab_size"],
        )

    @property
    def share(self) -> float:
        """The body's part of body and head."""
        return (self.linear + self.attention) / (self.linear + self.attention + self.head)

    def __str__(self) -> str:
        linear, attention, head = (value / 1e9 for value in (self.linear, self.attention, self.head))
        return (
            f"linear {linear:.3f} + attention {attention:.3f} GFLOP a token, head {head:.3f}: "
            f"({linear:.3f} + {attention:.3f}) / ({linear:.3f} + {attention:.3f} + {head:.3f}) = {self.share:.3f}"
        )


def serve(model: Path, count: int, turns: int, log: Path, connection: Connection) -> None:
    """The process of one shape: start, say so, wait for leave, measure, send a `Measured` or what went wrong."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        llm = make_llm(model)
        try:
            run_turn(llm, count, seed=0)
            connection.send("ready")
            connection.recv()
            connection.send(measure(llm, model, count, turns))
        finally:
            # The end of this process would wait for the engine's.
            llm.llm_engine.engine_core.shutdown()
    except Exception as error:
        connection.send(repr(error))
        raise


def make_llm(model: Path) -> Any:
    """An engine like a server's, its share of the GPU given and not measured: others start at the same time."""
    from vllm import LLM

    return LLM(
        str(model),
        load_format="dummy",
        max_model_len=4096,
        max_num_batched_tokens=STEP_TOKENS,
        gpu_memory_utilization=0.22,
        kv_cache_memory_bytes=8 << 30 if has_gpu() else None,
        dtype="auto" if has_gpu() else "float32",
    )


def measure(llm: Any, model: Path, count: int, turns: int) -> Measured:
    """All turns, then the projection by itself."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    rates = [run_turn(llm, count, seed) for seed in range(1, turns + 1)]
    prefill, score = zip(*rates, strict=True)
    packed = getattr(LogprobsProcessor, "_scoremode_patched", False)
    return Measured(list(prefill), list(score), head_seconds(json.loads((model / "config.json").read_text())), packed)


def run_turn(llm: Any, count: int, seed: int) -> tuple[float, float]:
    """Tokens a second of (prefill only, score mode), on tokens that no prefix cache has."""
    from vllm import SamplingParams, TokensPrompt

    from scoremode_server import score

    rng = random.Random(seed)
    prompts, sequences = (
        [[rng.randrange(300, 49000) for _ in range(length)] for _ in range(count)] for length in (LENGTH, LENGTH + 1)
    )
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    runs: list[Callable[[], Any]] = [
        lambda: llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False),
        lambda: score(llm, sequences),
    ]
    seconds = [0.0, 0.0]
    for index in (0, 1) if seed % 2 else (1, 0):
        start = time.perf_counter()
        results = runs[index]()
        seconds[index] = time.perf_counter() - start
        assert len(results) == count
    return count * LENGTH / seconds[0], count * LENGTH / seconds[1]


def head_seconds(config: dict[str, Any]) -> float | None:
    """One matrix product, [tokens, hidden] by [hidden, vocabulary], the mean of ten."""
    import torch

    if not torch.cuda.is_available():
        return None
    states = torch.randn(STEP_TOKENS, config["hidden_size"], device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(config["vocab_size"], config["hidden_size"], device="cuda", dtype=torch.bfloat16)
    logits = torch.empty(STEP_TOKENS, config["vocab_size"], device="cuda", dtype=torch.bfloat16)
    for repeats in (3, 10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            torch.matmul(states, weights.T, out=logits)
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def expect(connection: Connection, seconds: float) -> Any:
    """What a process sends.

    Raises:
        RuntimeError: it sends nothing in time, ends, or tells of an error.
    """
    if not connection.poll(seconds):
        raise RuntimeError(f"nothing after {seconds:.0f} s")
    try:
        message = connection.recv()
    except EOFError:
        raise RuntimeError("the process ended") from None
    if message != "ready" and not isinstance(message, Measured):
        raise RuntimeError(message)
    return message


def row(shape: str, measured: Measured, flops: Flops) -> str:
    """A line of the table."""
    best, middle = max(measured.score) / max(measured.prefill), median(measured.score) / median(measured.prefill)
    floor = "-"
    if measured.head_seconds is not None:
        body = STEP_TOKENS / max(measured.prefill)
        floor = f"{body / (body + measured.head_seconds):.3f}"
    bar = f"{BARS[shape]:.2f}" if shape in BARS else "-"
    rates = f"{max(measured.prefill):,.0f} | {max(measured.score):,.0f}"
    return f"{shape} | {rates} | {best:.3f} | {middle:.3f} | {flops.share:.3f} | {floor} | {bar}"


def report(shape: str, model: Path, connection: Connection, turns: int) -> str:
    """Let one process measure; its turns are printed, its line of the table returned."""
    connection.send("go")
    measured: Measured = expect(connection, turns * TURN_SECONDS)
    flops = Flops.of(json.loads((model / "config.json").read_text()), LENGTH)
    print(f"{shape}: {flops}")
    print(f"  prefill {[round(rate) for rate in measured.prefill]}, score {[round(rate) for rate in measured.score]}")
    if measured.head_seconds is not None:
        rate = STEP_TOKENS * flops.head / measured.head_seconds / 1e12
        print(f"  head of {STEP_TOKENS:,} tokens: {measured.head_seconds * 1e3:.2f} ms, {rate:.0f} TFLOP/s")
    if not measured.packed:
        print("  the plugin was not loaded: these are vLLM's own prompt logprobs")
    sys.stdout.flush()
    return row(shape, measured, flops)


def main() -> None:
    """Start a process for each shape, measure one after the other, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("shapes", nargs="*", default=list(BARS), metavar="SHAPE")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    allow_plugin()
    if not has_gpu():
        os.environ.update(CPU_ENVIRONMENT)
    context = multiprocessing.get_context("spawn")
    rows, running = [], []
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes:
            ours, theirs = context.Pipe()
            model = write_shape(shape, options.tokenizer, Path(folder))
            count, log = COUNTS.get(shape, PROMPTS), options.logs / f"in-process-{shape}.log"
            process = context.Process(target=serve, args=(model, count, options.turns, log, theirs))
            process.start()
            theirs.close()
            running.append((shape, model, process, ours))
        # No shape is measured while another one starts.
        ready = []
        for shape, model, _, connection in running:
            try:
                expect(connection, START_SECONDS)
                ready.append((shape, model, connection))
            except RuntimeError as error:
                print(f"{shape}: did not start: {error}", flush=True)
        for shape, model, connection in ready:
            try:
                rows.append(report(shape, model, connection, options.turns))
            except RuntimeError as error:
                print(f"{shape}: failed: {error}", flush=True)
        print(
            "shape | prefill, best tok/s | score | share, best | median | floor by FLOP | by time | bar",
            *rows,
            sep="\n",
        )
        sys.stdout.flush()
        for _, _, process, connection in running:
            connection.close()
            process.join(timeout=STOP_SECONDS)
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
