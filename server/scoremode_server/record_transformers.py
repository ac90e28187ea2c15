"""`scoremode record-transformers MODEL`: records a reference with the transformers library, without a server. Needs no
vLLM. The options for texts and windows are those of `ppl-client record`."""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scoremode.cli.main import run as run_command
from scoremode.cli.options import DATASET, QUIET, REFERENCE, TEXT, WINDOWS, Command, Group, Option, UsageError
from scoremode.cli.progress import progress_bar
from scoremode.cli.record import as_text, check_windows
from scoremode.cli.running import corpus_of, windows_of
from scoremode.errors import RunError, extra
from scoremode.runs import Progress, Recording
from scoremode.windows import WindowError
from scoremode.wire import PerplexityWindow
from scoremode.wire.references import ReferenceRequest
from scoremode_server.errors import RequestError
from scoremode_server.references.files.tensors import BrokenFileError

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


def run(options: argparse.Namespace) -> None:
    with extra("transformers"):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from scoremode_server.references.from_transformers import identity_of, record

    corpus, began = corpus_of(options), time.perf_counter()
    source: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model, **source)
        config = AutoConfig.from_pretrained(options.model, **source).get_text_config()
        model = AutoModelForCausalLM.from_pretrained(
            options.model,
            # The other attentions leave out a soft cap.
            attn_implementation="eager" if getattr(config, "attn_logit_softcapping", None) else None,
            dtype=options.dtype,
            device_map=options.device_map,
            offload_folder=options.offload_folder,
            **source,
        )
        request = ReferenceRequest(
            name=options.reference,
            labels=list(corpus.labels) or None,
            corpus=corpus.info,
            layers=options.layers,
            **corpus.prompt,
            **windows_of(options),
        )
        identity = identity_of(model, tokenizer, options.model, **source)
        with progress_bar("ppl", quiet=options.quiet) as on_progress:

            def show(window: PerplexityWindow) -> None:
                nats, seconds = math.log(window.perplexity), time.perf_counter() - began
                on_progress(Progress(window.index + 1, window.num_windows, window.total_scored, nats, 0, seconds))

            stored = record(model, tokenizer, options.reference_dir, request, identity=identity, on_window=show)
    # transformers raises a ValueError for a model that it cannot load.
    except (RequestError, BrokenFileError, ValueError) as error:
        raise RunError(str(error)) from error
    print(as_text(Recording(corpus, stored.described(), 0, time.perf_counter() - began)))


COMMAND = Command(
    "record-transformers",
    "Record a model's distributions over a text as a reference with the transformers library, which runs models that "
    "vLLM does not, in any precision. A Scoremode server with the same --reference-dir, tokenizer and vocabulary "
    "compares its model with it. The same command again resumes an interrupted recording.",
    [
        Group(
            "model",
            [
                Option("model", "folder of a checkpoint, or its name on the Hugging Face hub", metavar="MODEL"),
                Option("--dtype DTYPE", "default: that of the checkpoint", choices=DTYPES, default="auto"),
                Option(
                    "--device-map MAP",
                    "where accelerate places layers: auto (GPUs, then the host's memory, then --offload-folder), cpu, "
                    "cuda, ...; default: %(default)s",
                    default="auto",
                ),
                Option("--offload-folder DIR", "folder for layers that do not fit memory", type=Path),
                Option("--revision NAME", "commit, branch or tag on the hub"),
                Option("--trust-remote-code", "run the checkpoint's own code", action="store_true"),
            ],
        ),
        TEXT,
        Group(DATASET.title, [option for option in DATASET.options if option.name != "--messages"]),
        Group(
            "recording",
            [
                Option("--reference-dir DIR", "the servers' folder of references", type=Path, required=True),
                Option("--reference NAME", "name to record under", type=REFERENCE, required=True),
                Option(
                    "--layers",
                    "record the residual stream at every boundary of the decoder layers too, for `ppl-client layers`",
                    action="store_true",
                ),
                *WINDOWS,
                QUIET,
            ],
        ),
    ],
    run,
    if_interrupted=": the same command resumes it",
    example="scoremode record-transformers ORIGINAL --reference-dir references --reference original --dataset pydoc",
)


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status."""
    parser = COMMAND.parser(f"scoremode {COMMAND.name}", with_rare="--help-all" in arguments)
    # vLLM's code renders conversations, so there are no options for them.
    options = parser.parse_args(arguments, argparse.Namespace(messages=None))
    try:
        check_windows(options)
    except (UsageError, WindowError) as error:
        parser.error(str(error))
    return run_command(COMMAND, options, "scoremode")
