"""`scoremode serve MODEL [any vllm serve flag]`: vLLM's own server with Scoremode's routes on it."""

import importlib.metadata
import os
import sys

PLUGIN = "scoremode"

_ALLOWED_BY_DEFAULT = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
"""Groups of which vLLM loads every plugin while VLLM_PLUGINS is unset."""


def allowed_plugins(current: str | None) -> str:
    """VLLM_PLUGINS with Scoremode added to what was allowed before.

    Naming one plugin shuts out every other, so where nothing was named, all that vLLM would have loaded are.
    """
    if current is not None:
        names = current.split(",")
    else:
        names = [point.name for group in _ALLOWED_BY_DEFAULT for point in importlib.metadata.entry_points(group=group)]
    return ",".join(dict.fromkeys([*filter(None, names), PLUGIN]))


def serve(arguments: list[str]) -> None:
    """Run `vllm serve` with `arguments`, until it is told to stop."""
    os.environ["VLLM_PLUGINS"] = allowed_plugins(os.environ.get("VLLM_PLUGINS"))
    # vLLM reads its environment while it is imported, and its command-line module needs distribution metadata that
    # the CPU build lacks; the subcommand itself does not.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from scoremode_server.settings import add_arguments

    cli_env_setup()
    parser = FlexibleArgumentParser(prog=PLUGIN, description="Exact log-probabilities of given text, over HTTP.")
    command = ServeSubcommand()
    subparser = command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    # lm-eval's remote tokenizer asks for it; `--no-enable-tokenizer-info-endpoint` turns it off.
    subparser.set_defaults(enable_tokenizer_info_endpoint=True)
    add_arguments(subparser)
    subparser.usage = "scoremode serve [model_tag] [any option of vllm serve]"
    namespace = parser.parse_args(["serve", *arguments])
    configure_logging_from_args(namespace)
    command.validate(namespace)
    command.cmd(namespace)


def main() -> None:
    """Entry point `scoremode`."""
    match sys.argv[1:]:
        case ["serve", *arguments]:
            serve(arguments)
        case ["--version" | "-V"]:
            print(importlib.metadata.version("scoremode"))
        case ["--help" | "-h"]:
            print("usage: scoremode serve MODEL [any option of vllm serve]\n       scoremode --version")
        case _:
            print("usage: scoremode serve MODEL [any option of vllm serve]", file=sys.stderr)
            raise SystemExit(2)
