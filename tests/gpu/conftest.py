"""Tests that need a GPU: `make test-gpu`. Everything starts at once: servers, and a process for each family of models.

A pytest of its own is started here from an installed Scoremode; `make test` does not collect this folder.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from local_server import ServerError, server_process
from rounded_model import rounded_model
from scoremode import ScoreClient
from tests import example_sink
from tests.gpu.family import FAMILIES

ROOT = Path(__file__).parents[2]
ON_GPU = torch.cuda.is_available()
SCALE = 100 if ON_GPU else 1
"""Times what `oracle.assert_close` allows on a CPU. vLLM's attention multiplies float32 as TF32 on a GPU, which moves
tokens by 0.002 nats in the mean and by 0.07 at most (docs/benchmarks.md)."""
DTYPE = "bfloat16" if ON_GPU else "float32"
AT_ONCE = 9 if ON_GPU else 1
"""Families; each takes one or two cores while it starts."""


@dataclass(frozen=True, order=True)
class Combination:
    """How a family is run."""

    family: str
    runner: str = "v2" if ON_GPU else "v1"
    graphs: bool = ON_GPU

    @property
    def mode(self) -> str:
        return f"{self.runner}-{'graphs' if self.graphs else 'eager'}"

    def __str__(self) -> str:
        return f"{self.mode} {self.family}"


def every_combination() -> list[Any]:
    """Each family as users run it, and marked `matrix` in the other ways."""
    usual = [Combination(family) for family in FAMILIES]
    others = [Combination(family, *how) for how in (("v2", False), ("v1", True), ("v1", False)) for family in FAMILIES]
    return [*usual, *(pytest.param(each, marks=pytest.mark.matrix) for each in others if each not in usual)]


def runner_settings(runner: str) -> dict[str, str]:
    """The environment of a process with a model runner; a CPU has V1 alone."""
    return {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))} if ON_GPU else {}


def run_module(*command: str, runner: str) -> dict[str, Any]:
    """The line of JSON that a module of this folder prints; where vLLM refused, `refused` has its words."""
    # pytest's `pythonpath` adds these folders to its own process.
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *command, *(() if "--dtype" in command else ("--dtype", DTYPE))],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **runner_settings(runner), "PYTHONPATH": paths},
    )
    # vLLM writes to standard output too, even while the process ends.
    if lines := [line for line in done.stdout.splitlines() if line.startswith('{"')]:
        return json.loads(lines[0])
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return {"refused": (errors or done.stderr.splitlines() or ["no output"])[-1][:200], "log": done.stderr[-6000:]}


def run_family(combination: Combination) -> dict[str, Any]:
    """The result of `tests.gpu.family` for a combination."""
    eager = () if combination.graphs else ("--eager",)
    return run_module("tests.gpu.family", combination.family, *eager, runner=combination.runner)


@pytest.fixture(scope="session")
def families(request: pytest.FixtureRequest) -> Iterator[dict[Combination, Future[dict[str, Any]]]]:
    """Results of the collected combinations, as they come."""
    collected = [
        item.callspec.params["combination"]
        for item in request.session.items
        if hasattr(item, "callspec") and "combination" in item.callspec.params
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {each: pool.submit(run_family, each) for each in collected}


@dataclass(frozen=True)
class Served:
    """A model on a server, and one runner of it."""

    model: Path
    client: ScoreClient
    url: str


RUNNERS = {"v2": (), "v1": ("--enforce-eager",)}
"""And how they are served."""
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "1024"),
    *("--max-logprobs", "256"),
)
MEMORY = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(2**31)) if ON_GPU else ()
"""Servers start at the same time, and would take each other's memory for their own."""


@pytest.fixture(scope="session")
def rounded_smollm2(models, smollm2, tmp_path_factory) -> Path:
    """SmolLM2 with weights rounded to 4 bits, as float32, and an LM head that is 0.9 times its embedding."""
    folder = tmp_path_factory.mktemp("models")
    return models.with_scaled_head(rounded_model(smollm2, folder / "rounded"), folder / "scaled", 0.9)


@pytest.fixture(scope="session")
def servers(
    smollm2: Path, rounded_smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Served]]]:
    """SmolLM2 on V2 with CUDA graphs, and its rounded copy on V1 eagerly, with one folder of references."""
    folder = tmp_path_factory.mktemp("servers")

    # Packages with sinks are found as installed ones are.
    paths = os.pathsep.join([str(example_sink.install(folder)), os.environ.get("PYTHONPATH", "")])

    def start(runner: str, model: Path) -> Served:
        environment = {**runner_settings(runner), "PYTHONPATH": paths}
        flags = (*FLAGS, *MEMORY, *RUNNERS[runner], "--reference-dir", str(folder / "references"))
        server = server_process(model, *flags, log=folder / f"{runner}.log", environment=environment)
        url = stack.enter_context(server).url
        return Served(model, ScoreClient(url, timeout=300), url)

    (folder / "references").mkdir()
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        yield {"v2": pool.submit(start, "v2", smollm2), "v1": pool.submit(start, "v1", rounded_smollm2)}


@pytest.fixture(scope="session", params=RUNNERS)
def served(request: pytest.FixtureRequest, servers: dict[str, "Future[Served]"]) -> Served:
    try:
        return servers[request.param].result()
    except ServerError as error:
        pytest.fail(str(error))
