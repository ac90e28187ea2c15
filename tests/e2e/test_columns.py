"""Columns of sinks over HTTP, next to transformers in float64: the built-in statistics, and the package that
docs/extend.md shows, installed into the environment of the servers."""

import httpx
import numpy as np
import pytest

from local_server import server_process
from scoremode import BadRequestError, ScoreClient
from tests import oracle
from tests.e2e.test_chosen_tokens import log_softmax

SET = [3, 4, 500, 1023]
STATISTICS = ["entropy", "std_logprob"]


@pytest.fixture(scope="module")
def tokens(client: ScoreClient, wikitext: str) -> list[int]:
    return client.tokenize(wikitext[44_000:48_000])[:100]


def check(columns: dict[str, np.ndarray], logprobs: np.ndarray) -> None:
    """Compare the columns of positions with float64 logprobs [n, vocabulary]. Relative errors of float32 arithmetic in
    a model move entropies by 1e-5."""
    p = np.exp(logprobs)
    entropy = -(p * logprobs).sum(1)
    np.testing.assert_allclose(columns["token_mass"], p[:, SET].sum(1), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(columns["entropy"], entropy, rtol=1e-4)
    deviation = np.sqrt((p * (logprobs + entropy[:, None]) ** 2).sum(1))
    np.testing.assert_allclose(columns["std_logprob"], deviation, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("lane", "temperature"), [("prefill", 1.0), ("prefill", 0.5), ("decode", 1.0)])
def test_columns_at_every_position(client, tokens, random_model, lane, temperature):
    """The second time from the cache of rows, in the lane that has one."""
    logprobs = log_softmax(random_model, tokens[:-1], temperature)
    for _ in range(2):
        (score,) = client.score(
            tokens, statistics=STATISTICS, sinks={"token_mass": SET}, lane=lane, temperature=temperature
        )
        assert all(np.isnan(column[0]) for column in score.columns.values())
        check({name: column[1:] for name, column in score.columns.items()}, logprobs)
        oracle.assert_close(score.logprobs[1:], logprobs[range(99), tokens[1:]], scale=1 / temperature)


def test_rows_with_figures_are_cached_apart_from_others(client, server, tokens, random_model):
    """A plain request of the same tokens before and after, and another set."""
    before = client.score(tokens[:70])[0].logprobs
    for chosen in (SET, SET[:1]):
        (score,) = client.score(tokens[:70], sinks={"token_mass": chosen})
        expected = np.exp(log_softmax(random_model, tokens[:69])[:, chosen]).sum(1)
        np.testing.assert_allclose(score.columns["token_mass"][1:], expected, rtol=1e-3, atol=1e-6)
    assert client.score(tokens[:70])[0].logprobs == before


def test_continuations_and_json(server, tokens, random_model):
    """Continuations that differ in their last token alone share a pass, unless a sink may ask for the token."""
    body = {"prompt": tokens[:20], "continuations": [[5, 6], [5, 7]], "statistics": ["entropy"]}
    for sinks in ({}, {"token_mass": SET}):
        results = httpx.post(f"{server}/v1/score", json={**body, "sinks": sinks}, timeout=60).json()["data"]
        logprobs = log_softmax(random_model, [*tokens[:20], 5])[19:]
        for result in results:
            np.testing.assert_allclose(result["columns"]["entropy"], -(np.exp(logprobs) * logprobs).sum(1), rtol=1e-4)
            assert result["columns"].keys() == {"entropy", *sinks}
    whole = httpx.post(f"{server}/v1/score", json={"prompt": [5], "statistics": ["entropy"]}, timeout=60).json()
    assert whole["data"][0]["columns"] == {"entropy": [None]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sinks": {"token_mass": "3"}}, "sinks: token_mass: token_mass must be a list of token ids"),
        ({"sinks": {"other": 1}}, "sinks: this server has statistics, token_mass, not 'other'"),
        ({"statistics": ["entropy", "entropy"]}, "statistics must be one or more of entropy, std_logprob"),
        ({"statistics": ["mean"]}, "statistics"),
    ],
)
def test_what_cannot_be_computed_is_refused(client, wrong, message):
    with pytest.raises(BadRequestError, match=message):
        client.score([1, 2, 3], **wrong)
    assert client.score([1, 2, 3])[0].num_scored == 2


@pytest.mark.slow
def test_two_ranks_add_up_their_parts_of_the_vocabulary(servers, random_model, wikitext, tmp_path):
    """A server of its own, with two tensor-parallel workers on the CPU."""
    flags = ("--tensor-parallel-size", "2", "--max-model-len", "256", "--enforce-eager", "--max-num-seqs", "4")
    environment = {"PYTHONPATH": servers.python_path, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        server_process(random_model, *flags, log=tmp_path / "server.log", environment=environment) as started,
        ScoreClient(started.url, timeout=300) as client,
    ):
        tokens = client.tokenize(wikitext[48_000:50_000])[:100]
        for lane in ("prefill", "decode"):
            (score,) = client.score(tokens, statistics=STATISTICS, sinks={"token_mass": SET}, lane=lane)
            check({name: column[1:] for name, column in score.columns.items()}, log_softmax(random_model, tokens[:-1]))
