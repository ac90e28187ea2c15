"""Builds of Scoremode beside each other on one GPU, in turns: is one slower than another?

    python bench/builds.py TOKENIZER LOGS --build before=FOLDER --build after=FOLDER [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any model's tokenizer, LOGS a folder for the servers' logs and for all figures (builds.json).
FOLDER holds an installed wheel. It goes first on its server's PYTHONPATH; several, joined by colons, may bring another
vLLM too:

    bench/build_wheel.sh REVISION wheels && pip install --no-deps --no-index --target FOLDER wheels/scoremode-*.whl

Builds may differ in flags and environment as well: `--flags after="--score-cache-bytes 0" --env after="NAME=VALUE"`.

All servers of a shape start at once and share the GPU. In every turn each build works off the same requests, drawn anew
for the turn, in an order that rotates. Ratios are those of paired turns to the first build, with 95 % intervals. Loads
are those of bench/load.py. CPU time is what a process used from a load's first request to 0.1 s after its last answer.
"""

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

import load  # noqa: E402
from cpu_time import cpu_seconds  # noqa: E402
from paired import paired_ratio  # noqa: E402
from servers import Settings, started_processes  # noqa: E402
from shapes import SHAPES  # noqa: E402
from tables import table  # noqa: E402

from local_server import ServerProcess  # noqa: E402

LOADS = ("score", "echo", "choices", "unshared")
COUNTS = {
    "score": {"8b": 96, "1b": 256},
    "echo": {"8b": 96, "1b": 256},
    "prefill": {"8b": 96, "1b": 256},
    "choices": {"8b": 400, "1b": 400},
    "unshared": {"8b": 800, "1b": 1500},
    "top50": {"8b": 96, "1b": 256},
    "trl": {"8b": 32, "1b": 64},
}
"""Requests of a load: 2 to 5 seconds on an H200. Other shapes take 8B's."""
REPEATS = {"choices": 3}
"""400 `choices` requests share one beginning and take a second, so several sets make one measurement."""
WARM_UP_COUNT = 128
"""Twice the requests in flight, so that the engine has seen its largest steps."""
SETTLE_SECONDS = 0.1
STOP_SECONDS = 15
"""Kept back of `--seconds` for stopping the servers."""

Servers = Mapping[tuple[str, str], ServerProcess]
"""(shape, build) -> its server."""


