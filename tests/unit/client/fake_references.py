"""The part of the fake server that keeps references and compares with them, by real distributions.

The reference's logits at a position follow from the token before it and the position; a served model's are those and a
seeded noise. Everything is computed in float64 over the 257 tokens, so that what a client makes of it can be checked.
"""

import base64
import json
import threading
from dataclasses import dataclass, field

import httpx
import numpy as np
from fake_scoremode import BOS, INFO, answer, error, events

from scoremode.kld import POSITION_DTYPES, KldPositions, statistics
from scoremode.windows import cut_windows, resolve_stride

VOCAB_SIZE = 257
CREATED = 1_700_000_000
FINGERPRINT = "fingerprint of bytes"


def log_probabilities(tokens: list[int], position: int, noise: float) -> np.ndarray:
    """ln p(. | tokens[:position]), float64 [257], of a model that is `noise` away from the reference's."""
    before = tokens[position - 1]
    logits = 3 * np.random.default_rng([before, position]).normal(size=VOCAB_SIZE)
    logits += noise * np.random.default_rng([before, position, 1]).normal(size=VOCAB_SIZE)
    return logits - np.log(np.exp(logits).sum())


def compare(tokens: list[int], first_scored: int, noise: float) -> KldPositions:
    """The values of the targets of one window."""
    rows = [_row(tokens, position, noise) for position in range(first_scored, len(tokens))]
    return KldPositions(
        **{name: np.array([row[name] for row in rows], dtype) for name, dtype in POSITION_DTYPES.items()}
    )


def _row(tokens, position, noise):
    base, served = log_probabilities(tokens, position, 0.0), log_probabilities(tokens, position, noise)
    p, q, token = np.exp(base), np.exp(served), tokens[position]
    return {
        "token_ids": token,
        "kld": (p * (base - served)).sum(),
        "reverse_kld": (q * (served - base)).sum(),
        "acceptance": np.minimum(p, q).sum(),
        "logprobs": served[token],
        "reference_logprobs": base[token],
        "ranks": 1 + (served > served[token]).sum(),
        "reference_ranks": 1 + (base > base[token]).sum(),
        "top_token_ids": served.argmax(),
        "reference_top_token_ids": base.argmax(),
        "reference_confidence": p.max(),
    }


@dataclass
class StoredReference:
    """A reference as a server keeps it: its request, its windows as (token ids, first target), what is recorded."""

    request: dict
    windows: list[tuple[list[int], int]]
    num_tokens: int
    recorded: set[int] = field(default_factory=set)
    noise_floor: dict | None = None

    def nll(self, index: int) -> float:
        tokens, first = self.windows[index]
        return -sum(
            log_probabilities(tokens, position, 0.0)[tokens[position]] for position in range(first, len(tokens))
        )

    def num_scored(self, indices) -> int:
        return sum(len(self.windows[index][0]) - self.windows[index][1] for index in indices)

    def json(self) -> dict:
        complete = len(self.recorded) == len(self.windows)
        mean = sum(map(self.nll, range(len(self.windows)))) / self.num_scored(range(len(self.windows)))
        return {
            "object": "reference",
            "name": self.request["name"],
            "created": CREATED,
            "complete": complete,
            "model": "bytes",
            "revision": None,
            "dtype": "float32",
            "quantization": None,
            "scoremode_version": "9.9.9",
            "vllm_version": "0.32.0",
            "vocab_size": VOCAB_SIZE,
            "fingerprint": FINGERPRINT,
            "text_fingerprint": f"fingerprint of {self.request['prompt'][:9]}",
            "method": self.request["method"],
            "context_length": self.request["context_length"],
            "stride": self.request["stride"],
            "num_tokens": self.num_tokens,
            "num_windows": len(self.windows),
            "num_recorded": len(self.recorded),
            "num_scored": self.num_scored(range(len(self.windows))),
            "num_bytes": len(self.request["prompt"]),
            "num_words": 2,
            "disk_bytes": 4096,
            "perplexity": float(np.exp(mean)) if complete else None,
            "perplexity_stderr": 0.5 if complete else None,
            "nll_mean": mean if complete else None,
            "noise_floor": self.noise_floor,
        }


