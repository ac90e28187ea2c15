"""Scoring on servers that draft tokens while they generate, compared with transformers.

A drafter's CUDA graph shares memory with the model's, and a prompt of which one token is left is padded for drafts.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from local_server import server_process
from scoremode import AsyncScoreClient, KldPositions
from tests import models, oracle
from tests.gpu.conftest import MEMORY, ON_GPU, SCALE, runner_settings

METHODS = ("n-grams", "draft model", "EAGLE") if ON_GPU else ("n-grams",)
RUNNERS = ("v1", "v2") if ON_GPU else ("v1",)
MODES = ("graphs", "eager") if ON_GPU else ("eager",)
FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16", "--enable-scale-out")
LENGTHS = (*range(2, 41), *range(500, 521))


@dataclass(frozen=True)
class Drafts:
    """How a server drafts."""

    method: str
    runner: str
    mode: str

    def __str__(self) -> str:
        return f"{self.method} | {self.runner} | {self.mode}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.random_llama(tmp_path_factory.mktemp("target"), num_layers=4)


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    """Every other one begins as all of its kind do, so that it ends in, at or after a block that is cached."""
    random = np.random.default_rng(6)
    common = random.integers(3, 1000, max(LENGTHS)).tolist()
    return [common[:length] if length % 2 else random.integers(3, 1000, length).tolist() for length in LENGTHS] + [
        common[: length + 1] for length in (16, 32, 48, 512)
    ]


@pytest.fixture(scope="module")
def expected(model: Path, sequences: list[list[int]]) -> list[np.ndarray]:
    return oracle.logprobs(model, sequences)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """vLLM's `speculative_config` for each method."""
    folder = tmp_path_factory.mktemp("drafters")
    draft = models.random_llama(folder / "draft", seed=1, num_layers=1)
    eagle = models.random_llama(folder / "eagle", seed=2, num_layers=1)
    tensors = load_file(eagle / "model.safetensors")
    head = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    # It has the shape: from a token's embedding and the model's hidden state to a hidden state.
    head["fc.weight"] = head["layers.0.mlp.down_proj.weight"].clone()
    save_file(head, eagle / "model.safetensors", {"format": "pt"})
    return {
        "n-grams": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft model": {"method": "draft_model", "model": str(draft)},
        "EAGLE": {"method": "eagle", "model": str(eagle)},
    }


@pytest.fixture(scope="module")
def servers(
    model: Path,
    drafters: dict[str, dict[str, Any]],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[Drafts, "Future[str]"]]:
    """The address of every server that a collected test asks for. All start at once."""
    folder = tmp_path_factory.mktemp("servers")
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    collected = [call.params["drafts"] for call in calls if "drafts" in call.params]

    def start(drafts: Drafts) -> str:
        config = json.dumps({**drafters[drafts.method], "num_speculative_tokens": 3})
        name = "-".join([drafts.method.replace(" ", "-"), drafts.runner, drafts.mode])
        references = folder / f"{name}-references"
        references.mkdir()
        flags = [*FLAGS, *MEMORY, "--speculative-config", config, "--reference-dir", str(references)]
        server = server_process(
            model,
            *flags,
            *(["--enforce-eager"] if drafts.mode == "eager" else []),
            log=folder / f"{name}.log",
            environment=runner_settings(drafts.runner),
        )
        return stack.enter_context(server).url

    with ExitStack() as stack, ThreadPoolExecutor(len(collected)) as pool:
        yield {each: pool.submit(start, each) for each in collected}


@pytest.fixture(scope="module")
def errors(
    servers: dict[Drafts, "Future[str]"], sequences: list[list[int]], expected: list[np.ndarray]
) -> Iterator[dict[Drafts, "Future[list[np.ndarray]]"]]:
    """How far each server's logprobs are from transformers', sequence by sequence and way by way."""

    async def measure(url: str) -> list[np.ndarray]:
        async with generation(url):
            return [
                np.asarray(found) - exact
                async for way in ways_to_score(url, sequences)
                for found, exact in zip(way, expected, strict=True)
            ]

    # One GPU's time is shared by processes in slices.
    with ThreadPoolExecutor(3) as pool:
        yield {each: pool.submit(lambda url=url: asyncio.run(measure(url.result()))) for each, url in servers.items()}


@asynccontextmanager
async def generation(url: str) -> AsyncIterator[None]:
    """Four clients that generate text for as long as this is open."""
    body = {"prompt": list(range(5, 15)) * 3, "max_tokens": 300, "ignore_eos": True, "temperature": 0}

    async def generate() -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            while True:
                (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate()) for _ in range(4)]
        yield
        for task in tasks:
            task.cancel()


async def ways_to_score(url: str, sequences: list[list[int]]) -> AsyncIterator[list[Any]]:
    """The logprobs of the sequences' tokens but the first, by each of a server's ways."""
    async with AsyncScoreClient(url, timeout=300) as client, httpx.AsyncClient(base_url=url, timeout=300) as http:
        yield [(await client.score(tokens, use_cache=False))[0].logprobs[1:] for tokens in sequences]
        for options in ({"use_cache": False}, {}, {}, {"candidate_token_ids": [7], "use_cache": False}):
            yield [score.logprobs[1:] for score in await client.score(sequences, **options)]
        echo = {"prompt": sequences, "echo": True, "logprobs": 0, "max_tokens": 0}
        choices = (await http.post("/v1/completions", json=echo)).json()["choices"]
        yield [choice["logprobs"]["token_logprobs"][1:] for choice in choices]
        generated = []
        for tokens in sequences:
            body = {"token_ids": tokens, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
            rows = (await http.post("/inference/v1/generate", json=body)).json()["prompt_logprobs"][1:]
            generated.append([row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)])
        yield generated
        text = [token for tokens in sequences[-4:] for token in tokens]
        await client.record_reference("base", text, context_length=33, stride=16)
        itself = KldPositions.concatenate([window.positions for window in (await client.kld("base")).data])
        assert itself.kld.max() < 1e-4 * SCALE
        assert np.abs(itself.logprobs - itself.reference_logprobs).max() < 1e-3 * SCALE


@pytest.mark.parametrize("drafts", [Drafts(*each) for each in itertools.product(METHODS, RUNNERS, MODES)], ids=str)
def test_scores_next_to_drafts_equal_transformers(errors: dict[Drafts, "Future[list[np.ndarray]]"], drafts: Drafts):
    of_sequences = errors[drafts].result()
    every = np.abs(np.concatenate(of_sequences))
    print(f"\n| {drafts} | {len(of_sequences)} | {every.mean():.4f} | {every.max():.4f} |")
    for error in of_sequences:
        oracle.assert_close(error, np.zeros_like(error), scale=SCALE)
