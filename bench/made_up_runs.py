"""Files of runs as `ppl-client kld --output` writes them, made up from a seed; values look like quantized models'."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode.kld import POSITION_DTYPES, KldPositions, statistics
from scoremode.results import MAX_TOP_POSITIONS, NUM_TOP, TopTokens
from scoremode.runs import KldMeasurement, Output
from scoremode.wire import NoiseFloor, Reference, ServerInfo, TokenTexts

NUM_PARAMETERS = 134_515_008
NOISE_FLOOR = 3e-6
_WORDS = ("the", "of", "and", "in", "to", "a", "was", "is", "for", "on", "as", "with", "by", "at", "from", "his")


@dataclass(frozen=True, slots=True)
class MadeUpModel:
    """A model, its bits per weight, and about its mean KL divergence from the reference in nats."""

    name: str
    bits: float
    damage: float


MODELS = (
    MadeUpModel("BF16", 16.0, 0.0),
    MadeUpModel("W8A8-INT8", 8.1, 0.0021),
    MadeUpModel("Q6_K", 6.6, 0.0034),
    MadeUpModel("GPTQ-4bit-128g", 4.4, 0.043),
    MadeUpModel("AWQ-4bit", 4.25, 0.031),
    MadeUpModel("RTN-3bit", 3.5, 0.29),
)


def token_texts(vocab_size: int) -> dict[int, str]:
    """Words with a space before them, most of them numbered, and a line break."""
    words = {token: f" {_WORDS[token % len(_WORDS)]}" for token in range(vocab_size)}
    numbered = {token: f"{words[token]}{token}" for token in range(len(_WORDS), vocab_size)}
    return {**words, **numbered, 7: "\n"}


def reference_arrays(num_tokens: int, vocab_size: int, seed: int) -> dict[str, NDArray[Any]]:
    """The arrays that all runs share: tokens, and the reference's values for them. Passages are easy or hard, as in a
    text."""
    random = np.random.default_rng(seed)
    ids = np.minimum(random.zipf(1.3, num_tokens), vocab_size) - 1
    hardness = np.repeat(random.gamma(4, 0.25, num_tokens // 64 + 1), 64)[:num_tokens]
    nll = random.exponential(2.6, num_tokens) * hardness
    likely = np.exp(-nll) > 0.5
    tops = np.where(likely, ids, random.integers(0, vocab_size, num_tokens))
    confidence = np.where(likely, np.exp(-nll), random.beta(1.2, 2.5, num_tokens))
    return {
        "token_ids": ids.astype(np.int32),
        "reference_logprobs": -nll.astype(np.float32),
        "reference_ranks": np.where(likely, 1, 2 + np.expm1(np.minimum(nll, 9)) * 3).astype(np.int32),
        "reference_top_token_ids": tops.astype(np.int32),
        "reference_confidence": confidence.astype(np.float32),
    }


def run_arrays(model: MadeUpModel, reference: dict[str, NDArray[Any]], vocab_size: int, seed: int) -> dict[str, Any]:
    """The arrays of a run of the model. One without damage has zeros, and noise as large as the floor."""
    random = np.random.default_rng(seed)
    num_tokens = len(reference["token_ids"])
    confidence, nll = reference["reference_confidence"], -reference["reference_logprobs"].astype(np.float64)
    damage = model.damage * (1.4 - confidence)
    kld = random.lognormal(-0.8, 1.25, num_tokens) * damage
    if not model.damage:
        kld = np.where(random.random(num_tokens) < 0.4, 0, random.lognormal(-0.5, 1, num_tokens) * NOISE_FLOOR)
    nll = np.abs(nll + random.normal(0, 1, num_tokens) * np.sqrt(kld) + 0.8 * kld)
    flips = random.random(num_tokens) < np.sqrt(kld) * (1 - confidence) / 2
    tops = reference["reference_top_token_ids"]
    return {
        **reference,
        "kld": kld.astype(np.float32),
        "reverse_kld": (kld * 1.1).astype(np.float32),
        "acceptance": np.exp(-np.sqrt(kld)).astype(np.float32),
        "logprobs": -nll.astype(np.float32),
        "ranks": np.where(np.exp(-nll) > 0.5, 1, 2 + np.expm1(np.minimum(nll, 9)) * 3).astype(np.int32),
        "top_token_ids": np.where(flips, random.integers(0, vocab_size, num_tokens), tops).astype(np.int32),
    }


def top_tokens(arrays: Mapping[str, NDArray[Any]], vocab_size: int, seed: int) -> TopTokens:
    """The top tokens at the most divergent positions: the run's, then the reference's other four, each half as
    likely."""
    random = np.random.default_rng(seed)
    at = np.sort(np.argsort(-arrays["kld"], kind="stable")[:MAX_TOP_POSITIONS])
    confidence = np.clip(arrays["reference_confidence"][at], 0.02, 0.98).astype(np.float64)
    shares = np.stack([confidence, *((1 - confidence) / 2**place for place in range(1, NUM_TOP))], axis=1)
    logprobs = -np.sort(-np.log(shares), axis=1)
    steps = random.integers(1, vocab_size // NUM_TOP, (len(at), 1))
    ids = (arrays["reference_top_token_ids"][at, None] + steps * np.arange(NUM_TOP)) % vocab_size
    of_run = np.hstack([arrays["top_token_ids"][at, None], ids[:, 1:]])
    of_noise = logprobs - np.sqrt(arrays["kld"][at, None]) * random.uniform(0, 1, logprobs.shape)
    return TopTokens(
        at,
        np.stack([of_run, ids], axis=1),
        np.stack([-np.sort(-of_noise, axis=1), logprobs], axis=1),
        len(arrays["kld"]),
    )


def made_up_reference(window_sizes: Sequence[int], **fields: Any) -> Reference:
    """A complete recording of a text in windows of these sizes. `fields` override those here."""
    num_scored, num_windows = sum(window_sizes), len(window_sizes)
    made_up = {
        "name": "base-made-up",
        "created": 1_795_346_504,
        "complete": True,
        "model": MODELS[0].name,
        "revision": None,
        "dtype": "bfloat16",
        "quantization": None,
        "scoremode_version": "0.1.0",
        "vllm_version": "0.32.0",
        "vocab_size": 49152,
        "fingerprint": server_of(MODELS[0]).fingerprint,
        "text_fingerprint": "90a00a55b8f0bb8b57e296418f67518e",
        "method": "sliding",
        "context_length": 2048,
        "stride": 512,
        "num_tokens": num_scored + 1,
        "num_windows": num_windows,
        "num_recorded": num_windows,
        "num_scored": num_scored,
        "num_bytes": 4 * (num_scored + 1),
        "num_words": None,
        "disk_bytes": 1,
        "perplexity": 13.0,
        "perplexity_stderr": 0.2,
        "nll_mean": 2.6,
        "noise_floor": None,
    }
    return Reference(**{**made_up, **fields})


def server_of(model: MadeUpModel) -> ServerInfo:
    """Information about a server of the model."""
    return ServerInfo(
        scoremode_version="0.1.0",
        vllm_version="0.32.0",
        model=model.name,
        max_model_len=2048,
        vocab_size=49152,
        max_top_logprobs=20,
        bos_token_id=None,
        eos_token_id=2,
        adds_bos=False,
        dtype="bfloat16",
        quantization=None if model.bits == 16 else "compressed-tensors",
        fingerprint=hashlib.sha256(model.name.encode()).hexdigest()[:32],
        num_parameters=NUM_PARAMETERS,
        weight_bytes=int(NUM_PARAMETERS * model.bits / 8),
    )


def write_kld_run(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    window_sizes: Sequence[int],
    *,
    server: ServerInfo,
    reference: Reference,
    texts: Mapping[int, str] | None = None,
    tops: TopTokens | None = None,
    **fields: Any,
) -> Path:
    """Write what `ppl-client kld --output` would: `arrays` [n] of every field of `KldPositions`, and `window_sizes`
    whose sum is n, with other `fields` of the measurement. Returns the path."""
    positions = KldPositions(**{name: arrays[name].astype(dtype) for name, dtype in POSITION_DTYPES.items()})
    measurement = KldMeasurement(
        server=server,
        model=server.model,
        reference=reference,
        concurrency=8,
        as_noise_floor=False,
        window_sizes=list(window_sizes),
        positions=positions,
        statistics=statistics(positions, window_sizes),
        most_divergent=[],
        seconds=1.0,
        token_texts=TokenTexts(texts),
        top_tokens=tops,
        **fields,
    )
    record = measurement.record(["http://localhost:8000"])
    Output(path, resume=False, force=True).write(record, measurement.arrays())
    return path


def write_runs(
    folder: Path,
    num_tokens: int,
    *,
    models: tuple[MadeUpModel, ...] = MODELS,
    vocab_size: int = 40_000,
    context_length: int = 2048,
    seed: int = 1,
) -> list[Path]:
    """Write a run of each model over the same tokens, and return the JSON files."""
    of_reference = reference_arrays(num_tokens, vocab_size, seed)
    stride = context_length // 4
    whole, rest = divmod(num_tokens, stride)
    window_sizes = [stride] * whole + [rest] * bool(rest)
    floor = NoiseFloor(
        mean=NOISE_FLOOR, p99=8 * NOISE_FLOOR, max=50 * NOISE_FLOOR, num_scored=num_tokens, created=1_795_346_521
    )
    reference = made_up_reference(window_sizes, context_length=context_length, stride=stride, noise_floor=floor)
    texts, paths = token_texts(vocab_size), []
    for index, model in enumerate(models):
        arrays = run_arrays(model, of_reference, vocab_size, seed + 1 + index)
        tops = top_tokens(arrays, vocab_size, seed)
        names = ("token_ids", "top_token_ids", "reference_top_token_ids")
        used = np.unique(np.concatenate([*(arrays[name] for name in names), tops.token_ids.ravel()]))
        path = write_kld_run(
            folder / f"{model.name}.json",
            arrays,
            window_sizes,
            server=server_of(model),
            reference=reference,
            texts={int(token): texts[int(token)] for token in used},
            tops=tops,
        )
        paths.append(path)
    return paths
