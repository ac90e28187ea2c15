"""What a new vLLM must show on the device before it is supported; status 1 if anything is off.

    python bench/vllm_upgrade.py MODEL TEXT LOGS [--shapes SHAPE...] [OPTION...] [any vllm serve flag]

MODEL is the folder of a Llama-shaped model in safetensors with its tokenizer, TEXT a file or folder of text, LOGS a
folder for the servers' logs. What runs is the vLLM and the Scoremode of this environment:

- `/v1/score` and `/v1/perplexity` beside transformers in float32, on this device and on the same windows of the text
- `/v1/completions` with `echo` beside vLLM's own answer from the same engine, field by field: the requests of
  tests/completion_requests.py. With VLLM_BATCH_INVARIANT=1 in the environment their floats must agree to the last
  digit
- scores taken from the cache beside those that were computed
- with `--shapes`, the rates of bench/http_throughput.py, measured last; all servers start at once
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import torch
from transformers import AutoConfig

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / folder) for folder in ("scripts", "bench", "tests")]

import http_throughput  # noqa: E402
from agreement import Agreement, Logprobs, Windows, cut_windows, perplexity, served_logprobs, windows_parser  # noqa: E402
from completion_requests import answers, prompts_that_begin_alike, requests  # noqa: E402
from model_servers import Server, starting  # noqa: E402
from quantized_oracle import logprobs, oracle_model  # noqa: E402
from servers import STOCK, Settings, started  # noqa: E402
from shapes import SHAPES  # noqa: E402
from tables import table  # noqa: E402

from local_server import has_gpu  # noqa: E402
from scoremode import ScoreClient  # noqa: E402

STOCK_BESIDE = (sys.executable, str(ROOT / "tests/e2e/stock_beside.py"), "scoremode")
RATED = {"stock": STOCK, "scoremode": Settings()}
LONGEST_PROMPT = 60
"""Of the generated completion requests, in tokens."""

MEAN_NATS = {"float32": 5e-3, "bfloat16": 5e-2}
"""How far tokens may be off in the mean. A GPU multiplies float32 in TF32; 0.002 was seen, and 0.03 in bfloat16."""
LAST_DIGIT = 1e-6
"""Of a float32 logprob. A row that the sampled step scored comes from vLLM's sampler, which rounds otherwise."""
PERPLEXITY_SHARE = {"float32": 1e-3, "bfloat16": 3e-3}
LARGEST_NATS = {"float32": 2e-2, "bfloat16": 0.5}
"""How far one float may be off between two answers of one engine: steps of another size round otherwise, in TF32 and in
bfloat16."""


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the table."""

    name: str
    result: str
    passed: bool


@dataclass(slots=True)
class Comparison:
    """Two JSON values beside each other: the largest difference of floats, and everything else that differs.

    Ids and times are left out. Ranks are kept apart, and positions at which the k likeliest tokens are others or in
    another order: two tokens almost equally likely change places for a last digit. Logprobs are compared in order.
    """

    largest: float = 0.0
    ranks: int = 0
    exchanged: int = 0
    others: list[str] = field(default_factory=list)

    def add(self, ours: Any, stock: Any, path: str = "") -> None:
        """Compare; `path` leads to the values."""
        match ours, stock:
            case dict(), dict() if list(ours) == list(stock):
                for key in ours.keys() - {"id", "created"}:
                    self.add(ours[key], stock[key], f"{path}.{key}")
            case dict(), dict() if [*ours][:1] == [*stock][:1] and len(_falling(ours)) == len(_falling(stock)) > 0:
                self.exchanged += 1
                self.add(_falling(ours), _falling(stock), path)
            case list() | tuple(), list() | tuple() if len(ours) == len(stock):
                for index, (one, other) in enumerate(zip(ours, stock, strict=True)):
                    self.add(one, other, f"{path}[{index}]")
            case float(), float():
                self.largest = max(self.largest, abs(ours - stock))
            case int(), int() if ours != stock and path.endswith(".rank"):
                self.ranks += 1
            # Equal dictionaries may still have their keys in another order.
            case _ if isinstance(ours, dict) or type(ours) is not type(stock) or ours != stock:
                self.others.append(f"{path}: {ours!r:.400} beside {stock!r:.400}")


def _falling(candidates: dict[str, Any]) -> list[float]:
    """The logprobs of the likeliest tokens at one position, in falling order; none of any other dictionary."""
    found = [value.get("logprob") if isinstance(value, dict) else value for value in candidates.values()]
    return sorted(found, reverse=True) if all(isinstance(value, float) for value in found) else []


def score_checks(url: str, dtype: str, windows: Windows, expected: Logprobs) -> Iterator[Check]:
    """`/v1/score` and `/v1/perplexity` beside the oracle."""
    agreement = Agreement.of(served_logprobs(url, windows), expected)
    share = PERPLEXITY_SHARE[dtype]
    passed = agreement.mean <= MEAN_NATS[dtype] and abs(agreement.perplexity_ratio) <= share
    yield Check(f"/v1/score, {dtype}, to transformers", str(agreement), passed)
    # One token more, without which a text that ends with a window lacks that window.
    text = [token for window in windows for token in window] + [windows[0][0]]
    with ScoreClient(url, timeout=600) as client:
        answer = client.perplexity(text, method="disjoint", context_length=len(windows[0]))
    figures = f"{answer.perplexity:.4f} beside {perplexity(expected):.4f}, {answer.num_windows} windows"
    same = abs(answer.perplexity / perplexity(expected) - 1) <= share and answer.num_windows == len(windows)
    yield Check(f"/v1/perplexity, {dtype}, beside transformers", figures, same)


def completion_checks(url: str, dtype: str, vocab_size: int) -> Iterator[Check]:
    """`/v1/completions` beside vLLM's own."""
    kinds = {
        "requests of every kind": requests(Random(20), vocab_size, LONGEST_PROMPT),
        "prompts that begin alike": prompts_that_begin_alike(Random(21), vocab_size),
    }
    for name, bodies in kinds.items():
        comparison, statuses = Comparison(), dict[int, int]()
        with httpx.Client(base_url=url, timeout=300) as client:
            for body in bodies:
                ours, stock = answers(client, body)
                comparison.add(ours, stock, f"{body}: ")
                statuses[ours[0]] = statuses.get(ours[0], 0) + 1
        for other in comparison.others[:5]:
            print(f"  {other}", flush=True)
        counts = ", ".join(f"{count} answered {status}" for status, count in sorted(statuses.items()))
        result = (
            f"floats at most {comparison.largest:.1e} off, {comparison.ranks} ranks, {comparison.exchanged} positions "
            f"with others of almost equal likelihood, {len(comparison.others)} others"
        )
        largest = LAST_DIGIT if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else LARGEST_NATS[dtype]
        passed = comparison.largest <= largest and not comparison.others and statuses.get(200, 0) > 0
        yield Check(f"echo beside vLLM's own, {dtype}, {name}", f"{counts}; {result}", passed)


