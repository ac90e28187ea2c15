"""What both packages export is a promise: each name is there, and no other is."""

from types import ModuleType

import pytest

import scoremode
import scoremode_server

CLIENT = {
    *("METHODS", "Method", "Window", "__version__", "cut_windows"),
    *("AsyncScoreClient", "ScoreClient", "Score", "ServerInfo", "PerplexityResponse", "PerplexityWindow"),
    *("APIStatusError", "AuthenticationError", "BadRequestError", "CorpusError", "NotFoundError", "OutputError"),
    *("RateLimitError", "ResponseError", "ScoremodeError", "ServerError", "ServersDifferError", "TransportError"),
    *("KldMeasurement", "KldPositions", "KldResult", "KldStatistics", "KldWindowValues", "NoiseFloor"),
    *("Recording", "Reference", "measure_kld", "measure_noise_floor", "perplexity", "record_reference"),
    *("CorpusProgress", "score_corpus"),
}
SERVER = {"SequenceScore", "enable", "read_score", "score", "score_params"}


@pytest.mark.parametrize(("package", "names"), [(scoremode, CLIENT), (scoremode_server, SERVER)])
def test_the_exported_names_are_these(package: ModuleType, names: set[str]):
    assert sorted(package.__all__) == sorted(names)
    assert all(hasattr(package, name) for name in names)
