"""Scoremode's server package: exact log-probabilities of given text from vLLM, offline and over HTTP.

    from scoremode_server import score
    scores = score(llm, "The capital of France is Paris")

Names are imported on first use, so that `scoremode serve` can set vLLM's environment before vLLM is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scoremode_server.offline import SequenceScore, read_score, score, score_params
    from scoremode_server.plugin import enable
    from scoremode_server.worker.sinks import Chunk, Column, Sink

__all__ = ["Chunk", "Column", "SequenceScore", "Sink", "enable", "read_score", "score", "score_params"]

_MODULES = {"enable": "plugin", **dict.fromkeys(("Chunk", "Column", "Sink"), "worker.sinks")}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'offline')}")
    return getattr(module, name)
