"""SmolLM2 on both model runners: V2 with CUDA graphs, and V1 eagerly with a copy rounded to 4 bits."""

import asyncio
from concurrent.futures import Future
from pathlib import Path

import httpx
import numpy as np
import pytest

from scoremode import AsyncScoreClient, KldPositions, cut_windows
from scoremode.wire import Lane
from tests import oracle
from tests.gpu.conftest import SCALE, Served

# All start before the first test waits for one of them.
pytestmark = pytest.mark.usefixtures("families", "servers")

LENGTHS = (2, 3, 15, 16, 17, 31, 32, 33, 500, 512, 513, 1023)


@pytest.fixture(scope="module")
def tokens(smollm2: Path, wikitext: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)(wikitext[:8000]).input_ids[:1024]


def test_sequences_of_every_length_alone_and_together(served: Served, tokens: list[int]):
    sequences = [tokens[length : 2 * length] if length < 500 else tokens[:length] for length in LENGTHS]
    expected = oracle.logprobs(served.model, sequences)
    together = served.client.score(sequences, use_cache=False)
    alone = [served.client.score(sequence, use_cache=False)[0] for sequence in sequences]
    for one, other, exact in zip(together, alone, expected, strict=True):
        assert one.logprobs[0] is None
        oracle.assert_close(one.logprobs[1:], exact, scale=SCALE)
        oracle.assert_close(other.logprobs[1:], exact, scale=SCALE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_top_logprobs_and_candidates_at_a_temperature(served: Served, tokens: list[int], temperature: float):
    sequence, chosen = tokens[:200], [0, 17, 49_151]
    exact = (oracle.logits(served.model, sequence) / temperature).log_softmax(-1).numpy()
    (score,) = served.client.score(
        sequence, top_logprobs=50, candidate_token_ids=chosen, temperature=temperature, return_ranks=True
    )
    top = score.top_logprobs
    oracle.assert_close(top.logprobs[1:], np.sort(exact)[:, ::-1][:, :50], scale=2 * SCALE)
    oracle.assert_close(top.logprobs[1:], np.take_along_axis(exact, top.token_ids[1:], 1), scale=2 * SCALE)
    oracle.assert_close(score.candidate_logprobs[1:], exact[:, chosen], scale=2 * SCALE)
    for position in range(1, len(sequence)):
        if score.ranks[position] <= 50:
            assert top.logprobs[position, score.ranks[position] - 1] == score.logprobs[position]


@pytest.mark.parametrize(("lane", "temperature"), [("prefill", 1.0), ("prefill", 0.5), ("decode", 1.0)])
def test_statistics_and_the_figure_of_a_package(served: Served, tokens: list[int], lane: Lane, temperature: float):
    """In the prefill lane a second time with cached keys, values and rows."""
    sequence, chosen = tokens[300:430], [0, 17, 49_151]
    exact = (oracle.logits(served.model, sequence) / temperature).log_softmax(-1).numpy()
    p = np.exp(exact)
    entropy = -(p * exact).sum(1)
    expected = {
        "entropy": entropy,
        "std_logprob": np.sqrt((p * (exact + entropy[:, None]) ** 2).sum(1)),
        "token_mass": p[:, chosen].sum(1),
    }
    for _ in range(2):
        (score,) = served.client.score(
            sequence,
            statistics=["entropy", "std_logprob"],
            sinks={"token_mass": chosen},
            temperature=temperature,
            lane=lane,
        )
        assert score.columns.keys() == expected.keys()
        for name, column in score.columns.items():
            oracle.assert_close(column[1:], expected[name], scale=SCALE / temperature)


def test_a_prefix_that_is_cached_changes_no_logprob(served: Served, tokens: list[int]):
    prompt, endings = tokens[100:700], [[5000 + index, 6000 + index] for index in range(4)]
    exact = oracle.logprobs(served.model, [prompt + ending for ending in endings])
    for _ in range(2):
        scores = served.client.score(prompt, endings)
        for score, whole in zip(scores, exact, strict=True):
            oracle.assert_close(score.logprobs, whole[-2:], scale=SCALE)
    another = {"prompt": prompt, "continuations": [[7000, 8000]]}
    answer = httpx.post(f"{served.url}/v1/score", json=another, timeout=300).json()
    assert answer["usage"]["cached_tokens"] >= 512


async def test_scores_next_to_generation_and_clients_that_leave(served: Served, tokens: list[int]):
    (exact,) = oracle.logprobs(served.model, [tokens[:400]])
    generation = {"prompt": tokens[:50], "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=300) as http,
        AsyncScoreClient(served.url, timeout=300) as client,
    ):
        generating = [asyncio.create_task(http.post("/v1/completions", json=generation)) for _ in range(4)]
        leaving = [asyncio.create_task(client.score(tokens[index:], use_cache=False)) for index in range(8)]
        await asyncio.sleep(0)
        found = await asyncio.gather(*(client.score(tokens[:400], use_cache=False) for _ in range(4)))
        for task in leaving:
            task.cancel()
        texts = {(await answer).json()["choices"][0]["text"] for answer in generating}
        (afterwards,) = await client.score(tokens[:400], use_cache=False)
        while "scoremode_running_sequences 0.0" not in (await http.get("/metrics")).text:
            pass
    assert len(texts) == 1
    for score in (*(score for (score,) in found), afterwards):
        oracle.assert_close(score.logprobs[1:], exact, scale=SCALE)


def test_divergences_of_either_model_from_the_other(servers: "dict[str, Future[Served]]", wikitext: str):
    first, second = (servers[runner].result() for runner in ("v2", "v1"))
    ids = first.client.tokenize(wikitext[:1800])
    windows = [(window.token_ids(ids), window.first_scored) for window in cut_windows(len(ids), "sliding", 256, 128)]
    for base, served in ((first, second), (second, first)):
        base.client.record_reference("base", ids, context_length=256, stride=128)
        itself, found = (
            KldPositions.concatenate([window.positions for window in one.client.kld("base").data])
            for one in (base, served)
        )
        exact = oracle.divergences(base.model, served.model, [tokens for tokens, _ in windows])
        base.client.delete_reference("base")
        # The same kernels on the same rows, but for the batches that they are computed in.
        assert itself.kld.mean() < 1e-6 * SCALE
        for name in ("kld", "reverse_kld", "acceptance", "logprobs", "reference_logprobs"):
            parts = [getattr(each, name)[scored - 1 :] for each, (_, scored) in zip(exact, windows, strict=True)]
            oracle.assert_close(getattr(found, name), np.concatenate(parts), scale=SCALE)
        assert found.kld.mean() > 0.05
