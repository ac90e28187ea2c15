"""A Scoremode server without a model: in the process of a test, on a socket, or as a command in its own process.

Tokens are the bytes of a text after a BOS (256). The logprob of a token depends on the token, on the one before it and
on its position, so that a window cut in the wrong place gives another figure; all are multiples of 1/8, which float32
holds exactly. Statistics depend on the token before and on the position. References and comparisons are computed from
whole distributions over the 257 tokens, in float64.
"""

import argparse
import base64
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np

from scoremode import AsyncScoreClient, Recording, record_reference
from scoremode.kld import POSITION_DTYPES, KldPositions, statistics
from scoremode.runs import Corpus
from scoremode.windows import cut_windows, resolve_stride

BOS, MAX_MODEL_LEN, VOCAB_SIZE = 256, 64, 257
MODEL = {
    "model": "bytes",
    "dtype": "float32",
    "quantization": None,
    "vocab_size": VOCAB_SIZE,
    "scoremode_version": "9.9.9",
    "vllm_version": "0.32.0",
}
INFO = {
    "object": "score.info",
    **MODEL,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "adds_bos": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_top_logprobs": 20,
}
FINGERPRINT = "fingerprint of bytes"
MODULES = [f"model.layers.{index}.{name}" for index in (0, 1) for name in ("self_attn", "mlp")]
LAYERS = {
    "layer_class": "ByteLayer",
    "hidden_size": 8,
    "blocks": [{"modules": [name], "kind": "mlp" if "mlp" in name else "attention"} for name in MODULES],
}
FLOOR = [0.0, 0.0, 0.0, 1e-4, 1e-4]
REST_OF_NOISE = [1.0, 0.9, 0.8, 0.3, 0.3, 0.1]
"""The share of its noise that the whole model has, and that is left from each boundary on."""
ROUTES = {"layers": ["model.layers.0.mlp", "model.layers.1.mlp"], "num_experts": 4, "top_k": 2}
REST_IF_FORCED = 0.5
"""The share of its noise that a model has with the reference's experts."""
TEXT = "The quick brown fox jumps over the lazy dog"
QUESTION = {"role": "user", "content": "Who?"}
USAGE = {"prompt_tokens": 0, "cached_tokens": 0, "total_tokens": 0}
Handler = Callable[[httpx.Request], httpx.Response | None]
OWN_NOISE, DECODE_NOISE = "STAND_IN_NOISE", "STAND_IN_DECODE_NOISE"
"""Variables of the command: its noise, and that in the decode lane alone."""
ALLOWED = "STAND_IN_ALLOWED"
"""Variable of the command: a file with the number of windows that it compares before its process ends."""


def logprob(tokens: list[int], position: int) -> float:
    """log p(tokens[position] | tokens[:position]), in nats."""
    return -(1 + (3 * tokens[position] + 5 * tokens[position - 1] + position) % 29) / 8


def statistics_at(tokens: list[int], position: int) -> dict[str, float]:
    """The entropy and the standard deviation at a position, in nats; every fifth deviation is 0."""
    before = tokens[position - 1]
    return {"entropy": (2 * before + position) % 13 / 8, "std_logprob": (before + 3 * position) % 5 / 4}


def rank(tokens: list[int], position: int) -> int:
    """A made-up rank, one per logprob."""
    return round(-8 * logprob(tokens, position))


def token_text(token: int) -> str:
    return "<s>" if token == BOS else chr(token)


def rolling_targets(text: str, context_length: int = MAX_MODEL_LEN - 1) -> list[tuple[list[int], int]]:
    """The window and the position in it of every byte, in lm-eval's `rolling` windows, written a second time."""
    tokens, targets = list(text.encode()), []
    for start in range(0, len(tokens), context_length):
        end = min(start + context_length, len(tokens))
        # A later window has the token before its first target, and the last one reaches back until it is full.
        context = [BOS] if start == 0 else tokens[end - context_length - 1 : start]
        window = [*context, *tokens[start:end]]
        targets += [(window, position) for position in range(len(context), len(window))]
    return targets


