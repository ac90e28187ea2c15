"""KL divergence on real servers against transformers: float64 over the full logits of both models."""

from collections.abc import Iterator

import numpy as np
import pytest

from scoremode import ScoreClient, cut_windows
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
