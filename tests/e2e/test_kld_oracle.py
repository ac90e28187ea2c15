"""KL divergence on real servers against transformers: float64 over the full logits of both models."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from scoremode import ScoreClient, ScoremodeError, cut_windows
from scoremode.kld import KldPositions
from scoremode.results import KldResult
from tests import oracle
from tests.shared_servers import Servers

CONTEXT, STRIDE = 128, 64


@pytest.fixture(scope="module")
def text(wikitext: str) -> str:
    return wikitext[:1000]


@pytest.fixture(scope="module")
def sequences(smollm2_client: ScoreClient, text: str) -> list[tuple[list[int], int]]:
    """The tokens of each window, and its first target."""
    tokens = smollm2_client.tokenize(text)
    windows = cut_windows(len(tokens), "sliding", CONTEXT, STRIDE)
    return [(window.token_ids(tokens), window.first_scored) for window in windows]


@pytest.fixture(scope="module")
def reference(smollm2_client: ScoreClient, text: str) -> Iterator[str]:
    """SmolLM2-135M in float32."""
    smollm2_client.record_reference("base", text, context_length=CONTEXT, stride=STRIDE)
    yield "base"
    smollm2_client.delete_reference("base")


@pytest.fixture(scope="module")
def rounded_server(servers: Servers) -> str:
    return servers.url("rounded_server")


@pytest.fixture(scope="module")
def rounded_client(rounded_server: str) -> Iterator[ScoreClient]:
    with ScoreClient(rounded_server, timeout=300) as client:
        yield client


def positions_of(result: KldResult) -> KldPositions:
    return KldPositions.concatenate([window.positions for window in result.data])


def test_a_reference_has_the_perplexity_of_its_model(smollm2_client, reference, text):
    recorded = smollm2_client.reference(reference)
    expected = smollm2_client.perplexity(text, context_length=CONTEXT, stride=STRIDE)
    assert recorded.complete
    assert recorded.perplexity == pytest.approx(expected.perplexity, rel=1e-5)
    assert (recorded.num_scored, recorded.num_windows) == (expected.num_scored, expected.num_windows)
    assert recorded.num_recorded == recorded.num_windows
    assert (recorded.num_bytes, recorded.num_words) == (expected.num_bytes, expected.num_words)
    assert recorded.fingerprint == smollm2_client.info().fingerprint
    # Hidden states in float32, a head of 49,152 rows, and little else.
    hidden = 576 * 4
    assert 1 <= recorded.disk_bytes / (hidden * (recorded.num_scored + 49_152)) < 1.02


def test_a_model_does_not_diverge_from_itself(smollm2_client, reference):
    result = smollm2_client.kld(reference)
    positions = positions_of(result)
    assert max(positions.kld.max(), positions.reverse_kld.max()) < 1e-6
    assert positions.acceptance.min() > 1 - 1e-4
    assert result.statistics["same_top_p"] == 1


def test_four_bits_and_a_head_of_its_own_diverge_as_transformers_says(
    rounded_client, smollm2, rounded_smollm2, reference, sequences
):
    compared = rounded_client.kld(reference)
    found = positions_of(compared)
    assert found.kld.mean() > 0.1
    expected = oracle.divergences(smollm2, rounded_smollm2, [tokens for tokens, _ in sequences])
    for name in oracle.Divergence._fields:
        ours = getattr(found, name)
        parts = [getattr(each, name)[first - 1 :] for each, (_, first) in zip(expected, sequences, strict=True)]
        theirs = np.concatenate(parts)
        assert ours.shape == theirs.shape
        if name.endswith("token_ids"):
            # Two tokens of nearly equal likelihood may change places.
            assert np.mean(ours == theirs) > 0.99
        else:
            oracle.assert_close(ours, theirs)
    alone = positions_of(rounded_client.kld(reference, windows=(1, 2)))
    start = compared.data[0].num_scored
    oracle.assert_close(alone.kld, found.kld[start : start + STRIDE])


def test_top_tokens_of_both_models(rounded_client, reference):
    (window,) = rounded_client.kld(reference, windows=(1, 2), top_logprobs=5).data
    assert window.top_logprobs.token_ids.shape == (STRIDE, 5)
    assert np.array_equal(window.top_logprobs.token_ids[:, 0], window.positions.top_token_ids)
    assert np.array_equal(window.reference_top_logprobs.token_ids[:, 0], window.positions.reference_top_token_ids)
    assert np.all(np.diff(window.top_logprobs.logprobs) <= 0)
    confidence = np.exp(window.reference_top_logprobs.logprobs[:, 0])
    assert np.abs(confidence - window.positions.reference_confidence).max() < 1e-6


def test_a_noise_floor_needs_the_references_own_model(smollm2_client, rounded_client, reference):
    smollm2_client.kld(reference, as_noise_floor=True)
    floor = smollm2_client.reference(reference).noise_floor
    assert floor is not None
    assert 0 <= floor.mean <= floor.p99 <= floor.max < 1e-6
    with pytest.raises(ScoremodeError, match="serves another"):
        rounded_client.kld(reference, as_noise_floor=True)


def test_an_interrupted_recording_resumes(smollm2_client, smollm2_server, wikitext):
    body = {"name": "long", "prompt": wikitext[:3000], "context_length": 64, "stride": 32, "stream": True}
    with httpx.stream("POST", f"{smollm2_server}/v1/references", json=body, timeout=300) as events:
        for _, line in zip(range(8), events.iter_lines(), strict=False):
            assert "error" not in line
    partial = smollm2_client.reference("long")
    assert not partial.complete
    assert 0 < partial.num_recorded < partial.num_windows
    with pytest.raises(ScoremodeError, match="not complete"):
        smollm2_client.kld("long")
    progress: list[Any] = []
    finished = smollm2_client.record_reference(
        "long", body["prompt"], context_length=64, stride=32, on_window=progress.append
    )
    assert finished.complete
    assert 0 < len(progress) <= partial.num_windows - partial.num_recorded + 8
    expected = smollm2_client.perplexity(body["prompt"], context_length=64, stride=32)
    assert finished.nll_mean == pytest.approx(expected.nll_mean, abs=1e-5)
    smollm2_client.delete_reference("long")