@dataclass(frozen=True, slots=True)
class Build:
    """What one server runs: folders before all others on its PYTHONPATH, flags, environment."""

    folders: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    def settings(self, common: Sequence[str]) -> Settings:
        """How its server is started; `common` are flags that every server takes."""
        path = [*map(str, self.folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**(self.environment or {}), "PYTHONPATH": os.pathsep.join(path)}
        return Settings((*common, *self.flags), environment=environment)


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one build in one turn."""

    shape: str
    load: str
    turn: int
    build: str
    requests: int
    tokens: int
    seconds: float
    received_bytes: int
    api_cpu_seconds: float
    engine_cpu_seconds: float

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def api_milliseconds(self) -> float:
        """The API server's CPU time per request."""
        return 1000 * self.api_cpu_seconds / self.requests

    @property
    def engine_milliseconds(self) -> float:
        """The engine's CPU time per request."""
        return 1000 * self.engine_cpu_seconds / self.requests


def assignment(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def load_count(text: str) -> tuple[str, int]:
    """LOAD=N."""
    name, value = assignment(text)
    if name not in COUNTS or not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOAD=N with a load of {', '.join(COUNTS)}")
    return name, int(value)


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the flags of every server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--build", type=assignment, action="append", required=True, metavar="NAME=FOLDER[:FOLDER...]")
    parser.add_argument("--flags", type=assignment, action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--env", type=assignment, action="append", default=[], metavar="NAME=VARIABLES")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b", "1b"])
    parser.add_argument(
        "--together", action="store_true", help="start all shapes at once, and turn by turn measure each"
    )
    parser.add_argument("--loads", nargs="+", choices=COUNTS, default=LOADS)
    parser.add_argument("--count", type=load_count, action="append", default=[], metavar="LOAD=N", help="requests")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after the last turn that fits")
    options, flags = parser.parse_known_args(arguments)
    try:
        options.builds = read_builds(options.build, options.flags, options.env)
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    return options, flags


def read_builds(
    folders: Sequence[tuple[str, str]], flags: Sequence[tuple[str, str]], environments: Sequence[tuple[str, str]]
) -> dict[str, Build]:
    """Name -> build, the first being what the others are compared with.

    Raises:
        ValueError: a name is given twice or has no folder.
    """
    given = dict(folders)
    if len(given) < len(folders):
        raise ValueError("two builds have one name")
    if unknown := [name for name, _ in (*flags, *environments) if name not in given]:
        raise ValueError(f"no build is named {unknown[0]}")
    return {
        name: Build(
            tuple(Path(folder).absolute() for folder in value.split(os.pathsep)),
            tuple(flag for owner, text in flags if owner == name for flag in shlex.split(text)),
            dict(assignment(word) for owner, text in environments if owner == name for word in shlex.split(text)),
        )
        for name, value in given.items()
    }


def origins(settings: Settings) -> dict[str, str]:
    """The files that a server with these settings imports Scoremode and vLLM from."""
    program = (
        "import importlib.util as u; print(*(u.find_spec(n).origin for n in ('scoremode_server', 'vllm')), sep='\\n')"
    )
    environment = {**os.environ, **(settings.environment or {})}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return dict(zip(("scoremode", "vllm"), done.stdout.split(), strict=True))


def check_origin(name: str, build: Build, settings: Settings) -> None:
    """Print what a build runs.

    Raises:
        RuntimeError: it would run a Scoremode from elsewhere.
    """
    found = origins(settings)
    print(f"{name}: {found}, flags {build.flags}, environment {dict(build.environment or {})}", flush=True)
    if not any(Path(found["scoremode"]).is_relative_to(folder) for folder in build.folders):
        raise RuntimeError(f"{name} would run {found['scoremode']}")


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """So that none is always first, nor always after the same one's load."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def measure(server: ServerProcess, kind: str, batches: Sequence[Sequence[dict[str, Any]]], **which: Any) -> Run:
    """Send the batches one after another.

    Raises:
        RuntimeError: a request failed.
    """
    before = cpu_seconds(server.pid)
    rates = [asyncio.run(load.send_all(server.url + load.KINDS[kind][0], batch)) for batch in batches]
    time.sleep(SETTLE_SECONDS)
    used = cpu_seconds(server.pid) - before
    if failed := sum(rate.failed for rate in rates):
        raise RuntimeError(f"{which}: {failed} of {kind}'s requests failed")
    run = Run(
        load=kind,
        requests=sum(rate.requests for rate in rates),
        tokens=sum(rate.tokens for rate in rates),
        seconds=sum(rate.seconds for rate in rates),
        received_bytes=sum(rate.received_bytes for rate in rates),
        api_cpu_seconds=used.api,
        engine_cpu_seconds=used.engine,
        **which,
    )
    print(
        f"    {run.shape} {kind} {run.build}: {run.requests_per_second:,.1f} req/s, {run.seconds:.2f} s, "
        f"CPU ms a request: API server {run.api_milliseconds:.2f}, engine {run.engine_milliseconds:.2f}",
        flush=True,
    )
    return run


class Turns:
    """Turns of loads over servers that are up, until a number is reached or the next would end too late."""

    def __init__(self, servers: Servers, shapes: Sequence[str], options: argparse.Namespace) -> None:
        self.servers = servers
        self.shapes = shapes
        self.builds = list(options.builds)
        self.loads: Sequence[str] = options.loads
        self.counts: Mapping[str, int] = dict(options.count)

    def warm_up(self) -> None:
        """Every load on every server, in small."""
        for shape in self.shapes:
            for kind in self.loads:
                self._load(shape, kind, turn=-1, count=min(WARM_UP_COUNT, self._count(shape, kind)), repeats=1)

    def run(self, turns: int, deadline: float) -> Iterator[list[Run]]:
        """The runs of each turn.

        After the first, a turn begins only if it ends by `deadline` (of the monotonic clock) when it takes as long as
        the longest so far.
        """
        longest = 0.0
        for turn in range(turns):
            start = time.monotonic()
            if turn and start + longest > deadline:
                print(f"  no time is left for turn {turn + 1} of {turns}", flush=True)
                return
            yield [run for shape in self.shapes for kind in self.loads for run in self._turn(shape, kind, turn)]
            longest = max(longest, time.monotonic() - start)
            print(f"  turn {turn + 1} of {turns} took {time.monotonic() - start:.1f} s", flush=True)

    def _turn(self, shape: str, kind: str, turn: int) -> list[Run]:
        return self._load(shape, kind, turn, self._count(shape, kind), REPEATS.get(kind, 1))

    def _load(self, shape: str, kind: str, turn: int, count: int, repeats: int) -> list[Run]:
        batches = [load.bodies(shape, kind, count, f"{shape} {kind} {turn} {repeat}") for repeat in range(repeats)]
        return [
            measure(self.servers[shape, build], kind, batches, shape=shape, turn=turn, build=build)
            for build in rotated(self.builds, turn)
        ]

    def _count(self, shape: str, kind: str) -> int:
        return self.counts.get(kind) or COUNTS[kind].get(shape, COUNTS[kind]["8b"])


HEADER = (
    *("shape", "load", "build", "turns", "requests/s", "tokens/s", "to the first [95 %]"),
    *("API server, CPU ms a request", "to the first [95 %]", "engine, CPU ms a request"),
)


def report(runs: Sequence[Run], first: str) -> str:
    """Means of every build, and its ratios to the first."""
    groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        groups.setdefault((run.shape, run.load), {}).setdefault(run.build, []).append(run)
    return table(HEADER, [row(mine, builds[first]) for builds in groups.values() for mine in builds.values()])


def row(mine: Sequence[Run], first: Sequence[Run]) -> tuple[str, ...]:
    """A build's line; `first` are the runs that it is compared with, of the same turns in the same order."""

    def ratio(name: str) -> str:
        if mine is first:
            return "-"
        return str(paired_ratio([getattr(run, name) for run in mine], [getattr(run, name) for run in first]) or "-")

    return (
        *(mine[0].shape, mine[0].load, mine[0].build, str(len(mine))),
        f"{fmean(run.requests_per_second for run in mine):,.1f}",
        f"{fmean(run.tokens / run.seconds for run in mine):,.0f}",
        ratio("requests_per_second"),
        f"{fmean(run.api_milliseconds for run in mine):.2f}",
        ratio("api_milliseconds"),
        f"{fmean(run.engine_milliseconds for run in mine):.2f}",
    )


def save(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Write all figures; again after every turn, so that a run which is cut off leaves them."""
    record = {
        "arguments": sys.argv[1:],
        "date": time.strftime("%Y-%m-%d"),
        "first": next(iter(options.builds)),
        "runs": [asdict(run) for run in runs],
    }
    (options.logs / "builds.json").write_text(json.dumps(record, indent=1))


def main() -> None:
    """Start the servers, measure, print the table after each group of shapes that is up together."""
    options, flags = parse()
    end = time.monotonic() + options.seconds
    options.logs.mkdir(parents=True, exist_ok=True)
    settings = {name: build.settings(flags) for name, build in options.builds.items()}
    for name, build in options.builds.items():
        check_origin(name, build, settings[name])
    runs: list[Run] = []
    groups = [options.shapes] if options.together else [[shape] for shape in options.shapes]
    for done, shapes in enumerate(groups):
        start = time.monotonic()
        deadline = start + (end - start) / (len(groups) - done) - STOP_SECONDS
        with started_processes(shapes, settings, options.tokenizer, options.logs) as servers:
            print(f"{', '.join(shapes)}: servers ready after {time.monotonic() - start:.0f} s", flush=True)
            turns = Turns(servers, shapes, options)
            turns.warm_up()
            for finished in turns.run(options.turns, deadline):
                runs += finished
                save(runs, options)
            print(report(runs, next(iter(options.builds))), flush=True)


if __name__ == "__main__":
    main()
