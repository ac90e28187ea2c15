"""A finished evaluation as JSON and arrays, for the record, and what every kind of record has."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from scoremode._version import __version__
from scoremode.metrics import Perplexity
from scoremode.runs.calibration import Overlap
from scoremode.runs.conversations import token_classes
from scoremode.runs.evaluate import Evaluation
from scoremode.runs.lanes import lane_fields
from scoremode.wire.protocol import ServerInfo
from scoremode.wire.references import Reference, WindowOrigins

RECORD_VERSION = 1
"""Of the JSON of every `kind`: fields may be added; none changes its meaning or is removed."""


def weights_in_words(model: ServerInfo | Reference) -> str:
    return f"{model.quantization or 'not quantized'}, {model.dtype}"


def reference_in_words(reference: Reference) -> str:
    """The weights of a reference's model, and its revision."""
    weights = weights_in_words(reference)
    return weights if reference.revision is None else f"{weights}, revision {reference.revision}"


def as_json(
    evaluation: Evaluation, urls: Sequence[str], overlap: Overlap[Perplexity] | None = None
) -> dict[str, object]:
    """All that was measured and all that it takes to repeat it; NLLs in nats. JSON lacks infinity: it becomes null."""
    rest = None if overlap is None else overlap.without
    plan, result, text = evaluation.plan, evaluation.result, evaluation.text_metrics
    return {
        **record_beginning("perplexity", urls, plan.model, plan.server),
        "corpus": {**plan.corpus.info.model_dump(), "source": plan.corpus.source},
        "settings": {
            "method": plan.method,
            "context_length": plan.context_length,
            "stride": plan.stride,
            "max_tokens": plan.max_tokens,
            "add_special_tokens": plan.add_special_tokens,
            # True in files of earlier versions whose windows the server cut.
            "server_side": False,
            "concurrency": evaluation.concurrency,
            **lane_fields(plan.lane, evaluation.mean_batch),
        },
        "num_tokens": len(plan.tokens),
        "num_bytes": plan.num_bytes,
        "num_words": plan.num_words,
        **finite_or_none(dataclasses.asdict(result) | dataclasses.asdict(text)),
        "seconds": evaluation.seconds,
        "tokens_per_second": evaluation.tokens_per_second,
        # Under the names that a comparison with a reference has for the served model.
        "statistics": finite_or_none(
            {
                "num_scored": result.num_scored,
                "num_windows": len(evaluation.windows),
                "nll_q": result.nll_mean,
                "nll_q_stderr": result.nll_stderr,
                "ppl_q": result.perplexity,
                "ppl_q_stderr": result.perplexity_stderr,
            }
        ),
        "windows": [
            {
                "index": window.index,
                "num_scored": window.num_scored,
                "nll_sum": window.nll_sum,
                # Not by dataclasses.asdict, which would copy every NLL.
                "nlls": window.nlls,
            }
            for window in evaluation.windows
        ],
        **tokens_record(evaluation.token_texts, plan.origins),
        **({} if overlap is None else overlap.record(rest and finite_or_none(dataclasses.asdict(rest)))),
    }


def as_arrays(evaluation: Evaluation) -> dict[str, NDArray[Any]]:
    """The values of every target, in the order of windows, and the windows' sizes."""
    windows = evaluation.windows
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": np.array(evaluation.plan.target_ids(), np.int32),
        # As the server sent them, which float32 holds.
        "logprobs": np.array([-nll for window in windows for nll in window.nlls], np.float32),
        "window_sizes": np.array([window.num_scored for window in windows], np.int32),
    }
    ranks = [rank for window in windows for rank in window.ranks or ()]
    if ranks:
        arrays["ranks"] = np.array(ranks, np.int32)
    return arrays | origin_arrays(evaluation.plan.origins, arrays, evaluation.token_texts)


def origin_arrays(
    origins: WindowOrigins | None, of_run: Mapping[str, NDArray[Any]], token_texts: Mapping[int, str]
) -> dict[str, NDArray[Any]]:
    """Where each window of a run is from, and the classes of its targets, as far as they are known."""
    if origins is None:
        return {}
    arrays: dict[str, NDArray[Any]] = {"window_contexts": np.array(origins.num_context, np.int32)}
    if origins.documents[-1] or origins.roles:
        arrays["window_documents"] = np.array(origins.documents, np.int32)
    if origins.labels is not None:
        names = {name: index for index, name in enumerate(dict.fromkeys(origins.labels))}
        arrays["window_labels"] = np.array([names[label] for label in origins.labels], np.int32)
    if origins.roles and token_texts:
        sizes = of_run["window_sizes"].tolist()
        arrays["classes"] = token_classes(of_run["token_ids"], sizes, origins.roles, token_texts)
    return arrays


def record_beginning(kind: str, urls: Sequence[str], model: str, server: ServerInfo) -> dict[str, object]:
    return {
        "kind": kind,
        "version": RECORD_VERSION,
        "client_version": __version__,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "urls": [str(httpx.URL(url).copy_with(userinfo=b"")) for url in urls],
        "model": model,
        "server": server.model_dump(),
    }


def tokens_record(texts: Mapping[int, str], origins: WindowOrigins | None) -> dict[str, object]:
    """What every kind of record says of the texts of its tokens, by their ids, and of the labels of its windows."""
    labels = None if origins is None else origins.labels
    token_texts = {str(token_id): text for token_id, text in texts.items()}
    return {"token_texts": token_texts, **({} if labels is None else {"labels": list(dict.fromkeys(labels))})}


def finite_or_none(value: Any) -> Any:
    """What JSON can have of a figure, or of several: infinity becomes null."""
    if isinstance(value, dict):
        return {name: finite_or_none(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
