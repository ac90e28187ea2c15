"""Whether first differences are predicted: the agreement of answers, next to what a quantized copy really generates.

    python bench/answers.py MODEL LOGS [OPTION...] [any vllm serve flag]

MODEL is a folder with one safetensors file in bfloat16 and a tokenizer, LOGS one for checkpoints, logs and
references. PROMPTS pieces of the repository's text are answered greedily by MODEL and recorded. Each copy (of
`checkpoints.FORMATS`, or `rounded`, which any CPU serves) then answers them too, in batches of BATCH that begin
together, and is compared with the reference in the same batches, in both lanes. The table has the share of answers
whose first difference is the predicted one; for the others, how many nats apart the lane has the two tokens where the
earlier of the two is; how far a token's logprob in one lane is from that in the other, the 99 % quantile; and the time
of the comparison over that of generating. Servers start at once and are measured one after another.

Kernels round differently in another batch. With `--held-up N` the engine is busy with N other prompts while those of a
batch arrive, so that all of them begin in one step; times mean little then. With
`VLLM_BATCH_INVARIANT=1`, which FP8 and bfloat16 kernels heed, rows do not depend on the batch.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable
from concurrent.futures import wait
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import numpy as np
from checkpoints import FORMATS, write_checkpoint
from loads import generate, random_tokens
from servers import WIKITEXT, Server, benchmark_parser, model_server, parsed, starting
from tables import table

from rounded_model import rounded_model
from scoremode import AsyncScoreClient, KldWindowValues
from scoremode.kld import KldPositions, agreement_lengths
from scoremode.runs import load_prompts, record_answers
from scoremode.wire import AnswerSettings, Lane
from scoremode.wire.requests import NEUTRAL_SAMPLING

NAME = "answers"
LANES: tuple[Lane, ...] = ("decode", "prefill")
HEADER = (
    *("copy", "lane", "predicted", "apart where not, median", "90 %", "largest"),
    *("between lanes, 99 %", "same for, median", "time over generation"),
)
NUM_TOP = 20
STEP_TOKENS = 2048
HEAD_START_SECONDS = 0.05
Result = TypeVar("Result")
ROUNDED = "rounded"
Answers = list[tuple[list[int], list[int]]]
"""Token ids of prompts and of the original's answers."""


def write_prompts(text: Path, path: Path, number: int) -> Path:
    """Write pieces of a text as prompts, in whole words, from places that are spread over all of it."""
    content = text.read_text()
    starts = np.linspace(0, len(content) - 400, number).astype(int)
    pieces = [content[start : start + 200].partition(" ")[2].rpartition(" ")[0] for start in starts]
    path.write_text("".join(json.dumps({"prompt": piece}) + "\n" for piece in pieces))
    return path


def server_of(name: str, options: argparse.Namespace, flags: list[str]) -> Server:
    """A server of the model, or of its copy in a format, which is written."""
    folder = options.logs / name
    if name == ROUNDED:
        rounded_model(options.model, folder)
    elif name != NAME:
        write_checkpoint(options.model, folder, name)
    # One sequence more: of those that hold others up, the last may not have left yet.
    sizes = ("--max-num-seqs", str(options.batch + bool(options.held_up)))
    steps = ("--max-num-batched-tokens", str(STEP_TOKENS)) if options.held_up else ()
    more = ("--reference-dir", str(options.logs / "references"), *sizes, *steps)
    return model_server(options.model if name == NAME else folder, "bfloat16", *more, *flags)


async def record(url: str, options: argparse.Namespace) -> Answers:
    """Record the original's answers."""
    prompts = load_prompts(write_prompts(options.text, options.logs / "prompts.jsonl", options.prompts))
    settings = AnswerSettings(max_new_tokens=options.tokens)
    async with AsyncScoreClient(url, timeout=900) as client:
        await record_answers(client, prompts, NAME, settings, concurrency=options.batch, folder=options.logs)
    lines = (options.logs / "references" / NAME / "answers.jsonl").read_text().splitlines()
    answers = [(each["prompt_token_ids"], each["token_ids"]) for each in map(json.loads, lines)]
    # An empty one has no window.
    return [(prompt, answer) for prompt, answer in answers if answer]


