"""Do the same sequences get the same logprobs? By kernel, with and without batch-invariant ones.

    python bench/repeatability.py MODEL TEXT LOGS [OPTION...] [any vllm serve flag]

MODEL, TEXT and LOGS are those of bench/formats.py. Each format is served twice, so that the second stands for a
restart, and twice more with VLLM_BATCH_INVARIANT=1. Sequences of several lengths are scored alone, which is what the
others are compared with: alone again, all at once, in the reverse order, from cached rows, and by the second server.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from agreement import cut_windows, windows_parser  # noqa: E402
from checkpoints import write_checkpoint  # noqa: E402
from model_servers import Server, failed_row, kernels, log_of, starting  # noqa: E402
from servers import Settings  # noqa: E402
from tables import table  # noqa: E402

from local_server import has_gpu  # noqa: E402
from scoremode import ScoreClient  # noqa: E402

FORMATS = ("bf16", "w4a16", "fp8", "int8")
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
WAYS = ("alone again", "all at once", "in reverse", "cached", "restarted")
HEADER = ("format", "invariant", "kernels", *WAYS)
Tokens = list[list[int]]


def scored(client: ScoreClient, sequences: Tokens, *, use_cache: bool = False) -> np.ndarray:
    """Logprobs of all tokens but the first of each, one after another, float32."""
    scores = client.score(sequences, use_cache=use_cache)
    return np.concatenate([np.array(score.logprobs[1:], np.float32) for score in scores])


def alone(client: ScoreClient, sequences: Tokens) -> np.ndarray:
    """Each in a request of its own, one after another."""
    return np.concatenate([scored(client, [sequence]) for sequence in sequences])


def in_reverse(client: ScoreClient, sequences: Tokens) -> np.ndarray:
    """All at once, the last first; the result in the order of `sequences`."""
    scores = client.score(sequences[::-1], use_cache=False)[::-1]
    return np.concatenate([np.array(score.logprobs[1:], np.float32) for score in scores])


def cached(client: ScoreClient, sequences: Tokens) -> np.ndarray:
    """The second halves after the first halves were scored and kept; compared with the whole."""
    scored(client, [sequence[: len(sequence) // 2] for sequence in sequences], use_cache=True)
    return scored(client, sequences, use_cache=True)


def difference(found: np.ndarray, expected: np.ndarray) -> str:
    """The largest in nats, and whether all bytes are equal."""
    if found.tobytes() == expected.tobytes():
        return "equal"
    return f"{np.abs(found - expected).max():.1e}"


def row(
    name: str, invariant: bool, urls: tuple[Future[str], Future[str]], sequences: Tokens, log: Path
) -> tuple[str, ...]:
    """A line of the table, or why there is none."""
    ways: dict[str, Callable[[ScoreClient, Tokens], np.ndarray]] = {
        "alone again": alone,
        "all at once": scored,
        "in reverse": in_reverse,
        "cached": cached,
    }
    beginning = (name, "yes" if invariant else "no")
    try:
        with ScoreClient(urls[0].result(), timeout=600) as client, ScoreClient(urls[1].result(), timeout=600) as other:
            expected = alone(client, sequences)
            found = {way: function(client, sequences) for way, function in ways.items()}
            found["restarted"] = alone(other, sequences)
    except Exception as error:
        return failed_row(HEADER, *beginning, "", error=error)
    return (*beginning, ", ".join(kernels(log)) or "-", *(difference(found[way], expected) for way in WAYS))


def main() -> None:
    """Write checkpoints, start all servers, compare."""
    parser = windows_parser(__doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "w4a16", "fp8"])
    options, flags = parser.parse_known_args()
    windows = cut_windows(options.text, options.model, options.windows, options.length)
    # Of several lengths, so that steps are put together in several ways.
    sequences = [window[: options.length * (index + 1) // len(windows)] for index, window in enumerate(windows)]
    dtype = ("--dtype", "bfloat16" if has_gpu() else "float32", "--max-model-len", str(options.length + 1))
    servers = {}
    for name in options.formats:
        folder = (
            options.model
            if name == "bf16"
            else write_checkpoint(options.model, options.logs / "checkpoints" / name, name)
        )
        for invariant, environment in ((False, {}), (True, INVARIANT)):
            for twin in "ab":
                servers[_key(name, invariant, twin)] = Server(folder, Settings(dtype, environment=environment))
    with starting(servers, options.logs, *flags) as urls:
        rows = [
            row(
                name,
                invariant,
                (urls[_key(name, invariant, "a")], urls[_key(name, invariant, "b")]),
                sequences,
                log_of(_key(name, invariant, "a"), options.logs),
            )
            for name in options.formats
            for invariant in (False, True)
        ]
        # Before servers are stopped, which takes some seconds for each.
        print(table(HEADER, rows), flush=True)


def _key(name: str, invariant: bool, twin: str) -> str:
    return f"{name}-{'invariant' if invariant else 'default'}-{twin}"


if __name__ == "__main__":
    main()