def cache_check(url: str, windows: Windows) -> Check:
    """The same prompts computed, kept, and taken from the cache."""
    # Backwards, since nothing else has asked for them so.
    windows = [window[::-1] for window in windows]
    computed, kept, cached = (score(url, windows, use_cache) for use_cache in (False, True, True))
    off = max(float(np.abs(one - other).max()) for one, other in zip(computed.logprobs, cached.logprobs, strict=True))
    same = sum(int((one == other).sum()) for one, other in zip(kept.logprobs, cached.logprobs, strict=True))
    result = (
        f"cached tokens {computed.cached_tokens}, {kept.cached_tokens}, {cached.cached_tokens} of {cached.tokens}; "
        f"{same} equal those of the first, to uncached at most {off:.1e} off"
    )
    passed = (
        computed.cached_tokens == kept.cached_tokens == 0
        and 2 * cached.cached_tokens > cached.tokens
        and off <= LARGEST_NATS["float32"]
    )
    return Check("cache off, empty, full", result, passed)


@dataclass(frozen=True, slots=True)
class Scores:
    """An answer of `/v1/score`."""

    logprobs: list[np.ndarray]
    tokens: int
    cached_tokens: int


def score(url: str, windows: Windows, use_cache: bool) -> Scores:
    """Have windows scored, one request each, so that their order is always the same."""
    scored, tokens, cached = [], 0, 0
    for window in windows:
        body = {"prompt": list(window), "use_cache": use_cache}
        answer = httpx.post(f"{url}/v1/score", json=body, timeout=300).raise_for_status().json()
        scored.append(np.array(answer["data"][0]["logprobs"][1:], dtype=np.float32))
        tokens += answer["usage"]["prompt_tokens"]
        cached += answer["usage"]["cached_tokens"]
    return Scores(scored, tokens, cached)


def expect(model: Path, windows: Windows) -> Logprobs:
    """What transformers scores in float32."""
    torch.set_float32_matmul_precision("highest")
    return logprobs(oracle_model(model, device="cuda" if has_gpu() else "cpu"), windows)


def run_checks(urls: dict[str, str], model: Path, windows: Windows, expected: Logprobs) -> list[Check]:
    """All but the rates, printed as they come."""
    checks = []

    def keep(check: Check) -> None:
        print(f"{check.name}: {check.result}", flush=True)
        checks.append(check)

    for dtype, url in urls.items():
        for check in score_checks(url, dtype, windows, expected):
            keep(check)
    for dtype, url in urls.items():
        for check in completion_checks(url, dtype, AutoConfig.from_pretrained(model).vocab_size):
            keep(check)
    keep(cache_check(urls["float32"], windows))
    return checks


def main() -> int:
    """Start everything, check, measure, print the table."""
    parser = windows_parser(__doc__)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[])
    options, flags = parser.parse_known_args()
    begun = time.monotonic()
    windows = cut_windows(options.text, options.model, options.windows, options.length)
    dtypes = ("float32", "bfloat16") if has_gpu() else ("float32",)
    servers = {dtype: Server(options.model, Settings(("--dtype", dtype), STOCK_BESIDE)) for dtype in dtypes}
    with ExitStack() as stack:
        length = ("--max-model-len", str(options.length + 1))
        futures = stack.enter_context(starting(servers, options.logs, *length, *flags))
        expected = expect(options.model, windows)
        shapes = stack.enter_context(started(options.shapes, RATED, options.model, options.logs))
        urls = {dtype: future.result() for dtype, future in futures.items()}
        with ScoreClient(urls["float32"]) as client:
            info = client.info()
        print(f"servers ready after {time.monotonic() - begun:.0f} s", flush=True)
        checks = run_checks(urls, options.model, windows, expected)
        http_throughput.report(shapes)
    print(f"vLLM {info.vllm_version}, Scoremode {info.scoremode_version}, {time.monotonic() - begun:.0f} s")
    print(table(("check", "result", ""), [(each.name, each.result, "ok" if each.passed else "OFF") for each in checks]))
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