def nlls(text: str, context_length: int = MAX_MODEL_LEN - 1) -> list[float]:
    """NLL of every byte, in nats, in these windows."""
    return [-logprob(*target) for target in rolling_targets(text, context_length)]


def log_probabilities(tokens: list[int], first: int, noise: float) -> np.ndarray:
    """ln p(. | tokens[:position]) from `first` on, float64 [n, 257], of a model `noise` away from the reference's."""
    logits = []
    for position in range(first, len(tokens)):
        seed = [tokens[position - 1], position]
        logits.append(3 * np.random.default_rng(seed).normal(size=VOCAB_SIZE))
        logits[-1] += noise * np.random.default_rng([*seed, 1]).normal(size=VOCAB_SIZE)
    return np.array(logits) - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def compare(tokens: list[int], first: int, noise: float) -> KldPositions:
    """The values of the targets of one window."""
    base, served = log_probabilities(tokens, first, 0.0), log_probabilities(tokens, first, noise)
    p, q, targets = np.exp(base), np.exp(served), (np.arange(len(tokens) - first), np.array(tokens[first:]))
    values = {
        "token_ids": targets[1],
        "kld": (p * (base - served)).sum(axis=1),
        "reverse_kld": (q * (served - base)).sum(axis=1),
        "acceptance": np.minimum(p, q).sum(axis=1),
        "logprobs": served[targets],
        "reference_logprobs": base[targets],
        "ranks": 1 + (served > served[targets][:, None]).sum(axis=1),
        "reference_ranks": 1 + (base > base[targets][:, None]).sum(axis=1),
        "top_token_ids": served.argmax(axis=1),
        "reference_top_token_ids": base.argmax(axis=1),
        "reference_confidence": p.max(axis=1),
    }
    return KldPositions(**{name: values[name].astype(dtype) for name, dtype in POSITION_DTYPES.items()})


def differing_routes(tokens: list[int], first: int, is_forced: bool) -> np.ndarray:
    """For each layer and target, [2, n], whether other experts are chosen; one of two then differs, never the first."""
    ids = np.array(tokens[first:])
    return np.array([ids % 7 == 0, ids < 0] if is_forced else [ids % 3 == 0, ids % 2 == 0])


def route_counts(tokens: list[int], first: int, is_forced: bool) -> dict:
    differing = differing_routes(tokens, first, is_forced)
    return {
        "same_set": (~differing).sum(axis=1).tolist(),
        "same_first": [differing.shape[1]] * 2,
        "shared": (2 - differing).sum(axis=1).tolist(),
        "differing_layers": encoded(differing.sum(axis=0), "<i4"),
    }


@cache
def reference_nlls(tokens: tuple[int, ...], first: int) -> list[float]:
    return [-float(value) for value in compare([*tokens], first, 0.0).reference_logprobs]


def ok(content: object) -> httpx.Response:
    return httpx.Response(200, json=content)


def error(status: int, message: str, **fields: object) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": status, **fields}})


def events(*objects: dict) -> bytes:
    """Server-sent events, one per object, and the mark of the end."""
    return b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in objects) + b"data: [DONE]\n\n"


class Chunks(httpx.Response, httpx.SyncByteStream, httpx.AsyncByteStream):
    """An answer for both clients, in chunks; the bytes that are sent are counted."""

    def __init__(self, chunks: Iterable[bytes], status: int = 200, **headers: str) -> None:
        super().__init__(status, headers=headers, stream=self)
        self.chunks, self.num_sent = chunks, 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            self.num_sent += len(chunk)
            yield chunk

    async def __aiter__(self):
        for chunk in self:
            yield chunk


class CutShort(Chunks):
    """A stream whose connection is lost after these events, or after other content."""

    def __init__(self, reported: list[dict], start: bytes | None = None) -> None:
        self.start = start or b": the stream begins\n\n" + events(*reported).removesuffix(b"data: [DONE]\n\n")
        super().__init__(self._lost())

    def _lost(self) -> Iterator[bytes]:
        yield self.start
        raise httpx.ReadError("connection lost")


