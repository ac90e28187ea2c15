"""Whether first differences are predicted: the agreement of answers, next to what a quantized copy really generates.

    python bench/answers.py MODEL FOLDER [OPTION...] [any vllm serve flag]

MODEL is a folder with one safetensors file in bfloat16 and a tokenizer, FOLDER one for checkpoints, logs, references
and the files of runs, for `ppl-client compare`. PROMPTS pieces of the repository's text are answered greedily by MODEL,
BATCH at a time, and recorded. Each copy (of `checkpoints.FORMATS`, or `rounded`, which any CPU serves) then answers
them too, and is compared with the reference in both lanes. The table has the share of answers whose first difference
is the predicted one; for the others, by how many nats the copy prefers its top token to the original's where the
earlier of the two is; and the time of the comparison over that of generating. The floor is the 99 % quantile of the
change of a token's logprob when MODEL is compared with itself. Servers start at once and are measured one after
another.
"""

import argparse
import asyncio
import json
import time
from concurrent.futures import wait
from itertools import takewhile
from pathlib import Path

import numpy as np
from checkpoints import FORMATS, write_checkpoint
from servers import Server, model_server, starting
from tables import table

from rounded_model import rounded_model
from scoremode import AsyncScoreClient
from scoremode.runs.answers import record_answers
from scoremode.runs.corpora import load_prompts
from scoremode.runs.divergence import measure_kld, measure_noise_floor
from scoremode.runs.output import Output
from scoremode.runs.pool import Pool
from scoremode.wire.protocol import Lane
from scoremode.wire.references import AnswerSettings

NAME = "answers"
LANES: tuple[Lane, ...] = ("decode", "prefill")
HEADER = ("copy", "lane", "predicted", "gap of others, largest", "median", "median agreement", "time over generation")
ROUNDED = "rounded"
Answers = list[tuple[list[int], list[int]]]
"""Token ids of prompts and of the original's answers."""


def write_prompts(text: Path, path: Path, number: int) -> Path:
    """Write pieces of a text as prompts, from places that are spread over all of it."""
    content = text.read_text()
    starts = np.linspace(0, len(content) - 400, number).astype(int)
    path.write_text("".join(json.dumps({"prompt": content[start : start + 200]}) + "\n" for start in starts))
    return path


def server_of(name: str, options: argparse.Namespace, flags: list[str]) -> Server:
    """A server of the model, or of its copy in a format, which is written."""
    folder = options.folder / name
    if name == ROUNDED:
        rounded_model(options.model, folder)
    elif name != NAME:
        write_checkpoint(options.model, folder, name)
    more = ("--reference-dir", str(options.folder / "references"), "--max-num-seqs", str(options.batch))
    return model_server(options.model if name == NAME else folder, "bfloat16", *more, *flags)


async def record(url: str, options: argparse.Namespace) -> tuple[Answers, float]:
    """Record the original's answers, and measure the floor."""
    prompts = load_prompts(write_prompts(options.text, options.folder / "prompts.jsonl", options.prompts))
    settings = AnswerSettings(max_new_tokens=options.tokens)
    async with AsyncScoreClient(url, timeout=900) as client:
        await record_answers(client, prompts, NAME, settings, concurrency=options.batch, folder=options.folder)
        own = (await measure_noise_floor(client, NAME, lane="decode")).positions
    lines = (options.folder / "references" / NAME / "answers.jsonl").read_text().splitlines()
    answers = [(each["prompt_token_ids"], each["token_ids"]) for each in map(json.loads, lines)]
    return answers, float(np.quantile(np.abs(own.logprobs - own.reference_logprobs), 0.99))


async def compare(url: str, name: str, answers: Answers, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """One row for each lane of a copy."""
    real, rows = [0] * len(answers), list[tuple[str, ...]]()

    async def generate(client: AsyncScoreClient, row: int) -> None:
        prompt, answer = answers[row]
        own, _ = await client.generate(prompt, options.tokens)
        real[row] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, own, strict=False)))

    async with AsyncScoreClient(url, timeout=900) as client:
        pool = await Pool.connect(client, options.batch)
        started = time.perf_counter()
        await pool.score(range(len(answers)), generate, lambda _: None)
        generating = time.perf_counter() - started
        for lane in LANES:
            measurement = await measure_kld(client, NAME, lane=lane, concurrency=options.batch, return_token_texts=True)
            output = Output(options.folder / f"{name}-{lane}.json", resume=False, force=True)
            output.write(measurement.record([url]), measurement.arrays())
            predicted = measurement.agreement_lengths or []
            windows = [row for row, (_, answer) in enumerate(answers) if answer]
            others = [row for row in windows if predicted[row] != real[row]]
            places = [(windows.index(row), min(predicted[row], real[row])) for row in others]
            gaps = [await gap(client, *place, lane) for place in places]
            largest, middle = (f"{value:.4f}" for value in (max(gaps, default=0), np.median(gaps or [0])))
            share, ratio = 1 - len(others) / len(windows), measurement.seconds / generating
            rows.append((name, lane, f"{share:.1%}", largest, middle, f"{np.median(predicted):.0f}", f"{ratio:.2f}"))
    return rows


async def gap(client: AsyncScoreClient, window: int, at: int, lane: Lane) -> float:
    """By how many nats the copy prefers its top token to the answer's at a place of a window."""
    [values] = (await client.kld(NAME, (window, window + 1), top_logprobs=1, lane=lane)).data
    assert values.top_logprobs is not None
    return float(values.top_logprobs.logprobs[at, 0] - values.positions.logprobs[at])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--copies", nargs="+", choices=(*FORMATS, ROUNDED), default=["fp8", "w4a16"])
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "tests/data/wikitext.txt")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=25)
    options, flags = parser.parse_known_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    servers = {name: server_of(name, options, flags) for name in (NAME, *options.copies)}
    with starting(servers, options.folder) as futures:
        # While servers start, they would take the time of one that is measured.
        wait(futures.values())
        answers, floor = asyncio.run(record(futures[NAME].result().url, options))
        print(f"floor: {floor:.2g} nats", flush=True)
        rows: list[tuple[str, ...]] = []
        for name in options.copies:
            rows += asyncio.run(compare(futures[name].result().url, name, answers, options))
            print(table(HEADER, rows), flush=True)


if __name__ == "__main__":
    main()