class KldServer:
    """Serves a model that is `noise` away from the reference's; `references` is its --reference-dir.

    It records `allowed` windows a request, and compares as many in all; then it drops the connection.
    """

    def __init__(self, references=None, *, noise=0.0, allowed=10**9, info=None):
        self.references = {} if references is None else references
        self.info = {**INFO, "fingerprint": FINGERPRINT if noise == 0 else f"noise {noise}", **(info or {})}
        self.requests = []
        self.compared = []
        self._noise = noise
        self._allowed = allowed
        self._lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response | None:
        body = json.loads(request.content) if request.content else {}
        self.requests.append((request.method, request.url.path, body))
        path = request.url.path
        if request.method == "GET" and path == "/v1/score":
            return httpx.Response(200, json=self.info)
        if path == "/v1/kld":
            return self._compare(body)
        if not path.startswith("/v1/references"):
            return answer(request)
        if request.method == "POST":
            return self._record(body)
        if path == "/v1/references":
            return httpx.Response(
                200, json={"object": "list", "data": [stored.json() for stored in self.references.values()]}
            )
        name = path.rsplit("/", 1)[1]
        if name not in self.references:
            return error(404, f"there is no reference {name!r}")
        if request.method == "DELETE":
            del self.references[name]
            return httpx.Response(200, json={"object": "reference.deleted", "name": name, "deleted": True})
        return httpx.Response(200, json=self.references[name].json())

    def _record(self, body: dict) -> httpx.Response:
        stored = _stored(body)
        known = self.references.setdefault(body["name"], stored)
        if known.request != stored.request:
            return error(409, f"the reference {body['name']!r} has other content", param="name")
        reported = []
        missing = [index for index in range(len(known.windows)) if index not in known.recorded]
        for index in missing[: self._allowed]:
            known.recorded.add(index)
            reported.append(_window_event(known, index))
        if len(missing) > self._allowed:
            return CutShort(reported)
        return httpx.Response(200, content=events(*reported, known.json()))

    def _compare(self, body: dict) -> httpx.Response | None:
        if body["reference"] not in self.references:
            return error(404, f"there is no reference {body['reference']!r}", param="reference")
        stored = self.references[body["reference"]]
        first, last = body.get("windows") or [0, len(stored.windows)]
        with self._lock:
            if last - first > self._allowed:
                return None
            self._allowed -= last - first
            self.compared += range(first, last)
        windows = {index: compare(*stored.windows[index], self._noise) for index in range(first, last)}
        sizes = [len(values) for values in windows.values()]
        figures = statistics(KldPositions.concatenate(list(windows.values())), sizes, first)
        result = {
            "id": "kld-1",
            "object": "kld",
            "created": 0,
            "model": "bytes",
            "reference": body["reference"],
            "fingerprint": self.info["fingerprint"],
            "windows": [first, last],
            "num_scored": sum(sizes),
            "statistics": figures,
            "usage": {"prompt_tokens": 0, "cached_tokens": 0, "total_tokens": 0},
        }
        if body["as_noise_floor"]:
            if self.info["fingerprint"] != FINGERPRINT:
                return error(400, "the served model is not the reference's", param="as_noise_floor")
            kld = figures["kld"]
            stored.noise_floor = {
                **{name: kld[name] for name in ("mean", "p99", "max")},
                "num_scored": sum(sizes),
                "created": CREATED + 1,
            }
        data = [_kld_window(index, values, body["top_logprobs"]) for index, values in windows.items()]
        if body["stream"]:
            # In another order, as windows end.
            return httpx.Response(200, content=events(*reversed(data), result))
        return httpx.Response(200, json={**result, "data": data})


def _stored(body: dict) -> StoredReference:
    tokens = [BOS, *body["prompt"].encode()][: body.get("max_tokens")]
    method, length = body["method"], body.get("context_length") or 64
    stride = resolve_stride(method, length, body.get("stride"))
    windows = cut_windows(len(tokens), method, length, stride, prefix_token_id=BOS, bos_token_id=BOS)
    request = {**body, "method": method, "context_length": length, "stride": stride, "model": "bytes"}
    cut = [(window.token_ids(tokens), window.first_scored) for window in windows]
    return StoredReference(request, cut, len(tokens))


def _window_event(stored: StoredReference, index: int) -> dict:
    total = stored.num_scored(stored.recorded)
    return {
        "object": "perplexity.window",
        "index": index,
        "num_windows": len(stored.windows),
        "num_scored": stored.num_scored([index]),
        "nll_sum": stored.nll(index),
        "total_scored": total,
        "perplexity": float(np.exp(sum(map(stored.nll, stored.recorded)) / total)),
    }


class CutShort(httpx.Response):
    """A stream whose connection is lost after these events."""

    def __init__(self, reported: list[dict]) -> None:
        self.stream_chunks = [events(event).removesuffix(b"data: [DONE]\n\n") for event in reported]
        super().__init__(200, stream=_LostStream(self.stream_chunks))


class _LostStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    def __iter__(self):
        yield from self._chunks
        raise httpx.ReadError("connection lost")

    async def __aiter__(self):
        for chunk in self:
            yield chunk


def encoded(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def _kld_window(index: int, values: KldPositions, num_top: int) -> dict:
    window = {
        "object": "kld.window",
        "index": index,
        "num_scored": len(values),
        **{name: encoded(getattr(values, name), dtype) for name, dtype in POSITION_DTYPES.items()},
    }
    if num_top:
        # Made up: position i has the tokens i, i + 1, ...
        ids = np.arange(len(values))[:, None] + np.arange(num_top)
        top = {"shape": list(ids.shape), "token_ids": encoded(ids, "<i4"), "logprobs": encoded(-ids / 8, "<f4")}
        window |= {"top_logprobs": top, "reference_top_logprobs": {**top, "logprobs": encoded(-ids / 4, "<f4")}}
    return window
