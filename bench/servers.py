"""Command lines of the benchmarks that start servers, and several servers on one GPU, started at the same time: stock
vLLM's and ours, on shapes or on models with weights.

Each is given its part of the GPU's memory, since servers that start at the same time would count each other's as their
own. A server that does not start spoils only its own results.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from shapes import write_shape

from local_server import ServerError, ServerProcess, has_gpu, server_process

Row = tuple[str, ...]

WIKITEXT = Path(__file__).parents[1] / "tests/data/wikitext.txt"
SHAPE_FLAGS = (
    *("--load-format", "dummy", "--max-model-len", "4096", "--max-num-batched-tokens", "8192"),
    *("--max-logprobs", "128"),
)
SHAPE_MEMORY = ("--gpu-memory-utilization", "0.22", "--kv-cache-memory-bytes", "8G")
MODEL_MEMORY = ("--gpu-memory-utilization", "0.08", "--kv-cache-memory-bytes", "2G")
STOCK_COMMAND = (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model")
STOCK_ENVIRONMENT = {"VLLM_PLUGINS": ""}

KERNEL_LINE = re.compile(r"(?:Using|Selected) (\w+) for |Using (\w+) (?:attention )?backend")
ERROR_LINE = re.compile(r"\w(Error|Exception): \S")
LOG_PREFIX = re.compile(r"^.*?\] ")


def benchmark_parser(description: str | None, **arguments: Callable[[str], object]) -> argparse.ArgumentParser:
    """Options of a benchmark with these positional arguments; the last is `logs`, a folder."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in arguments.items():
        parser.add_argument(name, type=kind)
    return parser


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Options, whose folder of logs is there, and the flags of every server."""
    options, flags = parser.parse_known_args()
    options.logs = options.logs.absolute()
    options.logs.mkdir(parents=True, exist_ok=True)
    return options, flags


@dataclass(frozen=True, slots=True)
class Server:
    """A model folder, and how it is served: by which command, if not by ours."""

    model: Path
    flags: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def shape_server(
    shape: str,
    tokenizer: Path,
    folder: Path,
    flags: Sequence[str] = (),
    *,
    stock: bool = False,
    environment: Mapping[str, str] | None = None,
    memory: Sequence[str] = SHAPE_MEMORY,
    **changes: object,
) -> Server:
    """A server on a shape with dummy weights, with `changes` of its config; `flags` override the usual ones, and it
    gets `memory` of a GPU."""
    return Server(
        write_shape(shape, tokenizer, folder, **changes),
        (*SHAPE_FLAGS, *(memory if has_gpu() else ()), *flags),
        STOCK_COMMAND if stock else (),
        {**(environment or {}), **(STOCK_ENVIRONMENT if stock else {})},
    )


def model_server(model: Path, dtype: str, *flags: str, environment: Mapping[str, str] | None = None) -> Server:
    """A server on a small model that has weights."""
    memory = MODEL_MEMORY if has_gpu() else ()
    # bfloat16 is emulated, and slow, on many a CPU.
    return Server(model, (*memory, "--dtype", dtype if has_gpu() else "float32", *flags), environment=environment or {})


@contextmanager
def starting(servers: Mapping[str, Server], logs: Path) -> Iterator[dict[str, Future[ServerProcess]]]:
    """Name -> process, as soon as that server is up; the future of one that failed raises `ServerError`."""
    # Left in this order: first the pool waits for servers that are still starting, then all are stopped.
    with ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        starts = {}
        for name, server in servers.items():
            context = server_process(
                server.model,
                *server.flags,
                log=log_of(name, logs),
                environment=dict(server.environment),
                command=server.command,
            )
            starts[name] = pool.submit(stack.enter_context, context)
        yield starts


def log_of(name: str, logs: Path) -> Path:
    """Where the server called `name` writes."""
    return logs / f"{name.replace(' ', '-')}.log"


def kernels(log: Path) -> str:
    """The kernels and backends that vLLM's log names, in its order."""
    matches = KERNEL_LINE.finditer(log.read_text(errors="replace"))
    return ", ".join(dict.fromkeys(match[1] or match[2] for match in matches)) or "-"


def row_or_failure(beginning: Row, measure: Callable[..., Row], *arguments: object) -> Row:
    """A table's row: after its first cells those that `measure` returns, or why there are no figures."""
    try:
        return (*beginning, *measure(*arguments))
    except Exception as error:
        print(f"{' '.join(beginning)}: {reason(error)}", flush=True)
        return (*beginning, f"failed: {reason(error)[:100]}")


def reason(error: BaseException) -> str:
    """An error in one line: for a server, the first line at its log's end that names an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ServerError):
        lines = [LOG_PREFIX.sub("", line) for line in lines if ERROR_LINE.search(line)] or lines
    return f"{type(error).__name__}: {(lines or [''])[0]}"