async def together(url: str, held_up: int, batch: Awaitable[Result]) -> Result:
    """Await a batch's result, whose requests arrive while the engine computes other prompts, a step for each."""
    if not held_up:
        return await batch
    others = [random_tokens(random.Random(), STEP_TOKENS) for _ in range(held_up)]
    busy = asyncio.create_task(generate(url, others, 1))
    # Until these have arrived.
    await asyncio.sleep(HEAD_START_SECONDS)
    result = await batch
    await busy
    return result


async def compare(url: str, name: str, answers: Answers, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """One row for each lane of a copy."""
    batches = [range(len(answers))[start : start + options.batch] for start in range(0, len(answers), options.batch)]
    started = time.perf_counter()
    own: list[list[int]] = []
    for batch in batches:
        asked = generate(url, [answers[row][0] for row in batch], options.tokens, **NEUTRAL_SAMPLING)
        own += [choice["token_ids"] for choice in await together(url, options.held_up, asked)]
    generating = time.perf_counter() - started
    pairs = [zip(answer, each, strict=False) for (_, answer), each in zip(answers, own, strict=True)]
    real = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs]
    windows: dict[Lane, list[KldWindowValues]] = {}
    ratios = {}
    async with AsyncScoreClient(url, timeout=900) as client:
        for lane in LANES:
            started = time.perf_counter()
            windows[lane] = []
            for batch in batches:
                compared = client.kld(NAME, (batch.start, batch.stop), lane=lane, top_logprobs=NUM_TOP)
                windows[lane] += (await together(url, options.held_up, compared)).data
            ratios[lane] = (time.perf_counter() - started) / generating
    decode, prefill = (np.concatenate([each.positions.logprobs for each in windows[lane]]) for lane in LANES)
    noise = np.quantile(np.abs(decode - prefill), 0.99)
    rows = []
    for lane in LANES:
        positions = KldPositions.concatenate([window.positions for window in windows[lane]])
        sizes = np.array([window.num_scored for window in windows[lane]])
        predicted = agreement_lengths(positions.top_token_ids == positions.token_ids, sizes)
        others = [row for row in range(len(answers)) if predicted[row] != real[row]]
        gaps = [gap(windows[lane][row], min(predicted[row], real[row]), own[row]) for row in others]
        quantiles = [f"{value:.3f}" for value in np.quantile(gaps or [0.0], (0.5, 0.9, 1.0))]
        share = 1 - len(others) / len(answers)
        rest = (f"{noise:.3f}", f"{np.median(predicted):.0f}", f"{ratios[lane]:.2f}")
        rows.append((name, lane, f"{share:.1%}", *quantiles, *rest))
    return rows


def gap(window: KldWindowValues, at: int, own: list[int]) -> float:
    """The nats by which a lane prefers its top token to the generated one, at a place in a window."""
    assert window.top_logprobs is not None
    places = np.flatnonzero(window.top_logprobs.token_ids[at] == own[at])
    logprobs = window.top_logprobs.logprobs[at]
    return float(logprobs[0] - logprobs[places[0]]) if len(places) else float("inf")


def main() -> None:
    parser = benchmark_parser(__doc__, model=Path, logs=Path)
    parser.add_argument("--copies", nargs="+", choices=(*FORMATS, ROUNDED), default=["fp8", "w4a16"])
    parser.add_argument("--text", type=Path, default=WIKITEXT)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--held-up", type=int, default=0, help=f"prompts of {STEP_TOKENS} tokens before each batch")
    options, flags = parsed(parser)
    servers = {name: server_of(name, options, flags) for name in (NAME, *options.copies)}
    with starting(servers, options.logs) as futures:
        # While servers start, they would take the time of one that is measured.
        wait(futures.values())
        answers = asyncio.run(record(futures[NAME].result().url, options))
        rows: list[tuple[str, ...]] = []
        for name in options.copies:
            rows += asyncio.run(compare(futures[name].result().url, name, answers, options))
            print(table(HEADER, rows), flush=True)


if __name__ == "__main__":
    main()
