"""`ppl-client corpus` from jsonl.zst to parquet, as a share of prefill-only requests of the same token lengths.

    python bench/corpora.py TOKENIZER LOGS [--shapes 8b 1b] [--documents N] [--prefill-documents N] [--api-servers N]

Documents have 64 to 2,000 tokens, evenly. A server of each shape is measured by itself: half of the prefill before the
corpus and half after it, each with documents of its own, so that no prefix cache serves one from another. A run of the
command counts from its start as a process. TOKENIZER is the folder of any model's tokenizer, LOGS a folder for the
servers' logs.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

import load  # noqa: E402
from servers import Settings, started  # noqa: E402

SHORTEST, LONGEST = 64, 2000


def make_documents(tokenizer: Tokenizer, count: int, seed: int) -> tuple[list[str], list[list[int]]]:
    """Texts of random words, and their token ids: lengths are drawn evenly, and texts cut to them."""
    rng = random.Random(seed)
    words = [
        word
        for token in range(300, tokenizer.get_vocab_size())
        if (word := tokenizer.decode([token])).strip().isascii() and word.startswith(" ") and word[1:].isalpha()
    ]
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(count)]
    texts = ["".join(rng.choices(words, k=length)) for length in lengths]
    # A word may be two tokens where another is before it: cut there, by the tokenizer's own offsets.
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    cut = [text[: code.offsets[length - 1][1]] for text, code, length in zip(texts, encoded, lengths, strict=True)]
    return cut, [code.ids for code in tokenizer.encode_batch(cut, add_special_tokens=False)]


def run_prefill(url: str, model: str, token_ids: Sequence[Sequence[int]]) -> load.Rate:
    """One request a document, which generates one token."""
    bodies = [{"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0} for ids in token_ids]
    rate = asyncio.run(load.send_all(f"{url}/v1/completions", bodies))
    if rate.failed:
        raise RuntimeError(f"{rate.failed} requests for prefill failed")
    return rate


def run_corpus(url: str, texts: Sequence[str], folder: Path, options: Sequence[str]) -> tuple[int, float]:
    """(tokens, seconds) of a whole process, from its start to its end."""
    source, output = folder / "documents.jsonl.zst", folder / f"out-{time.time_ns()}"
    with pa.output_stream(str(source), compression="detect") as stream:
        for text in texts:
            stream.write(json.dumps({"text": text}).encode() + b"\n")
    command = [sys.executable, "-m", "scoremode.cli", "corpus", str(source), "--url", url, "--output", str(output)]
    begun = time.perf_counter()
    done = subprocess.run([*command, "--quiet", *options], check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - begun
    print(f"      {done.stdout.splitlines()[-1]}", flush=True)
    scored = pq.read_table(output / "documents.parquet", columns=["num_tokens"]).column("num_tokens").to_pylist()
    if len(scored) != len(texts) or None in scored:
        raise RuntimeError("documents were not scored")
    return sum(scored), seconds


@dataclass(frozen=True, slots=True)
class Documents:
    """What a server is given: texts for the corpus, token ids for prefill, before it and after; no document twice."""

    warm_up: tuple[list[str], list[list[int]]]
    texts: list[str]
    before: list[list[int]]
    after: list[list[int]]


def make_all(tokenizer: Tokenizer, num_corpus: int, num_prefill: int) -> Documents:
    """Each part from a seed of its own."""
    return Documents(
        warm_up=make_documents(tokenizer, 256, seed=0),
        texts=make_documents(tokenizer, num_corpus, seed=1)[0],
        before=make_documents(tokenizer, num_prefill // 2, seed=2)[1],
        after=make_documents(tokenizer, num_prefill - num_prefill // 2, seed=3)[1],
    )


def measure(url: str, model: str, documents: Documents, corpus_options: Sequence[str]) -> None:
    """Print the rates, and the corpus' share of that of prefill.

    Raises:
        RuntimeError: a request for prefill failed, or a document was not scored.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_prefill(url, model, documents.warm_up[1])
        run_corpus(url, documents.warm_up[0], Path(folder), corpus_options)
        before = run_prefill(url, model, documents.before)
        print(f"    prefill: {before}", flush=True)
        num_tokens, seconds = run_corpus(url, documents.texts, Path(folder), corpus_options)
        print(f"    corpus: {num_tokens / seconds:,.0f} tok/s, {num_tokens:,} tokens, {seconds:.2f} s", flush=True)
        after = run_prefill(url, model, documents.after)
        print(f"    prefill: {after}", flush=True)
    prefill = (before.tokens + after.tokens) / (before.seconds + after.seconds)
    print(f"  corpus / prefill: {num_tokens / seconds / prefill:.3f}", flush=True)


def main() -> None:
    """Start the servers and measure each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--shapes", nargs="+", default=["8b", "1b"])
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--prefill-documents", type=int, default=20_000)
    parser.add_argument("--api-servers", type=int, default=1)
    parser.add_argument("--corpus-options", nargs=argparse.REMAINDER, default=[], help="of ppl-client corpus; last")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    settings = Settings(("--api-server-count", str(options.api_servers)) if options.api_servers > 1 else ())
    with ThreadPoolExecutor(1) as pool:
        # While the first server starts.
        documents = pool.submit(make_all, tokenizer, options.documents, options.prefill_documents)
        # One at a time: another engine on the same GPU would take a part of it.
        for shape in options.shapes:
            with started([shape], {"scoremode": settings}, options.tokenizer, options.logs) as urls:
                print(shape, flush=True)
                measure(urls[shape, "scoremode"], shape, documents.result(), options.corpus_options)


if __name__ == "__main__":
    main()
