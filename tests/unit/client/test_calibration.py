"""Windows that share n-grams with a calibration text, against sets of tuples."""

from types import SimpleNamespace

import numpy as np

from scoremode.runs import tokenize_texts
from scoremode.runs.calibration import NGRAM, Calibration, measure_overlap
from tests.unit.client.fake_server import FakeServer, client_of


def ngrams(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + NGRAM]) for start in range(len(tokens) - NGRAM + 1)]


async def test_shares_are_those_of_sets_of_ngrams() -> None:
    random = np.random.default_rng(3)
    text = bytes(random.integers(97, 100, 2000).tolist()).decode()
    texts = [text[:700], text[900:1500], "short"]
    windows = [list(text[start : start + 250].encode()) for start in range(0, 2000, 250)] + [[97] * 5]
    seen = {ngram for each in texts for ngram in ngrams(list(each.encode()))}
    expected = [np.mean([ngram in seen for ngram in ngrams(window)]) if len(window) > 5 else 0 for window in windows]
    async with client_of(FakeServer()) as client:
        calibration = Calibration("text", texts, await tokenize_texts(client, texts, False), 0.4)
    token_ids, sizes = [token for window in windows for token in window], [*map(len, windows)]
    run = SimpleNamespace(target_ids=token_ids, window_sizes=sizes, figures_of=lambda kept: kept.tolist())
    overlap = measure_overlap(calibration, run)
    np.testing.assert_allclose(overlap.shares, expected)
    assert 0 < overlap.is_shared.sum() < len(windows)
    assert overlap.is_shared.tolist() == [share > 0.4 for share in expected]
    assert overlap.without == [share <= 0.4 for share in expected]
