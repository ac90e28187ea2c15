"""Implements `ppl-client export`, which writes a reference as a file for llama.cpp."""

import argparse
import asyncio
from pathlib import Path

from scoremode._texts import printable
from scoremode.cli.options import ONE_SERVER, QUIET, REFERENCE, Command, Group, Option, check_one_server
from scoremode.cli.progress import export_bar
from scoremode.cli.running import connected
from scoremode.runs import export_llama_cpp


async def run(options: argparse.Namespace) -> None:
    async with connected(options, export_bar(quiet=options.quiet)) as ([client], on_bytes):
        size = await export_llama_cpp(
            client, options.reference, options.llama_cpp, force=options.force, on_bytes=on_bytes
        )
    print(printable(f"{options.llama_cpp}: {size:,} bytes"))


COMMAND = Command(
    "export",
    "Write a reference for another engine: `llama-perplexity --kl-divergence --kl-divergence-base FILE` then measures "
    "a GGUF file on the same tokens, against the same model. The same command again resumes.",
    [
        Group(
            "export",
            [
                Option(
                    "--reference NAME",
                    "a reference that was recorded with --method llama.cpp",
                    type=REFERENCE,
                    required=True,
                ),
                Option(
                    "--llama-cpp FILE",
                    "the base file; it has two bytes per position and token of the vocabulary",
                    type=Path,
                    required=True,
                ),
                Option("--force", "replace an earlier FILE", action="store_true"),
            ],
        ),
        ONE_SERVER,
        Group("output", [QUIET]),
    ],
    lambda options: asyncio.run(run(options)),
    lambda options: check_one_server(options, "export", "has all windows"),
    success="the file is written",
    if_interrupted=": the same command resumes it",
    example="ppl-client export --url http://localhost:8000 --reference base --llama-cpp base.kld",
)
