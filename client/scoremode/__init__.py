"""Client of Scoremode: scores given text with a served model, exactly, and computes perplexity and KL divergence.

    from scoremode import ScoreClient

    with ScoreClient("http://localhost:8000") as client:
        [score] = client.score("The capital of France is Paris.")
        print(score.sum_logprob, score.logprobs)

This package imports neither torch nor vLLM.
"""

from scoremode._sync_client import ScoreClient
from scoremode._version import __version__
from scoremode.client import AsyncScoreClient
from scoremode.corpus import CorpusProgress, score_corpus
from scoremode.errors import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    CorpusError,
    NotFoundError,
    OutputError,
    RateLimitError,
    ResponseError,
    ScoremodeError,
    ServerError,
    ServersDifferError,
    TransportError,
)
from scoremode.kld import KldPositions
from scoremode.metrics import perplexity
from scoremode.results import KldResult, KldWindowValues, Score
from scoremode.runs import KldMeasurement, Recording, measure_kld, measure_noise_floor, record_reference
from scoremode.windows import METHODS, Method, Window, cut_windows
from scoremode.wire import KldStatistics, NoiseFloor, PerplexityResponse, PerplexityWindow, Reference, ServerInfo

__all__ = [
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
]
