"""Builds of Scoremode side by side on one GPU, in paired turns: is one faster than another?

    python bench/builds.py TOKENIZER LOGS --build before=FOLDER --build after=FOLDER [OPTION...] [any vllm serve flag]

TOKENIZER is the folder of any BPE tokenizer, LOGS a folder for the servers' logs, all figures (builds.json) and, while
it runs, references. FOLDER holds an installed wheel. It goes first on its server's PYTHONPATH; several, joined by
colons, may bring another vLLM too:

    bench/build_wheel.sh REVISION wheels && pip install --no-deps --no-index --target FOLDER wheels/scoremode-*.whl

Builds may also differ in flags and environment: `--flags after="--score-cache-bytes 0" --env after="NAME=VALUE"`. A
build that `--stock` names is served by vLLM's own command without plugins, and gets the loads that it has routes for;
`--without before="statistics sink"` names loads that a build does not know.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from loads import LOADS, Drawn, Rate, Source, Target
from paired import paired_ratio
from processes import CpuSeconds, cpu_seconds
from servers import WIKITEXT, Server, ServerProcess, benchmark_parser, parsed, shape_server, starting
from shapes import NAMES
from tables import table

DEFAULT_LOADS = ("score", "echo", "choices", "unshared")
WARM_UP_COUNT = 128
"""Twice the requests in flight, so that the engine has seen its largest steps."""
SETTLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Build:
    """A server's build: the first folders on its PYTHONPATH, its flags, its environment."""

    folders: tuple[Path, ...]
    flags: tuple[str, ...]
    variables: Mapping[str, str]
    is_stock: bool

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the build's server and its clients."""
        path = [*map(str, self.folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**self.variables, "PYTHONPATH": os.pathsep.join(path)}


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

    def __str__(self) -> str:
        return (
            f"{self.shape} {self.load} {self.build}: {self.requests_per_second:,.1f} req/s, {self.seconds:.2f} s, "
            f"CPU ms per request: API server {self.api_milliseconds:.2f}, engine {self.engine_milliseconds:.2f}"
        )

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
    parser = benchmark_parser(__doc__, tokenizer=Path, logs=Path)
    add_build_options(parser, required=True)
    parser.add_argument("--stock", action="append", default=[], metavar="NAME", help="serve this build by stock vLLM")
    parser.add_argument("--without", type=assignment, action="append", default=[], metavar="NAME=LOADS")
    parser.add_argument("--shapes", nargs="+", choices=NAMES, default=["8b", "1b"])
    parser.add_argument("--together", action="store_true", help="start all shapes at once")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=DEFAULT_LOADS)
    parser.add_argument("--count", type=assignment, action="append", default=[], metavar="LOAD=N", help="requests")
    parser.add_argument("--text", default=str(WIKITEXT), help="what `ppl-client --dataset` reads")
    parser.add_argument("--turns", type=int, default=8)
    options, flags = parsed(parser)
    options.builds = read_builds(options, options.stock)
    options.without = dict(options.without)
    options.counts = {load: int(count) for load, count in options.count}
    return options, flags


def add_build_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options that `read_builds` reads."""
    metavar = "NAME=FOLDER[:FOLDER...]"
    parser.add_argument("--build", type=assignment, action="append", default=[], required=required, metavar=metavar)
    parser.add_argument("--flags", type=assignment, action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--env", type=assignment, action="append", default=[], metavar="NAME=VARIABLES")


def read_builds(options: argparse.Namespace, stock: Sequence[str] = ()) -> dict[str, Build]:
    """Name -> build, the first being what the others are compared with. `stock` names those that stock vLLM serves.

    Raises:
        ValueError: a name is given twice or has no folder.
    """
    folders = dict(options.build)
    if len(folders) < len(options.build):
        raise ValueError("two builds have one name")
    for name in (*(name for name, _ in (*options.flags, *options.env)), *stock):
        if name not in folders:
            raise ValueError(f"no build is named {name}")
    return {
        name: Build(
            tuple(Path(folder).absolute() for folder in value.split(os.pathsep)),
            tuple(flag for owner, text in options.flags if owner == name for flag in shlex.split(text)),
            dict(assignment(word) for owner, text in options.env if owner == name for word in shlex.split(text)),
            name in stock,
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


def take_turn(
    turn: int,
    shapes: Sequence[str],
    servers: Mapping[str, ServerProcess],
    options: argparse.Namespace,
    most_requests: int = sys.maxsize,
) -> Iterator[Run]:
    """Every load on each build that has its route: the same requests for all of them.

    Raises:
        RuntimeError: a request failed.
    """
    source = Source(options.tokenizer, options.text)
    for shape in shapes:
        for load in options.loads:
            count = min(most_requests, options.counts.get(load) or LOADS[load].usual_count(shape))
            drawn = LOADS[load].draw(source, count, f"{shape} {load} {turn}")
            names = [
                name
                for name, build in options.builds.items()
                if (LOADS[load].is_on_stock or not build.is_stock) and load not in options.without.get(name, "").split()
            ]
            for name in rotated(names, turn):
                rate, used = measure(servers[f"{shape} {name}"], options.builds[name], drawn)
                if rate.failed:
                    raise RuntimeError(f"{shape} {load} {name}, turn {turn}: {rate.failed} requests failed")
                figures = (rate.requests, rate.tokens, rate.seconds, rate.received_bytes, used.api, used.engine)
                run = Run(shape, load, turn, name, *figures)
                print(f"    {run}", flush=True)
                yield run


def measure(server: ServerProcess, build: Build, drawn: Drawn) -> tuple[Rate, CpuSeconds]:
    """Send requests to a server."""
    target = Target(server.url, build.environment)
    drawn.before(target)
    before = cpu_seconds(server.pid)
    rate = drawn.send(target)
    time.sleep(SETTLE_SECONDS)
    used = cpu_seconds(server.pid) - before
    drawn.after(target)
    return rate, used


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
    """The mean of a figure over all turns."""
    return f"{fmean(getattr(run, name) for run in runs):,.{digits}f}"


def ratio(mine: Sequence[Run], others: Sequence[Run] | None, name: str) -> str:
    """The ratio of a figure, paired by turn. `others` has the same turns in the same order."""
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
    keeps_references = not {"record", "kld"}.isdisjoint(options.loads)
    references = ["--reference-dir", str(folder / "references")] if keeps_references else []
    return {
        f"{shape} {name}": shape_server(
            shape,
            options.tokenizer,
            folder,
            (*([] if build.is_stock else references), *flags, *build.flags),
            stock=build.is_stock,
            environment=build.environment,
        )
        for shape in shapes
        for name, build in options.builds.items()
    }


def main() -> None:
    """Start the servers, measure, print the table after each group of shapes that is up at the same time."""
    options, flags = parse()
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
            servers = {name: future.result() for name, future in futures.items()}
            print(f"{', '.join(shapes)}: servers ready after {time.monotonic() - start:.0f} s", flush=True)
            list(take_turn(-1, shapes, servers, options, WARM_UP_COUNT))
            for turn in range(options.turns):
                start = time.monotonic()
                runs += take_turn(turn, shapes, servers, options)
                save(runs, options)
                print(f"  turn {turn + 1} of {options.turns} took {time.monotonic() - start:.1f} s", flush=True)
            print(report(runs, next(iter(options.builds))), flush=True)


if __name__ == "__main__":
    main()
