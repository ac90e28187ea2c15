"""What `/v1/score` answers besides the logprobs of a text, beside transformers: on a GPU, where other kernels make it.

    python bench/score_options.py MODEL TEXT LOGS [OPTION...] [any vllm serve flag]

MODEL, TEXT and LOGS are those of bench/formats.py. Likeliest tokens, candidates, a temperature and `logprobs_from` are
asked for together and one by one, of a server in float32 and one in bfloat16. The oracle's logits are float32, and its
log-softmax float64.
"""

import sys
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from agreement import cut_windows, windows_parser  # noqa: E402
from model_servers import Server, failed_row, starting  # noqa: E402
from quantized_oracle import oracle_model  # noqa: E402
from servers import Settings  # noqa: E402
from tables import table  # noqa: E402

from local_server import has_gpu  # noqa: E402
from scoremode import Score, ScoreClient  # noqa: E402

DTYPES = ("float32", "bfloat16")
TOP, FIRST, TEMPERATURE = 100, 100, 0.7
CANDIDATES = [0, 5, 300, 2000, 40000]
REQUESTS: dict[str, dict[str, Any]] = {
    "top 20": {"top_logprobs": 20},
    "top 100": {"top_logprobs": TOP},
    "candidates": {"candidate_token_ids": CANDIDATES},
    "temperature": {"temperature": TEMPERATURE},
    "from a position on": {"logprobs_from": FIRST},
    "all of them": {
        "top_logprobs": TOP,
        "candidate_token_ids": CANDIDATES,
        "temperature": TEMPERATURE,
        "logprobs_from": FIRST,
    },
}
HEADER = ("dtype", "asked for", "values", "mean difference", "largest", "other likeliest tokens")
Logits = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Differences:
    """Between an answer and the oracle, in nats."""

    values: np.ndarray
    other_tokens: int
    """Of the likeliest: those that are off the oracle's own by more than twice the largest difference."""


@torch.inference_mode()
def oracle_logits(folder: Path, windows: list[list[int]], device: str) -> Logits:
    """[tokens, vocabulary] of each window, on the device, float32."""
    model = oracle_model(folder, device=device)
    return [model(torch.tensor([window], device=device), use_cache=False).logits[0] for window in windows]


def compare(score: Score, window: list[int], logits: torch.Tensor, options: dict[str, Any]) -> Differences:
    """Everything that an answer says of a window."""
    first = options.get("logprobs_from", 0)
    positions = np.arange(max(first, 1), len(window))
    expected = (logits[positions - 1].double() / options.get("temperature", 1.0)).log_softmax(-1).cpu().numpy()
    rows = np.arange(len(positions))
    returned = positions - first
    parts = [np.asarray(score.logprobs, float)[returned] - expected[rows, np.asarray(window)[positions]]]
    if "candidate_token_ids" in options:
        assert score.candidate_logprobs is not None
        parts.append((score.candidate_logprobs[returned] - expected[:, CANDIDATES]).ravel())
    other_tokens = 0
    if num_top := options.get("top_logprobs"):
        assert score.top_logprobs is not None
        of_ours = np.take_along_axis(expected, score.top_logprobs.token_ids[returned].astype(int), 1)
        parts.append((score.top_logprobs.logprobs[returned] - of_ours).ravel())
        last = np.partition(expected, -num_top, axis=1)[:, -num_top]
        largest = max(np.abs(part).max() for part in parts)
        other_tokens = int((of_ours < last[:, None] - 2 * largest).sum())
    return Differences(np.abs(np.concatenate(parts)), other_tokens)


def row(dtype: str, name: str, url: Future[str], windows: list[list[int]], logits: Logits) -> tuple[str, ...]:
    """A line of the table, or why there is none."""
    options = REQUESTS[name]
    try:
        with ScoreClient(url.result(), timeout=600) as client:
            scores = client.score(windows, use_cache=False, **options)
        found = [compare(*each, options) for each in zip(scores, windows, logits, strict=True)]
    except Exception as error:
        return failed_row(HEADER, dtype, name, error=error)
    values = np.concatenate([each.values for each in found])
    others = sum(each.other_tokens for each in found)
    return (dtype, name, f"{len(values):,}", f"{values.mean():.2e}", f"{values.max():.2e}", str(others))


def main() -> None:
    """Start both servers, compute the oracle meanwhile, compare."""
    parser = windows_parser(__doc__)
    options, flags = parser.parse_known_args()
    torch.set_float32_matmul_precision("highest")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    windows = cut_windows(options.text, options.model, options.windows, options.length)
    servers = {
        dtype: Server(options.model, Settings(("--dtype", dtype, "--max-logprobs", "128")))
        for dtype in (DTYPES if has_gpu() else DTYPES[:1])
    }
    with starting(servers, options.logs, "--max-model-len", str(options.length + 1), *flags) as urls:
        logits = oracle_logits(options.model, windows, device)
        rows = [row(dtype, name, urls[dtype], windows, logits) for dtype in servers for name in REQUESTS]
    print(table(HEADER, rows), flush=True)


if __name__ == "__main__":
    main()
