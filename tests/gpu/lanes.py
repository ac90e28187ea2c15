"""The lanes of one engine in process, compared with what it generates and with transformers; prints one line of JSON.

    python -m tests.gpu.lanes MODEL [--dtype float32] [--batch 25] [--length 257] [--eager]

Eagerly it also plants faults that only a step with one token per sequence has, and says what each lane makes of them.
"""

import argparse
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from scoremode_server import enable
from scoremode_server.rows import Rows, received_rows
from scoremode_server.worker.row_spec import RowSpec, ScoringParams
from tests import oracle

CONTEXT = 33
"""Tokens of each sequence that are given; the others are generated."""
Tokens = Sequence[int]


def engine_of(model: Path, **settings: Any) -> LLM:
    """A `vllm.LLM` with Scoremode, whose worker is in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    enable()
    # Others start at the same time, and would take each other's memory for their own.
    return LLM(str(model), max_model_len=1024, gpu_memory_utilization=0.05, **settings)


def scored_rows(engine: Any, sequences: Sequence[Tokens], specs: Iterable[RowSpec]) -> list[Rows]:
    """The rows of sequences that the engine has all at once, none of them from its prefix cache."""
    plain = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    plain.skip_reading_prefix_cache = True
    own = [replace(spec, last_token=each[-1]) for each, spec in zip(sequences, specs, strict=False)]
    params = [ScoringParams.of(plain, spec) for spec in own]
    prompts = [TokensPrompt(prompt_token_ids=list(each[:-1]), cache_salt=uuid.uuid4().hex) for each in sequences]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [received_rows(output, spec.columns) for output, spec in zip(outputs, own, strict=True)]


def lane_logprobs(engine: Any, sequences: Sequence[Tokens], chunk: int, first: int = 1) -> np.ndarray:
    """Logprobs [sequences, n - first] of tokens from `first` on, with `chunk` tokens per step, or as many as fit if
    0."""
    spec = RowSpec(first, chunk=chunk, context=max(1, first - 1))
    return np.stack([rows.logprobs[:, 0] for rows in scored_rows(engine, sequences, repeat(spec))])


def generated(engine: Any, prompts: Sequence[Tokens], num_tokens: int) -> tuple[list[list[int]], np.ndarray]:
    """Generate greedily after each prompt. Returns prompts with generated tokens, and the engine's own logprobs of all
    generated tokens but the first, which comes from a prefill step."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    params.skip_reading_prefix_cache = True
    found = engine.generate([TokensPrompt(prompt_token_ids=list(each)) for each in prompts], params, use_tqdm=False)
    texts = [list(output.outputs[0].token_ids) for output in found]
    logprobs = [
        [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        for output, tokens in zip(found, texts, strict=True)
    ]
    return [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)], np.array(logprobs)[:, 1:]


@contextmanager
def linear_fault(batch: int) -> Iterator[None]:
    """A kernel for small M that drops the last 16 of K: linear layers of at most as many rows as a decode step has."""
    apply = UnquantizedLinearMethod.apply

    def without_rest(self: Any, layer: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if x.shape[0] <= batch:
            x = torch.cat((x[:, :-16], torch.zeros_like(x[:, -16:])), 1)
        return apply(self, layer, x, *rest)

    with patch.object(UnquantizedLinearMethod, "apply", without_rest):
        yield


@contextmanager
def attention_fault(batch: int) -> Iterator[None]:
    """A reduction of decode attention that scales one head of eight wrongly, as where one split's maximum is stale."""
    forward = Attention.forward

    def misreduced(self: Any, query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        output = forward(self, query, *rest, **options)
        if query.shape[0] <= batch:
            width = output.shape[-1] // 8
            output = torch.cat((output[..., :width] * 0.8, output[..., width:]), -1)
        return output

    with patch.object(Attention, "forward", misreduced):
        yield


FAULTS: dict[str, Callable[[int], Any]] = {"linear": linear_fault, "attention": attention_fault}


def distances(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Mean, median and largest absolute difference in nats, and the mean difference."""
    difference = one.astype(np.float64) - other
    absolute = np.abs(difference)
    figures = (absolute.mean(), np.median(absolute), absolute.max(), difference.mean())
    return dict(zip(("mean", "median", "max", "bias"), map(float, figures), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--length", type=int, default=257)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    # Faults are planted in this process.
    engine = engine_of(
        options.model,
        dtype=options.dtype,
        max_num_seqs=2 * options.batch,
        max_num_batched_tokens=max(1024, CONTEXT * options.batch),
        enforce_eager=options.eager,
        kv_cache_memory_bytes=2**31,
    )
    random, vocab_size = np.random.default_rng(7), engine.llm_engine.model_config.get_vocab_size()
    prompts = random.integers(3, vocab_size, (options.batch, CONTEXT)).tolist()
    texts, own = generated(engine, prompts, options.length - CONTEXT)
    after = slice(CONTEXT, None)
    prefill, decode = lane_logprobs(engine, texts, 0), lane_logprobs(engine, texts, 1)
    as_generated = lane_logprobs(engine, texts, 1, CONTEXT + 1)
    exact = np.stack(oracle.logprobs(options.model, texts[:4]))
    result: dict[str, Any] = {
        "decode to generation": distances(as_generated, own),
        "prefill to generation": distances(prefill[:, after], own),
        "decode to prefill": distances(decode, prefill),
        "decode to transformers": distances(decode[:4], exact),
        "prefill to transformers": distances(prefill[:4], exact),
        "chunks of 3 to prefill": distances(lane_logprobs(engine, texts, 3), prefill),
    }
    for name, fault in FAULTS.items() if options.eager else ():
        with fault(options.batch):
            result[name] = {
                "decode": distances(lane_logprobs(engine, texts, 1, CONTEXT + 1), as_generated),
                "prefill": distances(lane_logprobs(engine, texts, 0), prefill),
                "decode to prefill": distances(lane_logprobs(engine, texts, 1, CONTEXT + 1), prefill[:, after]),
            }
    print(json.dumps({"model": options.model.name, **vars(options), **result}, default=str), flush=True)


if __name__ == "__main__":
    main()
