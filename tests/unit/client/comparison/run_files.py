"""Files of runs as `ppl-client` writes them, of made-up values: made by the writers themselves."""

from itertools import accumulate
from pathlib import Path

import made_up_runs
import numpy as np
from fake_scoremode import INFO

from scoremode import report
from scoremode._output import Output
from scoremode.corpora import Corpus
from scoremode.evaluate import Evaluation
from scoremode.metrics import perplexity, text_metrics
from scoremode.plan import WindowNlls
from scoremode.protocol import NoiseFloor, Reference, ServerInfo

TEXT = "a text of some length"
WINDOW_SIZES = [100] * 30


def made_up_nlls(seed: int, window_sizes=WINDOW_SIZES, shift: float = 0.0) -> np.ndarray:
    """[n] NLLs as float32 holds them; equal but for a small noise of each seed, and shifted."""
    common, own = np.random.default_rng(12345), np.random.default_rng(seed)
    num_scored = sum(window_sizes)
    nlls = common.exponential(3, num_scored) + 0.1 * own.normal(size=num_scored) + shift
    return np.abs(nlls).astype(np.float32).astype(np.float64)


def made_up_tokens(window_sizes=WINDOW_SIZES) -> np.ndarray:
    return np.random.default_rng(6789).integers(0, 257, sum(window_sizes)).astype(np.int32)


def write_perplexity_run(
    path: Path,
    nlls: np.ndarray,
    *,
    window_sizes=WINDOW_SIZES,
    token_ids=None,
    text: str = TEXT,
    model: str = "bytes",
    server: dict | None = None,
    server_side: bool = False,
    more: dict | None = None,
    **settings,
) -> Path:
    """What `ppl-client --output` leaves; `more` goes into the JSON, as a later version may have it."""
    token_ids = made_up_tokens(window_sizes) if token_ids is None else token_ids
    settings = {"method": "sliding", "context_length": 128, "stride": 100, **settings}
    ends = list(accumulate(window_sizes))
    result = perplexity(nlls.tolist())
    num_tokens = len(nlls) + 1
    evaluation = Evaluation(
        corpus=Corpus("text", text, "a made-up text", 1),
        server=ServerInfo(**{**INFO, **(server or {})}),
        model=model,
        server_side=server_side,
        **settings,
        max_tokens=None,
        add_special_tokens=True,
        concurrency=8,
        num_tokens=num_tokens,
        num_bytes=4 * num_tokens,
        num_words=num_tokens,
        result=result,
        text_metrics=text_metrics(
            result, settings["method"], num_tokens=num_tokens, num_bytes=4 * num_tokens, num_words=num_tokens
        ),
        windows=[
            WindowNlls(
                index, end - start, float(nlls[start:end].sum()), None if server_side else nlls[start:end].tolist()
            )
            for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
        ],
        token_ids=None if server_side else token_ids.tolist(),
        seconds=1.0,
    )
    record = report.as_json(evaluation, ["http://host:8000"]) | (more or {})
    Output(path, resume=False).write(record, report.as_arrays(evaluation))
    return path


def made_up_reference(window_sizes=WINDOW_SIZES, noise_floor: float | None = None, **changes) -> Reference:
    fields = {
        "name": "base",
        "model": "bytes",
        "fingerprint": "of the model",
        "text_fingerprint": "of the text",
        "context_length": 128,
        "stride": 100,
        "noise_floor": None
        if noise_floor is None
        else NoiseFloor(mean=noise_floor, p99=1.0, max=1.0, num_scored=sum(window_sizes), created=1),
    }
    return made_up_runs.made_up_reference(window_sizes, **{**fields, **changes})


def write_kld_run(
    path: Path,
    nlls: np.ndarray,
    kld: np.ndarray,
    *,
    window_sizes=WINDOW_SIZES,
    reference: Reference | None = None,
    server: dict | None = None,
) -> Path:
    """What `ppl-client kld --output` leaves. Below a divergence of 0.1 the likeliest token is the reference's."""
    num_scored = len(nlls)
    values = {
        "token_ids": made_up_tokens(window_sizes),
        "kld": kld,
        "reverse_kld": kld,
        "acceptance": np.ones(num_scored),
        "logprobs": -nlls,
        "reference_logprobs": -made_up_nlls(0, window_sizes),
        "ranks": np.ones(num_scored),
        "reference_ranks": np.ones(num_scored),
        "top_token_ids": np.where(kld < 0.1, 7, 8),
        "reference_top_token_ids": np.full(num_scored, 7),
        "reference_confidence": np.full(num_scored, 0.5),
    }
    return made_up_runs.write_kld_run(
        path,
        values,
        window_sizes,
        server=ServerInfo(**{**INFO, **(server or {})}),
        reference=reference or made_up_reference(window_sizes),
    )
