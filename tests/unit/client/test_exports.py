"""What both packages export is a promise: each name is there, no other is, and each says what it is for."""

import inspect
from types import ModuleType

import pytest

import scoremode
import scoremode_server

CLIENT = {
    "METHODS",
    "APIStatusError",
    "AsyncScoreClient",
    "AuthenticationError",
    "BadRequestError",
    "CorpusError",
    "CorpusProgress",
    "KldMeasurement",
    "KldPositions",
    "KldResult",
    "KldStatistics",
    "KldWindowValues",
    "Method",
    "NoiseFloor",
    "NotFoundError",
    "OutputError",
    "PerplexityResponse",
    "PerplexityWindow",
    "RateLimitError",
    "Recording",
    "Reference",
    "ResponseError",
    "Score",
    "ScoreClient",
    "ScoremodeError",
    "ServerError",
    "ServerInfo",
    "ServersDifferError",
    "TransportError",
    "Window",
    "__version__",
    "cut_windows",
    "measure_kld",
    "measure_noise_floor",
    "perplexity",
    "record_reference",
    "score_corpus",
}
SERVER = {
    "SequenceScore",
    "enable",
    "read_score",
    "score",
    "score_params",
}

PACKAGES = pytest.mark.parametrize(
    ("package", "names"),
    [(scoremode, CLIENT), (scoremode_server, SERVER)],
    ids=lambda part: part.__name__ if isinstance(part, ModuleType) else "",
)


@PACKAGES
def test_the_exported_names_are_these(package: ModuleType, names: set[str]):
    assert set(package.__all__) == names
    assert len(package.__all__) == len(names)
    assert all(hasattr(package, name) for name in names)


@PACKAGES
def test_every_exported_class_and_function_has_a_docstring_of_its_own(package: ModuleType, names: set[str]):
    documented = {
        name: vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        for name in names
        if inspect.isclass(value := getattr(package, name)) or inspect.isroutine(value)
    }
    # A dataclass without a docstring gets its signature as one.
    assert not [name for name, text in documented.items() if not text or text.startswith(f"{name}(")]
