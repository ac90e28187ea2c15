"""Builds of Scoremode side by side on one GPU, in paired turns: is one faster than another?

    python bench/builds.py TOKENIZER LOGS --build before=FOLDER --build after=FOLDER [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any model's tokenizer, LOGS a folder for the servers' logs, all figures (builds.json) and,
while it runs, references. FOLDER holds an installed wheel. It goes first on its server's PYTHONPATH; several, joined by
colons, may bring another vLLM too:

    bench/build_wheel.sh REVISION wheels && pip install --no-deps --no-index --target FOLDER wheels/scoremode-*.whl

Builds may also differ in flags and environment: `--flags after="--score-cache-bytes 0" --env after="NAME=VALUE"`. A
build that `--stock` names is served by vLLM's own command without plugins, and gets the loads that it has routes for.

All servers of a shape start at once and share the GPU. In every turn each build gets the same requests, drawn anew for
the turn, in an order that rotates. On a host that others use too, a rate over 0.2 s is hardly less certain than one
over 2 s, so many short turns (`--loads choices --count choices=80 --turns 400`) say more than as long a time of long
ones. Ratios are those of paired turns, with 95 % intervals: to the first build, and to the same build's rate of tokens
under the load's floor (such as `prefill`), where that is measured too. Loads are those of bench/loads.py. CPU time is
what a process used from a load's first request to 0.1 s after its last answer.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from loads import LOADS, Drawn, Source, Target
from paired import paired_ratio
from processes import cpu_seconds
from servers import Server, ServerProcess, shape_server, starting
from shapes import NAMES
from tables import table

TEXT = Path(__file__).parents[1] / "tests/data/wikitext.txt"
DEFAULT_LOADS = ("score", "echo", "choices", "unshared")
WARM_UP_COUNT = 128
"""Twice the requests in flight, so that the engine has seen its largest steps."""
SETTLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Build:
    """What one server runs: folders before all others on its PYTHONPATH, flags, environment."""

    folders: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    is_stock: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Of its server and its clients."""
        path = [*map(str, self.folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**self.variables, "PYTHONPATH": os.pathsep.join(path)}


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one build in one turn."""

    shape: str
    load: str
    turn: int
    build: str
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    received_bytes: int = 0
    api_cpu_seconds: float = 0.0
    engine_cpu_seconds: float = 0.0

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

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


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Options, and the flags of every server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--build", type=assignment, action="append", required=True, metavar="NAME=FOLDER[:FOLDER...]")
    parser.add_argument("--flags", type=assignment, action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--env", type=assignment, action="append", default=[], metavar="NAME=VARIABLES")
    parser.add_argument("--stock", action="append", default=[], metavar="NAME", help="serve this build by stock vLLM")
    parser.add_argument("--shapes", nargs="+", choices=NAMES, default=["8b", "1b"])
    parser.add_argument("--together", action="store_true", help="start all shapes at once")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=DEFAULT_LOADS)
    parser.add_argument("--count", type=assignment, action="append", default=[], metavar="LOAD=N", help="requests")
    parser.add_argument("--text", default=str(TEXT), help="what `ppl-client --dataset` reads")
    parser.add_argument("--turns", type=int, default=8)
    options, flags = parser.parse_known_args()
    options.builds = read_builds(options)
    options.logs = options.logs.absolute()
    return options, flags


def read_builds(options: argparse.Namespace) -> dict[str, Build]:
    """Name -> build, the first being what the others are compared with.

    Raises:
        ValueError: a name is given twice or has no folder.
    """
    folders = dict(options.build)
    if len(folders) < len(options.build):
        raise ValueError("two builds have one name")
    for name in (*(name for name, _ in (*options.flags, *options.env)), *options.stock):
        if name not in folders:
            raise ValueError(f"no build is named {name}")
    return {
        name: Build(
            tuple(Path(folder).absolute() for folder in value.split(os.pathsep)),
            tuple(flag for owner, text in options.flags if owner == name for flag in shlex.split(text)),
            dict(assignment(word) for owner, text in options.env if owner == name for word in shlex.split(text)),
            name in options.stock,
        )
        for name, value in folders.items()
    }


def check_origin(name: str, build: Build) -> None:
    """Print what a build runs.

    Raises:
        RuntimeError: it would run a Scoremode from elsewhere.
    """
    names = ("vllm",) if build.is_stock else ("vllm", "scoremode_server")
    program = f"import importlib.util as u; print(*(u.find_spec(n).origin for n in {names}))"
    environment = {**os.environ, **build.environment}
    found = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).strip()
    print(f"{name}: {build}, imports {found}", flush=True)
    scoremode = found.split()[-1]
    if not build.is_stock and not any(Path(scoremode).is_relative_to(folder) for folder in build.folders):
        raise RuntimeError(f"{name} would run {scoremode}")


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """So that no build is always first, or always after the same other one."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


class Turns:
    """Turns of loads over servers that are up."""

    def __init__(self, servers: Mapping[str, ServerProcess], shapes: list[str], options: argparse.Namespace) -> None:
        self.servers = servers
        self.shapes = shapes
        self.options = options
        self.counts = {load: int(count) for load, count in options.count}

    def warm_up(self) -> None:
        """Every load on every server, with few requests."""
        for shape in self.shapes:
            for load in self.options.loads:
                self._run(shape, load, turn=-1, count=min(WARM_UP_COUNT, self._count(shape, load)), sets=1)

    def run(self) -> Iterator[list[Run]]:
        """The runs of each turn."""
        for turn in range(self.options.turns):
            start = time.monotonic()
            yield [
                run
                for shape in self.shapes
                for load in self.options.loads
                for run in self._run(shape, load, turn, self._count(shape, load), LOADS[load].sets)
            ]
            print(f"  turn {turn + 1} of {self.options.turns} took {time.monotonic() - start:.1f} s", flush=True)

    def _run(self, shape: str, load: str, turn: int, count: int, sets: int) -> list[Run]:
        """One load on each build that has its route. A set of requests is sent to all of them before the next set."""
        source = Source(shape, self.options.tokenizer, self.options.text)
        builds = self.options.builds
        names = [name for name in builds if LOADS[load].is_on_stock or not builds[name].is_stock]
        sums: dict[str, Counter[str]] = {name: Counter() for name in names}
        for number in range(sets):
            drawn = LOADS[load].draw(source, count, f"{shape} {load} {turn} {number}")
            for name in rotated(names, turn + number):
                server = self.servers[f"{shape} {name}"]
                sums[name].update(measure(server.pid, Target(server.url, builds[name].environment), drawn))
        return [finished(sums[name], shape=shape, load=load, turn=turn, build=name) for name in rotated(names, turn)]

    def _count(self, shape: str, load: str) -> int:
        usual = LOADS[load].count_1b if shape == "1b" else 0
        return self.counts.get(load) or usual or LOADS[load].count


def measure(server: int, target: Target, drawn: Drawn) -> dict[str, float]:
    """Send requests to the server with this process id."""
    drawn.before(target)
    before = cpu_seconds(server)
    rate = drawn.send(target)
    time.sleep(SETTLE_SECONDS)
    used = cpu_seconds(server) - before
    drawn.after(target)
    return {**asdict(rate), "api_cpu_seconds": used.api, "engine_cpu_seconds": used.engine}


def finished(sums: Counter[str], **which: Any) -> Run:
    """A run of which all sets were sent.

    Raises:
        RuntimeError: a request failed.
    """
    if failed := sums.pop("failed"):
        raise RuntimeError(f"{which}: {failed} requests failed")
    run = Run(**which, **sums)
    print(
        f"    {run.shape} {run.load} {run.build}: {run.requests_per_second:,.1f} req/s, {run.seconds:.2f} s, "
        f"CPU ms per request: API server {run.api_milliseconds:.2f}, engine {run.engine_milliseconds:.2f}",
        flush=True,
    )
    return run


HEADER = (
    *("shape", "load", "build", "turns", "requests/s", "tokens/s", "to the first [95 %]", "to its floor [95 %]"),
    *("API server, CPU ms per request", "to the first [95 %]", "engine, CPU ms per request", "to the first [95 %]"),
)


def report(runs: Sequence[Run], first: str) -> str:
    """Means of every build, and its ratios to the first build and to the load's floor."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.shape, run.load, run.build), []).append(run)

    def row(shape: str, load: str, build: str, mine: Sequence[Run]) -> tuple[str, ...]:
        others = groups.get((shape, load, first)) if build != first else None
        floor = groups.get((shape, LOADS[load].floor, build))
        return (
            *(shape, load, build, str(len(mine))),
            *(mean(mine, "requests_per_second", 1), mean(mine, "tokens_per_second", 0)),
            *(ratio(mine, others, "requests_per_second"), ratio(mine, floor, "tokens_per_second")),
            *(mean(mine, "api_milliseconds", 2), ratio(mine, others, "api_milliseconds")),
            *(mean(mine, "engine_milliseconds", 2), ratio(mine, others, "engine_milliseconds")),
        )

    return table(HEADER, [row(*key, mine) for key, mine in groups.items()])


def mean(runs: Sequence[Run], name: str, digits: int) -> str:
    """Of a figure of all turns."""
    return f"{fmean(getattr(run, name) for run in runs):,.{digits}f}"


def ratio(mine: Sequence[Run], others: Sequence[Run] | None, name: str) -> str:
    """Of a figure, paired by turn; `others` are of the same turns in the same order."""
    if others is None:
        return "-"
    return str(paired_ratio([getattr(run, name) for run in mine], [getattr(run, name) for run in others]) or "-")


def save(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Write all figures; after every turn, so that an interrupted run leaves them."""
    record = {
        "arguments": sys.argv[1:],
        "date": time.strftime("%Y-%m-%d"),
        "first": next(iter(options.builds)),
        "runs": [asdict(run) for run in runs],
    }
    (options.logs / "builds.json").write_text(json.dumps(record, indent=1))


def servers_of(shapes: list[str], options: argparse.Namespace, flags: list[str], folder: Path) -> dict[str, Server]:
    """A server for every build on every shape."""
    needed = [flag for load in options.loads for flag in LOADS[load].flags]
    keeps_references = not {"record", "kld"}.isdisjoint(options.loads)
    references = ["--reference-dir", str(folder / "references")] if keeps_references else []
    return {
        f"{shape} {name}": shape_server(
            shape,
            options.tokenizer,
            folder,
            (*needed, *([] if build.is_stock else references), *flags, *build.flags),
            stock=build.is_stock,
            environment=build.environment,
        )
        for shape in shapes
        for name, build in options.builds.items()
    }


def main() -> None:
    """Start the servers, measure, print the table after each group of shapes that is up at the same time."""
    options, flags = parse()
    options.logs.mkdir(parents=True, exist_ok=True)
    for name, build in options.builds.items():
        check_origin(name, build)
    runs: list[Run] = []
    groups = [options.shapes] if options.together else [[shape] for shape in options.shapes]
    for shapes in groups:
        start = time.monotonic()
        with (
            tempfile.TemporaryDirectory(dir=options.logs) as folder,
            starting(servers_of(shapes, options, flags, Path(folder)), options.logs) as futures,
        ):
            turns = Turns({name: future.result() for name, future in futures.items()}, shapes, options)
            print(f"{', '.join(shapes)}: servers ready after {time.monotonic() - start:.0f} s", flush=True)
            turns.warm_up()
            for finished in turns.run():
                runs += finished
                save(runs, options)
            print(report(runs, next(iter(options.builds))), flush=True)


if __name__ == "__main__":
    main()
