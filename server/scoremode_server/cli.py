"""`scoremode serve MODEL [any vllm serve flag]`: vLLM's own server with Scoremode's routes added. `paths` and `memory`
tell `ppl-client` about vLLM and the GPU here."""

import argparse
import errno
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from scoremode_server.errors import NoKernelError
from scoremode_server.settings import PLUGIN, add_arguments, allow_plugin, configure_references

USAGE = "scoremode serve MODEL [any option of vllm serve]"

MMAP_THRESHOLD_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
MMAP_THRESHOLD = 128 * 1024
"""In the processes of a CPU engine, glibc gives each allocation of at least this many bytes its own pages."""


def serve(arguments: list[str]) -> None:
    """Run `vllm serve` with `arguments`, until the server is stopped. SystemExit if the arguments are wrong, or
    Scoremode does not run on this vLLM."""
    command = _serve_command(arguments[0])
    from vllm.logger import configure_logging_from_args

    namespace = parse(command, arguments)
    configure_references(namespace)
    configure_logging_from_args(namespace)
    command.validate(namespace)
    _run(command.cmd, namespace)
    # vLLM's command also returns normally after its engine has died. A supervisor would not restart a server that exits
    # with status 0.
    from scoremode_server.vllm_compat.engine_client import engine_died

    if engine_died.is_set():
        raise SystemExit("scoremode: the engine has died: its error is further up")


def paths(arguments: list[str]) -> None:
    """Print the other paths on which `serve` with these arguments can compute, as JSON. SystemExit as for `serve`."""
    # Everything else that is printed goes to standard error, because vLLM writes its logs to standard output.
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        command = _serve_command(arguments[0])
        from scoremode_server.vllm_compat.paths import VARIED, candidates

        namespace = parse(command, arguments, **dict.fromkeys(VARIED))
        print(json.dumps(_run(candidates, namespace)), file=output)


def _serve_command(first: str) -> Any:
    """Import vLLM's `ServeSubcommand` and make one. SystemExit if the first argument is a path that does not exist, or
    Scoremode does not run on this vLLM."""
    # Check this before vLLM is imported, which takes seconds.
    check_folder(first)
    # vLLM reads its environment while it is imported.
    allow_plugin()
    from scoremode_server.vllm_compat.versions import require_supported

    try:
        require_supported()
    except RuntimeError as error:
        raise SystemExit(f"scoremode: {error}") from None
    keep_tensors_off_the_heap()
    # vLLM's command-line module needs package metadata that the CPU build does not have. `ServeSubcommand` works
    # without.
    from vllm.entrypoints.cli.serve import ServeSubcommand

    try:
        from vllm.entrypoints.common.startup import cli_env_setup
    except ImportError:
        # vLLM 0.32
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    return ServeSubcommand()


def _run(function: Callable[[argparse.Namespace], Any], namespace: argparse.Namespace) -> Any:
    """Call a function with parsed arguments. Errors that the user can mend become a SystemExit with a message of one
    line."""
    from pydantic import ValidationError

    try:
        return function(namespace)
    except NoKernelError as error:
        raise SystemExit(f"scoremode: {error}") from None
    except ValidationError as error:
        # vLLM checks its configuration with pydantic, whose traceback does not show the cause.
        raise SystemExit(f"scoremode: {'; '.join(fault['msg'] for fault in error.errors())}") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise SystemExit(
                f"scoremode: port {namespace.port} is taken: stop the server that has it, or choose another with --port"
            ) from None
        if not any(frame.name == "get_tokenizer" for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise SystemExit(
            f"scoremode: no tokenizer can be loaded from {namespace.tokenizer or namespace.model}: copy the original's "
            f"tokenizer files into it, or name the original with --tokenizer ({' '.join(str(error).split())})"
        ) from None


def parse(command: Any, arguments: list[str], **defaults: object) -> argparse.Namespace:
    """Parse the arguments of `command`, vLLM's `ServeSubcommand`, with these defaults instead of vLLM's. SystemExit if
    they are wrong or name no model: vLLM would serve a default model."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog=PLUGIN, description="Exact log-probabilities of given text, over HTTP.")
    subparser = command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    # lm-eval's remote tokenizer needs `/tokenizer_info`.
    subparser.set_defaults(
        enable_tokenizer_info_endpoint=True,
        # Seconds that requests get to finish after SIGTERM. vLLM's own default is 0.
        shutdown_timeout=30,
        renderer_num_workers=tokenizer_threads(),
        model=None,
        **defaults,
    )
    add_arguments(subparser)
    subparser.usage = USAGE
    try:
        namespace: argparse.Namespace = parser.parse_args(["serve", *arguments])
    except (OSError, ValueError) as error:  # The file of `--config` may raise these.
        subparser.error(str(error))
    namespace.model = namespace.model_tag or namespace.model
    if namespace.model is None:
        subparser.error("no model: name it here or in the file of --config")
    check_folder(namespace.model)
    return namespace


def check_folder(model: str) -> None:
    """Raise SystemExit if `model` is a path that does not exist."""
    if model.startswith(("/", "./", "../", "~")) and not os.path.exists(model):
        raise SystemExit(f"scoremode: there is no {model}: give a checkpoint's folder, or its name on the hub")


def tokenizer_threads() -> int:
    """The number of tokenizer threads: one per four cores, at most four, because each has a copy of the tokenizer. A
    thread encodes some 250,000 tokens per second, as many as a GPU scores with a model of a billion parameters."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


def keep_tensors_off_the_heap() -> None:
    """Fix glibc's mmap threshold for the processes of a CPU engine, unless the environment sets one.

    Otherwise glibc raises it to the size of the largest freed allocation, up to 32 MiB. An engine step's tensors are
    then on the heap, and leave holes between longer-lived objects, so the heap grows by hundreds of MiB.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ.setdefault(MMAP_THRESHOLD_VARIABLE, str(MMAP_THRESHOLD))


def device_memory() -> dict[str, int] | None:
    """The memory in bytes of the GPU that a server uses first, as CUDA counts it; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    return {"free": free, "total": total}


def main() -> None:
    match sys.argv[1:]:
        case ["serve", first, *others]:
            serve([first, *others])
        case ["paths", first, *others]:
            paths([first, *others])
        case ["record-transformers", *others]:
            from scoremode_server.record_transformers import main as record

            raise SystemExit(record(others))
        case ["memory"]:
            print(json.dumps(device_memory()))
        case ["--version" | "-V"]:
            print(importlib.metadata.version("scoremode"))
        case ["--help" | "-h"]:
            print(
                f"usage: {USAGE}\n       scoremode serve --help=Scoremode\n"
                "       scoremode paths MODEL [any option of vllm serve]\n       scoremode memory\n"
                "       scoremode record-transformers MODEL --reference-dir DIR --reference NAME [options]\n"
                "       scoremode --version"
            )
        case _:
            print(f"usage: {USAGE}", file=sys.stderr)
            raise SystemExit(2)