def window_event(index: int, num_windows: int, nlls: list[float], **so_far: float) -> dict:
    return {
        "object": "perplexity.window",
        "index": index,
        "num_windows": num_windows,
        "num_scored": len(nlls),
        "nll_sum": sum(nlls),
        **so_far,
    }


def result_event(**figures: object) -> dict:
    """A `PerplexityResponse`, made up but for the given figures."""
    return {
        "id": "ppl-1",
        "object": "perplexity",
        "created": 0,
        "model": "bytes",
        "usage": USAGE,
        "method": "sliding",
        "context_length": 4,
        "stride": 1,
        "num_windows": 2,
        "num_tokens": 11,
        "num_scored": 10,
        "num_bytes": 10,
        "num_words": 3,
        "perplexity": 7.5,
        "perplexity_stderr": 0.5,
        "bits_per_byte": 1.25,
        "word_perplexity": 99.0,
        "nll_sum": 20.0,
        "nll_mean": 2.0,
        "nll_stderr": 0.1,
        **figures,
    }


def encoded(values: object, dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def score_response(
    sequences: list[list[int]], return_ranks: bool = False, num_context: int = 0, wanted: Collection[str] = ()
) -> dict:
    """The answer to `/v1/score` with `encoding_format: base64`, for prompts or, after some context, continuations."""
    results = []
    for index, tokens in enumerate(sequences):
        logprobs = [float("nan"), *(logprob(tokens, position) for position in range(1, len(tokens)))]
        ranks = [None, *(rank(tokens, position) for position in range(1, len(tokens)))]
        result = {
            "index": index,
            "prompt_index": 0 if num_context else index,
            "continuation_index": index if num_context else None,
            "sum_logprob": sum(logprobs[1:]),
            "num_scored": len(tokens) - 1,
            "token_ids": tokens[num_context:],
            "logprobs": encoded(logprobs[num_context:], "<f4"),
        }
        if return_ranks:
            result["ranks"] = ranks[num_context:]
        if wanted:
            result["columns"] = {name: _column(tokens, name, num_context) for name in wanted}
        results.append(result)
    return {"id": "score-1", "object": "score", "created": 0, "model": "bytes", "data": results, "usage": USAGE}


def _column(tokens: list[int], name: str, first: int) -> dict:
    values = [float("nan"), *(statistics_at(tokens, position)[name] for position in range(1, len(tokens)))]
    return {"dtype": "float32", "shape": [len(tokens) - first], "values": encoded(values[first:], "<f4")}


class StoredReference:
    """A reference as a server keeps it: its request, its windows as (token ids, first target), what is recorded."""

    def __init__(self, body: dict) -> None:
        texts = body.get("texts") or [body["prompt"]]
        self.text = "".join(texts)
        method, length = body["method"], body.get("context_length") or MAX_MODEL_LEN
        stride = resolve_stride(method, length, body.get("stride"))
        self.request = {**body, "context_length": length, "stride": stride, "model": "bytes"}
        self.num_tokens = 0
        self.windows: list[tuple[list[int], int]] = []
        self.documents: list[int] = []
        for index, text in enumerate(texts):
            tokens = [BOS, *text.encode()][: body.get("max_tokens")]
            windows = cut_windows(len(tokens), method, length, stride, prefix_token_id=BOS, bos_token_id=BOS)
            self.windows += [(window.token_ids(tokens), window.first_scored) for window in windows]
            self.documents += [index] * len(windows)
            self.num_tokens += len(tokens)
        self.recorded: set[int] = set()
        self.noise_floor: dict | None = None

    def nlls(self, indices: Iterable[int]) -> list[float]:
        windows = (self.windows[index] for index in indices)
        return [value for tokens, first in windows for value in reference_nlls(tuple(tokens), first)]

    def event(self, index: int) -> dict:
        so_far = self.nlls(self.recorded)
        return window_event(
            index,
            len(self.windows),
            self.nlls([index]),
            total_scored=len(so_far),
            perplexity=float(np.exp(np.mean(so_far))),
        )

    def json(self) -> dict:
        nlls, is_complete = self.nlls(range(len(self.windows))), len(self.recorded) == len(self.windows)
        mean = float(np.mean(nlls)) if is_complete else None
        return {
            "object": "reference",
            **{name: self.request[name] for name in ("name", "method", "context_length", "stride")},
            **MODEL,
            "revision": None,
            "fingerprint": FINGERPRINT,
            "created": 1_700_000_000,
            "num_windows": len(self.windows),
            "num_recorded": len(self.recorded),
            "complete": is_complete,
            "num_tokens": self.num_tokens,
            "num_scored": len(nlls),
            "num_words": 2,
            "disk_bytes": 4096,
            "num_bytes": len(self.text),
            "text_fingerprint": f"fingerprint of {self.text[:9]}",
            "corpus": self.request.get("corpus"),
            "perplexity": None if mean is None else float(np.exp(mean)),
            "perplexity_stderr": 0.5,
            "nll_mean": mean,
            "noise_floor": self.noise_floor,
            "layers": {**LAYERS, "floor": FLOOR} if self.request.get("layers") else None,
            "routes": ROUTES if self.request.get("routes") else None,
        }

    def origins(self) -> dict:
        labels = self.request.get("labels")
        return {
            "name": self.request["name"],
            "text_fingerprint": self.json()["text_fingerprint"],
            "num_context": [first for _, first in self.windows],
            "documents": self.documents,
            "labels": labels and [labels[index] for index in self.documents],
            "roles": None,
        }


@dataclass(eq=False)
class FakeServer:
    """Answers as a Scoremode server does, and keeps the requests."""

    stored_class = StoredReference
    references: dict[str, StoredReference] = field(default_factory=dict)
    noise: float = 0.0
    """How far its model is away from the reference's."""
    allowed: int = 10**9
    """Windows that it records per request, and scores or compares in all, before it drops the connection."""
    info: dict = field(default_factory=dict)
    """INFO; changes to it where the server is made."""
    served_layers: dict = field(default_factory=dict)
    """Changes to LAYERS for those of the served model."""
    refused: Collection[str] = ()
    """Texts that it does not score."""
    requests: list[tuple[str, str, dict]] = field(default_factory=list)
    """Method, path and body of each."""
    keys: list[str | None] = field(default_factory=list)
    """The `Authorization` of each request."""
    score_requests: list[dict] = field(default_factory=list)
    compared: list[int] = field(default_factory=list)
    """Windows."""
    num_scored: int = 0
    """Sequences."""

    def __post_init__(self) -> None:
        self.info = {**INFO, "fingerprint": f"noise {self.noise}" if self.noise else FINGERPRINT, **self.info}
        self.lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response | None:
        body = json.loads(request.content) if request.content else {}
        self.requests.append((request.method, request.url.path, body))
        self.keys.append(request.headers.get("authorization"))
        match request.method, request.url.path:
            case "GET", "/v1/score":
                return ok(self.info)
            case "POST", "/v1/score":
                self.score_requests.append(body)
                return self.score(body)
            case "POST", "/tokenize":
                tokens = [BOS] * body["add_special_tokens"] + list(body["prompt"].encode())
                return error(400, "broken") if body["prompt"] in self.refused else ok({"tokens": tokens})
            case "POST", "/detokenize":
                return ok({"prompt": "".join(map(token_text, body["tokens"]))})
            case "POST", "/v1/tokens":
                return ok({"object": "tokens", "tokens": [*map(token_text, body["token_ids"])]})
            case "POST", "/v1/references":
                return self.record(body)
            case "GET", "/v1/layers":
                return ok({"object": "layers", **LAYERS, **self.served_layers, "free_bytes": 10**9})
            case "POST", "/v1/kld":
                return self.compare(body)
            case "GET", "/v1/references":
                return ok({"object": "list", "data": [stored.json() for stored in self.references.values()]})
        folder, name = request.url.path.removesuffix("/windows").rsplit("/", 1)
        if folder != "/v1/references" or name not in self.references:
            return error(404, f"there is no reference {name!r}" if folder == "/v1/references" else "Not Found")
        if request.url.path.endswith("/windows"):
            return ok(self.references[name].origins())
        if request.method == "GET":
            return ok(self.references[name].json())
        del self.references[name]
        return ok({"object": "reference.deleted", "name": name, "deleted": True})

    def score(self, body: dict) -> httpx.Response | None:
        texts = body.get("continuations")
        sequences = body["prompt"] if texts is None else [[*body["prompt"][0], *text.encode()] for text in texts]
        if any(text in self.refused for text in texts or ()):
            return error(400, "broken", param="continuations")
        if max(map(len, sequences), default=0) > MAX_MODEL_LEN:
            return error(400, f"more tokens than the {MAX_MODEL_LEN} that the model takes")
        with self.lock:
            if self.num_scored + len(sequences) > self.allowed:
                return None
            self.num_scored += len(sequences)
        num_context = body.get("logprobs_from") or 0 if texts is None else len(body["prompt"][0])
        return ok(score_response(sequences, body.get("return_ranks", False), num_context, body.get("statistics", ())))

    def record(self, body: dict) -> httpx.Response:
        stored = self.references.setdefault(body["name"], self.stored_class(body))
        reported = []
        missing = [index for index in range(len(stored.windows)) if index not in stored.recorded]
        for index in missing[: self.allowed]:
            stored.recorded.add(index)
            reported.append(stored.event(index))
        is_cut = len(missing) > self.allowed
        return CutShort(reported) if is_cut else httpx.Response(200, content=events(*reported, stored.json()))

    def compare(self, body: dict) -> httpx.Response | None:
        stored = self.references[body["reference"]]
        first, last = body.get("windows") or [0, len(stored.windows)]
        with self.lock:
            if last - first > self.allowed:
                return None
            self.allowed -= last - first
            self.compared += range(first, last)
        boundary = body.get("from_boundary")
        noise = self.noise * REST_OF_NOISE[0 if boundary is None else 1 + boundary]
        if (routes := body.get("routes")) == "forced":
            noise *= REST_IF_FORCED
        windows = [compare(*window, noise) for window in stored.windows[first:last]]
        sizes = [len(window) for window in windows]
        figures = statistics(KldPositions.concatenate(windows), sizes, first)
        if body["as_noise_floor"]:
            if self.noise:
                return error(400, "the served model is not the reference's", param="as_noise_floor")
            kld = {name: figures["kld"][name] for name in ("mean", "p99", "max")}
            stored.noise_floor = {**kld, "num_scored": sum(sizes), "created": 1_700_000_001}
        data = [_kld_window(index, window, body["top_logprobs"]) for index, window in enumerate(windows, start=first)]
        for index in range(first, last) if routes else ():
            data[index - first]["routes"] = route_counts(*stored.windows[index], routes == "forced")
        result = {
            "id": "kld-1",
            "object": "kld",
            "created": 0,
            "model": "bytes",
            "usage": USAGE,
            "reference": body["reference"],
            "fingerprint": self.info["fingerprint"],
            "windows": [first, last],
            "num_scored": sum(sizes),
            "statistics": figures,
        }
        # A stream has windows in the order in which they end, here another.
        return httpx.Response(200, content=events(*reversed(data), result))


class StoredAnswers(StoredReference):
    def __init__(self, body: dict) -> None:
        super().__init__({"prompt": "answers", "method": "disjoint", "name": body["name"]})
        data = body["answers"]["data"]
        self.request = {**body, "method": "conversation", "context_length": MAX_MODEL_LEN, "stride": MAX_MODEL_LEN}
        tokens = [(answer["prompt_token_ids"], answer["token_ids"]) for answer in data]
        self.windows = [(prompt + answer, len(prompt)) for prompt, answer in tokens if answer]
        self.documents = [row for row, (_, answer) in enumerate(tokens) if answer]
        self.described: dict = {}
        """More fields."""

    def json(self) -> dict:
        answers = self.request["answers"]
        return {**super().json(), "answers": {**answers, "num_answers": len(answers["data"])}, **self.described}

    def origins(self) -> dict:
        return {**super().origins(), "documents": self.documents, "roles": ["assistant"] * len(self.windows)}


class AnsweringServer(FakeServer):
    """Answers with the three bytes after the last one of the prompt; also drops connections after `allowed` answers."""

    stored_class = staticmethod(lambda body: (StoredAnswers if body.get("answers") else StoredReference)(body))
    finish_reason = "stop"
    text = "text"

    def __call__(self, request):
        body = json.loads(request.content) if request.content else {}
        if request.url.path == "/v1/completions":
            self.requests.append((request.method, request.url.path, body))
            self.allowed -= 1
            ids = [] if body["prompt"][-1] == ord("-") else [body["prompt"][-1] + step for step in (1, 2, 3)]
            choice = {"token_ids": ids, "text": self.text, "finish_reason": self.finish_reason}
            return ok({"choices": [choice]}) if self.allowed >= 0 else None
        if request.url.path == "/v1/turns":
            self.requests.append((request.method, request.url.path, body))
            if "tool_calls" in body["messages"][-1]:
                return error(400, "messages[0][1].tool_calls[0] must be a call of a function", param="messages")
            return ok({"object": "turns", "data": [{"conversation": 0, "token_ids": [1, 2], "turns": []}]})
        if request.url.path == "/tokenize" and "messages" in body:
            return ok({"tokens": [1, 2]}) if body["messages"] == [QUESTION] else error(400, "broken")
        return super().__call__(request)

    def sent(self, route: str) -> list[dict]:
        """The bodies of requests to a route."""
        return [body for _, path, body in self.requests if path == route]

    @property
    def asked(self) -> list[dict]:
        """The requests for answers."""
        return self.sent("/v1/completions")


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


class Outcomes:
    """Plays one outcome after the other, answers or exceptions; the last one again and again. Keeps the requests."""

    def __init__(self, *outcomes: httpx.Response | httpx.RequestError) -> None:
        self.outcomes = outcomes
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        outcome = self.outcomes[min(len(self.requests), len(self.outcomes) - 1)]
        self.requests.append(request)
        if isinstance(outcome, httpx.RequestError):
            outcome.request = request
            raise outcome
        # httpx binds a response to the request that it answered. A stream is not copied.
        if isinstance(outcome.stream, httpx.ByteStream):
            return httpx.Response(outcome.status_code, headers=outcome.headers, content=outcome.content)
        return outcome


def changed(server: Handler, path: str, change: Callable[[dict], object]) -> Handler:
    """`server`, where `change` is applied to the JSON that it answers at `path`, or to each event; not to its info."""

    def handler(request: httpx.Request) -> httpx.Response | None:
        response = server(request)
        if request.url.path != path or (request.method, path) == ("GET", "/v1/score"):
            return response
        *items, _ = response.content.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")
        contents = [json.loads(item.removeprefix(b"data: ")) for item in items or [response.content]]
        for content in contents:
            change(content)
        return httpx.Response(200, content=events(*contents)) if items else ok(contents[0])

    return handler


def client_of(server: Handler, name: str = "fake", **settings: object) -> AsyncScoreClient:
    """A client that does not retry. Where the server answers None its connection is refused."""

    def handler(request: httpx.Request) -> httpx.Response:
        response = server(request)
        if response is None:
            raise httpx.ConnectError("refused")
        return response

    settings = {"max_retries": 0, **settings}
    return AsyncScoreClient(f"http://{name}", transport=httpx.MockTransport(handler), **settings)


async def record(server: Handler, **settings: object) -> Recording:
    """Record `TEXT` as `base`."""
    async with client_of(server) as client:
        settings = {"method": "disjoint", "context_length": 8, **settings}
        return await record_reference(client, Corpus("fox", TEXT, "made up", 1), "base", **settings)


NOISE = 0.5
"""How far the model of such a server is away from the reference's."""


async def with_reference(**settings: object) -> FakeServer:
    """A server of another model than the one that has recorded `TEXT` as `base`."""
    recording = FakeServer()
    await record(recording, **settings)
    return FakeServer(recording.references, noise=NOISE)


def clients_of(servers: Iterable[Handler]) -> list[AsyncScoreClient]:
    """Clients of several servers, by the names a, b, c."""
    return [client_of(server, name) for server, name in zip(servers, "abc", strict=False)]


class _HTTPServer(ThreadingHTTPServer):
    # socketserver's queue of 5 overflows where a test connects many times at once: the kernel drops the rest, and
    # they connect again after 1, 3, 7, 15 seconds, and so on.
    request_queue_size = 1024

    def handle_error(self, *arguments: object) -> None:
        # Clients that are killed close their connections.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*arguments)


@contextmanager
def serve(handler: Handler, port: int = 0) -> Iterator[str]:
    """Serve `handler` on a real socket; gives the server's address. Where it answers None the connection is dropped."""

    class Adapter(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = f"http://fake{self.path}"
            response = handler(httpx.Request(self.command, url, headers=dict(self.headers), content=content))
            if response is not None:
                self.send_response(response.status_code)
                self.send_header("Content-Length", str(len(response.content)))
                self.end_headers()
                self.wfile.write(response.content)

        do_GET = do_POST = do_DELETE = _handle  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = _HTTPServer(("127.0.0.1", port), Adapter)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class StandIn(AnsweringServer):
    """The server of the command: keeps references in files, logs every request, and ends at a window that it may not
    compare, when the answers to those before it have been read."""

    def __init__(self, model: str, files: Path) -> None:
        noise = float(os.environ.get(OWN_NOISE, model.partition("=")[2] or 0))
        super().__init__(noise=noise, info={"max_num_seqs": 1})
        allowed = Path(os.environ.get(ALLOWED, "none"))
        if allowed.is_file():
            self.allowed = int(allowed.read_text())
        self.files = files

    def __call__(self, request: httpx.Request) -> httpx.Response | None:
        # In one piece: requests are answered in threads, whose pieces of lines would mix.
        sys.stdout.write(f"{request.method} {request.url.path}\n")
        sys.stdout.flush()
        if request.url.path == "/health":
            return httpx.Response(200)
        # Another server may have recorded one since.
        for path in self.files.glob("*/stored"):
            if path.parent.name not in self.references:
                self.references[path.parent.name] = pickle.loads(path.read_bytes())
        response = super().__call__(request)
        if request.url.path == "/v1/references" or b'"as_noise_floor":true' in request.content:
            for name, stored in self.references.items():
                (self.files / name).mkdir(exist_ok=True)
                (self.files / name / "stored").write_bytes(pickle.dumps(stored))
                (self.files / name / "manifest.json").write_text('{"result": {}}')
        return response

    def compare(self, body: dict) -> httpx.Response:
        if (noise := os.environ.get(DECODE_NOISE)) is not None:
            self.noise = float(noise) if body.get("lane") == "decode" else 0.0
        response = super().compare(body)
        if response is None:
            os._exit(7)
        return response


def main() -> None:
    """Stand in for `scoremode serve MODEL`: `noise=0.5` is that far from the reference's, `broken` does not start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--reference-dir", type=Path)
    options, _ = parser.parse_known_args()
    if options.model == "broken":
        sys.exit("out of memory, as always")
    with serve(StandIn(options.model, options.reference_dir), options.port):
        threading.Event().wait()


if __name__ == "__main__":
    # A test that imports this module can load the references that the command stores.
    import fake_server

    fake_server.main()
