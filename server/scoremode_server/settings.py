"""Scoremode's settings, in addition to those of `vllm serve`."""

import importlib.metadata
import os
import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

SCORE_CACHE_BYTES = 512 * 1024**2
SCORE_CACHE_VARIABLE = "SCOREMODE_SCORE_CACHE_BYTES"

MAX_REQUEST_BYTES = 16 * 1024**2

LOGPROB_BYTES = 256 * 1024**2
LOGPROB_VARIABLE = "SCOREMODE_LOGPROB_BYTES"

MAX_SEQUENCES = 65_536

MAX_SCORING_TOKENS = 2**24
"""Default of `--max-scoring-tokens`. A waiting token takes up to 75 bytes of the API server's memory."""

BYTES_AHEAD = 256 * 1024**2
"""Limit on bytes of one export's or comparison's windows that are being computed or wait for the client; one larger
window is allowed if it is alone."""

EXPORTED_BYTES = 2 * BYTES_AHEAD
"""The same limit on the windows of all exports of this process together; one larger export is allowed if it is
alone."""

REFERENCE_VARIABLE = "SCOREMODE_REFERENCE_DIR"
HEAD_VARIABLE = "SCOREMODE_REFERENCE_HEAD_BYTES"
WORKER_EXTENSION = "scoremode_server.references.worker.extension.ReferenceWorker"

PLUGIN = "scoremode"
"""The name of both entry points in VLLM_PLUGINS."""

PLUGINS_VARIABLE = "VLLM_PLUGINS"

_ALLOWED_BY_DEFAULT = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
"""Groups whose plugins vLLM loads if VLLM_PLUGINS is unset."""


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Scoremode")
    group.add_argument(
        "--score-cache-bytes",
        type=number_of_bytes,
        metavar="BYTES",
        help="Memory for logprobs of repeated prefixes, such as 512M or 2G; 0 turns the cache off. "
        f"Default: the environment's {SCORE_CACHE_VARIABLE}, else 512M.",
    )
    group.add_argument(
        "--max-scoring-tokens",
        type=positive,
        default=MAX_SCORING_TOKENS,
        metavar="TOKENS",
        help="Tokens that may wait or be scored at once, in all requests to an API server process; further requests "
        "get 429. A waiting token takes up to 75 bytes of memory. Default: %(default)s.",
    )
    group.add_argument(
        "--max-request-sequences",
        type=positive,
        default=MAX_SEQUENCES,
        metavar="N",
        help="Sequences in one scoring request: prompts, prompts times continuations, or windows. "
        "Default: %(default)s.",
    )
    group.add_argument(
        "--request-timeout",
        type=positive,
        metavar="SECONDS",
        help="Seconds after which a scoring request is aborted with 504. Default: none.",
    )
    group.add_argument(
        "--reference-dir",
        type=Path,
        metavar="DIR",
        help="Folder for references (/v1/references, /v1/kld), with the same path on all workers and API servers. "
        f"Default: the environment's {REFERENCE_VARIABLE}, else none.",
    )
    group.add_argument(
        "--reference-head-bytes",
        type=number_of_bytes,
        metavar="BYTES",
        help="Memory on each GPU for a reference's LM head, such as 2G, if it is larger than the served model's: a "
        "float32 head on a server in 16 bits is twice as large. Default: the environment's "
        f"{HEAD_VARIABLE}, else the size of the served model's head.",
    )
    group.add_argument(
        "--max-request-bytes",
        type=number_of_bytes,
        default=MAX_REQUEST_BYTES,
        metavar="BYTES",
        help="The size limit of a scoring or completion request's body, such as 64M. Default: 16M.",
    )
    group.add_argument(
        "--no-page",
        action="store_true",
        help="Do not serve the page at /scoremode, which loads without an API key.",
    )


def server_settings(arguments: Namespace) -> Namespace:
    """Read Scoremode's settings from parsed arguments. Flags that are missing, as in stock `vllm serve`, get their
    defaults. ValueError if `SCORE_CACHE_VARIABLE` in the environment is not valid."""
    parser = ArgumentParser()
    add_arguments(parser)
    settings = parser.parse_args([], Namespace(**vars(arguments)))
    if settings.score_cache_bytes is None:
        settings.score_cache_bytes = _from_environment(SCORE_CACHE_VARIABLE, SCORE_CACHE_BYTES)
    return settings


def logprob_bytes() -> int:
    """Bytes of working memory for prompt logprobs that every engine worker reserves, from the environment. ValueError
    if the number is 0 or not valid."""
    num_bytes = _from_environment(LOGPROB_VARIABLE, LOGPROB_BYTES)
    if not num_bytes:
        raise ValueError(f"{LOGPROB_VARIABLE}: scoring needs some working memory")
    return num_bytes


def configure_references(arguments: Namespace) -> None:
    """Give engine workers the folder for references, if there is one, through the environment, and the methods of
    `WORKER_EXTENSION`. SystemExit if the folder cannot be created, or `--worker-extension-cls` names another class."""
    directory = arguments.reference_dir or reference_directory()
    if directory is None:
        return
    if arguments.worker_extension_cls not in ("", WORKER_EXTENSION):
        raise SystemExit("scoremode: --reference-dir cannot be used with --worker-extension-cls")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"scoremode: --reference-dir: {error}") from None
    arguments.worker_extension_cls = WORKER_EXTENSION
    if arguments.reference_head_bytes is not None:
        os.environ[HEAD_VARIABLE] = str(arguments.reference_head_bytes)
    os.environ[REFERENCE_VARIABLE] = str(directory.resolve())


def reference_directory() -> Path | None:
    """The folder for references, from the environment; None if it names none."""
    path = os.environ.get(REFERENCE_VARIABLE)
    return Path(path) if path else None


def reference_head_bytes() -> int:
    """Bytes that every engine worker reserves at least for a reference's LM head, from the environment. ValueError if
    the number is not valid."""
    return _from_environment(HEAD_VARIABLE, 0)


def _from_environment(variable: str, default: int) -> int:
    try:
        return number_of_bytes(os.environ.get(variable, str(default)))
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None


def allow_plugin() -> None:
    """Add Scoremode to VLLM_PLUGINS of this process and its children. If the variable is unset, also name all plugins
    that vLLM loads by default."""
    if (current := os.environ.get(PLUGINS_VARIABLE)) is not None:
        names = current.split(",")
    else:
        names = [point.name for group in _ALLOWED_BY_DEFAULT for point in importlib.metadata.entry_points(group=group)]
    os.environ[PLUGINS_VARIABLE] = ",".join(dict.fromkeys([*filter(None, names), PLUGIN]))


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"not a positive number: {text!r}")
    return int(text)


def number_of_bytes(text: str) -> int:
    """Parse a number of bytes with an optional K, M or G (powers of 1,024)."""
    size = re.fullmatch(r"([0-9]+)([KMG]?)", text.upper())
    if size is None:
        raise ValueError(f"not a number of bytes: {text!r}")
    return int(size[1]) * int(1024 ** " KMG".index(size[2] or " "))
