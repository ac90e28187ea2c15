"""Files of runs with made-up values, written by the functions that `ppl-client` writes its files with."""

from itertools import pairwise
from pathlib import Path

import made_up_runs
import numpy as np
from fake_server import INFO

from scoremode import NoiseFloor, Reference, ServerInfo, Window, perplexity
from scoremode.comparison import RunFile, load_run
from scoremode.runs import Corpus, Evaluation, Output, Plan, WindowNlls
from scoremode.wire import TokenTexts

TEXT = "a text of some length"
OWN = {"fingerprint": "of the model"}
"""Fields of a server of the reference's own model, whose run is the base of a comparison."""
WINDOW_SIZES = [100] * 30


def made_up_nlls(seed: int, window_sizes=WINDOW_SIZES, shift: float = 0.0) -> np.ndarray:
    """[n] NLLs as float32 holds them; equal but for a small noise of each seed, and shifted."""
    common, own = np.random.default_rng(12345), np.random.default_rng(seed)
    num_scored = sum(window_sizes)
    nlls = common.exponential(3, num_scored) + 0.1 * own.normal(size=num_scored) + shift
    return np.abs(nlls).astype(np.float32).astype(np.float64)


def made_up_kld(seed: int, mean: float, window_sizes=WINDOW_SIZES) -> np.ndarray:
    """[n] divergences as float32 holds them."""
    kld = np.random.default_rng([seed, 99]).exponential(mean, sum(window_sizes))
    return kld.astype(np.float32).astype(np.float64)


def made_up_tokens(window_sizes=WINDOW_SIZES) -> np.ndarray:
    return np.random.default_rng(6789).integers(0, 257, sum(window_sizes)).astype(np.int32)


def write_perplexity_run(path: Path, nlls, *, window_sizes=WINDOW_SIZES, text=TEXT, server=None, **fields) -> Path:
    """Write the files of `ppl-client --output`, with other `fields` of `Plan`, and the text of some tokens."""
    texts, ends = TokenTexts(fields.pop("token_texts", {})), np.cumsum(window_sizes).tolist()
    parts = np.split(nlls, ends[:-1])
    made_up = {
        "corpus": Corpus("text", text, "a made-up text", 1),
        "server": ServerInfo(**{**INFO, **(server or {})}),
        "model": "bytes",
        "max_tokens": None,
        "add_special_tokens": True,
        "method": "sliding",
        "context_length": 128,
        "stride": 100,
        "tokens": [0, *made_up_tokens(window_sizes).tolist()],
        "num_bytes": 4 * (len(nlls) + 1),
        "num_words": len(nlls) + 1,
        "windows": [Window(a, b + 1, a + 1) for a, b in pairwise([0, *ends])],
        "documents": [0] * len(parts),
        **fields,
    }
    windows = [
        WindowNlls(index=index, num_scored=len(part), nll_sum=float(part.sum()), nlls=part.tolist())
        for index, part in enumerate(parts)
    ]
    evaluation = Evaluation(Plan(**made_up), 8, perplexity(nlls.tolist()), windows, 1.0, texts)
    Output(path, resume=False, force=True).write(evaluation.record(["http://host"]), evaluation.arrays())
    return path


def made_up_reference(window_sizes=WINDOW_SIZES, noise_floor: float | None = None, **changes) -> Reference:
    floor = noise_floor and NoiseFloor(mean=noise_floor, p99=1.0, max=1.0, num_scored=sum(window_sizes), created=1)
    fields = {
        "name": "base",
        "model": "bytes",
        "fingerprint": "of the model",
        "text_fingerprint": "of the text",
        "dtype": "float32",
        "context_length": 128,
        "stride": 100,
        "noise_floor": floor,
        **changes,
    }
    return made_up_runs.made_up_reference(window_sizes, **fields)


def write_kld_run(path: Path, nlls, kld, *, window_sizes=WINDOW_SIZES, reference=None, server=None, **fields) -> Path:
    """Write the files of `ppl-client kld --output`, with other `fields` of the measurement. Below a divergence of 0.1
    the top token is the reference's."""
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
    server = ServerInfo(**{**INFO, **(server or {})})
    reference = reference or made_up_reference(window_sizes)
    return made_up_runs.write_kld_run(path, values, window_sizes, server=server, reference=reference, **fields)


def perplexity_run(folder: Path, name: str, nlls: np.ndarray, **changes) -> RunFile:
    return load_run(write_perplexity_run(folder / f"{name}.json", nlls, **changes), name)


def kld_run(folder: Path, name: str, nlls: np.ndarray, kld: np.ndarray, **changes) -> RunFile:
    return load_run(write_kld_run(folder / f"{name}.json", nlls, kld, **changes), name)
