"""Recording a reference and comparing with it, beside scoring the same windows, on one GPU.

    python bench/kld.py TOKENIZER LOGS REFERENCES [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any model's tokenizer, LOGS a folder for logs and figures (kld.json), REFERENCES one for
references, on the file system that is to be measured. Windows are 2,048 random tokens each, cut as `disjoint`, 64 in
flight: `score` and `kld` are requests of one window, `record` is one request of all. In every turn each runs once.

With `--text FILE`, what `ppl-client record` and `ppl-client kld` run is timed on that text too, as a whole. On a GPU
the peak of its memory is sampled during each kind; to hold it against what was reserved, give the server its part of
the GPU and let it measure: `--shapes 8b --utilization 0.95`.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import httpx

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

import load  # noqa: E402
from device_memory import Memory, sampled_memory  # noqa: E402
from paired import paired_ratio  # noqa: E402
from servers import MEMORY, Settings, started  # noqa: E402
from shapes import SHAPES  # noqa: E402
from tables import table  # noqa: E402

from local_server import has_gpu  # noqa: E402
from scoremode import AsyncScoreClient, measure_kld, record_reference  # noqa: E402
from scoremode.corpora import load_corpus  # noqa: E402

WINDOW = 2048
KINDS = ("score", "record", "kld")


@dataclass(frozen=True, slots=True)
class Run:
    """One kind in one turn."""

    shape: str
    kind: str
    turn: int
    seconds: float
    disk_bytes: int = 0
    peak_mebibytes: int = 0
    """Of the GPU's memory, all servers together."""


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the server's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("references", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b", "1b"])
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--text", help="time a whole text as well: what `ppl-client --dataset` reads")
    parser.add_argument("--utilization", help="of a single server, whose KV cache is what its own measurement leaves")
    parser.add_argument("--gpu", type=int, default=0, help="whose memory is sampled, as nvidia-smi numbers it")
    return parser.parse_known_args(arguments)


def windows_of(count: int, seed: str) -> list[list[int]]:
    """Random tokens, from a range that no special token is in."""
    rng = random.Random(seed)
    return [[rng.randrange(300, 49000) for _ in range(WINDOW)] for _ in range(count)]


def send(url: str, bodies: list[dict[str, object]]) -> float:
    """Seconds until all are answered."""
    rate = asyncio.run(load.send_all(url, bodies))
    if rate.failed:
        raise RuntimeError(f"{rate.failed} of {rate.requests} requests to {url} failed")
    return rate.seconds


def record(url: str, name: str, windows: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Seconds, and bytes on disk."""
    # `disjoint` leaves out a window that ends with the text.
    tokens = [token for window in windows for token in window] + [windows[0][0]]
    body = {"name": name, "prompt": tokens, "method": "disjoint", "context_length": WINDOW}
    start = time.perf_counter()
    reference = httpx.post(f"{url}/v1/references", json=body, timeout=900).raise_for_status().json()
    seconds = time.perf_counter() - start
    if reference["num_windows"] != len(windows):
        raise RuntimeError(f"{reference['num_windows']} windows of {len(windows)} were recorded")
    return seconds, reference["disk_bytes"]


def measure(url: str, shape: str, turn: int, count: int, memory: Memory | None) -> Iterator[Run]:
    """One turn; its reference is deleted again."""
    windows = windows_of(count, f"{shape} {turn}")
    name = f"{shape}-{turn}"

    def run(kind: str, seconds: float, disk_bytes: int = 0) -> Run:
        found = Run(shape, kind, turn, seconds, disk_bytes, memory.peak if memory else 0)
        print(f"    {found}", flush=True)
        if memory:
            memory.restart()
        return found

    if memory:
        memory.restart()
    yield run("score", send(f"{url}/v1/score", [{"prompt": window, "encoding_format": "base64"} for window in windows]))
    yield run("record", *record(url, name, windows))
    bodies = [{"reference": name, "windows": [index, index + 1], "encoding_format": "base64"} for index in range(count)]
    # The first request loads the reference's LM head.
    httpx.post(f"{url}/v1/kld", json=bodies[0], timeout=900).raise_for_status()
    yield run("kld", send(f"{url}/v1/kld", bodies))
    httpx.delete(f"{url}/v1/references/{name}", timeout=60).raise_for_status()


async def whole_text(url: str, text: str) -> None:
    """Record a text and compare the model with itself over it, as `ppl-client` does."""
    corpus = load_corpus(text)
    async with AsyncScoreClient(url, timeout=900) as client:
        recording = await record_reference(client, corpus, "text", method="disjoint", context_length=WINDOW)
        measurement = await measure_kld(client, "text")
        reference = recording.reference
        print(
            f"{text}: {reference.num_tokens:,} tokens in {reference.num_windows} windows of {WINDOW}, "
            f"recorded in {recording.seconds:.1f} s, compared in {measurement.seconds:.1f} s, "
            f"{reference.disk_bytes:,} bytes on disk",
            flush=True,
        )
        await client.delete_reference("text")


def rows(runs: Sequence[Run], shape: str, count: int) -> list[tuple[str, ...]]:
    """Tokens a second of each kind, and the ratio of its rate to that of scoring, turn by turn."""
    seconds = {kind: [run.seconds for run in runs if (run.shape, run.kind) == (shape, kind)] for kind in KINDS}
    return [
        (
            shape,
            kind,
            f"{count * WINDOW / fmean(each):,.0f}",
            "" if kind == "score" else str(paired_ratio(seconds["score"], each)),
            f"{max(run.peak_mebibytes for run in runs if (run.shape, run.kind) == (shape, kind)):,}",
        )
        for kind, each in seconds.items()
    ]


@contextmanager
def sampled(gpu: int) -> Iterator[Memory | None]:
    """The GPU's memory, or None where there is none."""
    if not has_gpu():
        yield None
        return
    with sampled_memory(gpu) as memory:
        yield memory


def main() -> None:
    """Start a server for each shape, measure turn by turn, print the table."""
    options, flags = parse()
    options.logs.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%Y-%m-%d')}, {options}, server's flags: {flags}", flush=True)
    settings = Settings((*flags, "--reference-dir", str(options.references)))
    part = ("--gpu-memory-utilization", options.utilization) if options.utilization else MEMORY
    runs: list[Run] = []
    with (
        sampled(options.gpu) as memory,
        started(options.shapes, {"scoremode": settings}, options.tokenizer, options.logs, part) as urls,
    ):
        for turn in range(options.turns + 1):
            for shape in options.shapes:
                found = list(measure(urls[shape, "scoremode"], shape, turn, options.windows, memory))
                # The first turn compiles and fills.
                runs += found if turn else []
        if options.text:
            asyncio.run(whole_text(urls[options.shapes[0], "scoremode"], options.text))
    (options.logs / "kld.json").write_text(json.dumps([asdict(run) for run in runs], indent=1))
    header = ("shape", "", "tokens/s", "of scoring", "peak, MiB")
    print(table(header, [row for shape in options.shapes for row in rows(runs, shape, options.windows)]))
    for shape in options.shapes:
        sizes = [run.disk_bytes for run in runs if run.shape == shape and run.disk_bytes]
        print(f"{shape}: {fmean(sizes):,.0f} bytes on disk for {options.windows * (WINDOW - 1):,} tokens")


if __name__ == "__main__":
    main()
