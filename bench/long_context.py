"""A window of 32,768 tokens, computed in steps of several sizes: the steps must not show in its scores.

    python bench/long_context.py TOKENIZER TEXT LOGS [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any model's tokenizer, TEXT a file or folder of text, LOGS a folder for the servers' logs.
The model is four random blocks with a context of 32,768 and no scaling of RoPE: what it knows does not matter, only
that every logprob depends on all tokens before it. Each server takes steps of another size
(`--max-num-batched-tokens`), and transformers, which takes none, is the oracle. At the end, the time of such a window
on the 8B shape, dummy weights.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import httpx
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from agreement import Agreement, Logprobs, Windows, cut_windows, perplexity, served_logprobs  # noqa: E402
from model_servers import Server, failed_row, reason, starting  # noqa: E402
from quantized_oracle import logprobs, oracle_model  # noqa: E402
from servers import MEMORY as SHAPE_MEMORY  # noqa: E402
from servers import Settings  # noqa: E402
from shapes import write_shape  # noqa: E402
from tables import table  # noqa: E402

HEADER = ("dtype", "step", "perplexity", "beside", "to its perplexity", "mean difference", "max", "mean, last quarter")
REPEATS = 3


def random_model(tokenizer: Path, folder: Path, positions: int) -> Path:
    """Four blocks of eight query heads on four, drawn from a fixed seed, in float32.

    Weights of deviation 0.05 in a width of 512 let scores of attention deviate by about 1: enough for positions to
    count, and far from an attention that only ever picks one.
    """
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(tokenizer)),
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def compare(dtype: str, step: str, other: str, scored: Mapping[str, Logprobs]) -> tuple[str, ...]:
    """A row: one size of step beside another, or beside the oracle."""
    agreement = Agreement.of(scored[step], scored[other])
    last = Agreement.of(*([values[-len(values) // 4 :] for values in scored[name]] for name in (step, other)))
    print(f"{dtype}: {step} to {other}: {agreement}; last quarter: {last}", flush=True)
    return (
        *(dtype, step, f"{perplexity(scored[step]):.4f}", other, f"{agreement.perplexity_ratio:+.4%}"),
        *(f"{agreement.mean:.2e}", f"{agreement.largest:.2e}", f"{last.mean:.2e}"),
    )


def agreements(
    urls: Mapping[str, Future[str]], dtype: str, steps: list[int], windows: Windows, oracle: Logprobs | None
) -> list[tuple[str, ...]]:
    """A row for each step beside the oracle, and for each but the first beside the first."""
    scored = {} if oracle is None else {"the oracle": oracle}
    rows = []
    first = f"{steps[0]:,}"
    for step in steps:
        name = f"{step:,}"
        try:
            start = time.perf_counter()
            scored[name] = served_logprobs(urls[f"{dtype}-{step}"].result(), windows)
            print(f"{dtype}, step {name}: scored in {time.perf_counter() - start:.2f} s, waiting included", flush=True)
        except Exception as error:
            print(f"{dtype}, step {name}: {reason(error)}", flush=True)
            rows.append(failed_row(HEADER, dtype, name, error=error))
            continue
        rows += [
            compare(dtype, name, other, scored) for other in ("the oracle", first) if other in scored and other != name
        ]
    return rows


def expect(model: Path, windows: Windows, step: int) -> Logprobs | None:
    """The oracle's scores, or None where the machine has too little memory for it.

    Prints what it scores where the first two steps change places: how large a fault of chunking would show.
    """
    try:
        oracle = oracle_model(model, device="cuda" if torch.cuda.is_available() else "cpu")
        scores = logprobs(oracle, windows)
        exchanged = logprobs(oracle, [[*each[step : 2 * step], *each[:step], *each[2 * step :]] for each in windows])
    except torch.OutOfMemoryError as error:
        print(f"no oracle: {reason(error)}", flush=True)
        return None
    fault = Agreement.of(*([values[-len(values) // 4 :] for values in each] for each in (exchanged, scores)))
    print(f"the oracle with the first two steps of {step:,} exchanged, last quarter: {fault}", flush=True)
    return scores


def times(url: str, model: str, length: int) -> None:
    """Seconds for one window of random tokens, nothing else in flight: prefill only, and scored; best of some."""
    rng = random.Random(0)
    requests: dict[str, Callable[[list[int]], tuple[str, dict[str, object]]]] = {
        # Scoring feeds one token less than it scores.
        "prefill": lambda tokens: ("/v1/completions", {"prompt": tokens[:-1], "max_tokens": 1, "temperature": 0}),
        "score": lambda tokens: ("/v1/score", {"prompt": tokens, "encoding_format": "base64"}),
    }
    with httpx.Client(base_url=url, timeout=600) as client:
        for kind, request in requests.items():
            seconds = []
            for _ in range(REPEATS):
                path, body = request([rng.randrange(300, 49000) for _ in range(length)])
                start = time.perf_counter()
                client.post(path, json={"model": model, **body}).raise_for_status()
                seconds.append(time.perf_counter() - start)
            taken = ", ".join(f"{each:.3f}" for each in seconds)
            print(f"  {kind}: {taken} s; best {length / min(seconds):,.0f} tok/s", flush=True)


def main() -> None:
    """Make the model, start every server, compare scores, take the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("text")
    parser.add_argument("logs", type=Path)
    parser.add_argument("--length", type=int, default=32768, help="tokens of the window")
    parser.add_argument("--steps", type=int, nargs="+", default=[8192, 2048, 32768], help="tokens a step")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--shape", default="8b", help="of bench/shapes.py, whose time is taken")
    options, flags = parser.parse_known_args()
    torch.set_float32_matmul_precision("highest")
    windows = cut_windows(options.text, options.tokenizer, 1, options.length)
    model = random_model(options.tokenizer, options.logs / "random", options.length)
    limit = ("--max-model-len", str(options.length))
    servers = {
        f"{dtype}-{step}": Server(model, Settings((*limit, "--dtype", dtype, "--max-num-batched-tokens", str(step))))
        for dtype in options.dtypes
        for step in options.steps
    }
    with tempfile.TemporaryDirectory() as folder:
        shape_flags = ("--load-format", "dummy", "--max-num-batched-tokens", str(options.steps[0]), *SHAPE_MEMORY)
        shape = write_shape(options.shape, options.tokenizer, Path(folder))
        servers["shape"] = Server(shape, Settings((*limit, *shape_flags, "--served-model-name", options.shape)))
        with starting(servers, options.logs, *flags) as urls:
            oracle = expect(model, windows, min(options.steps))
            rows = [row for dtype in options.dtypes for row in agreements(urls, dtype, options.steps, windows, oracle)]
            try:
                print(f"{options.shape}, a window of {options.length:,} tokens", flush=True)
                times(urls["shape"].result(), options.shape, options.length)
            except Exception as error:
                print(f"  {reason(error)}", flush=True)
    print(table(HEADER, rows), flush=True)


if __name__ == "__main__":
    main()
