"""A Scoremode server without a model: a made-up language whose log-probabilities can be worked out by hand.

Tokens are the bytes of the text, with a BOS (256) before it. The logprob of a token depends on the token, on the one
before it and on how many stand before it, so that a window cut in the wrong place gives another figure. All values
are multiples of 1/8, which float32 holds exactly.
"""

import base64
import json
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

BOS = 256
MAX_MODEL_LEN = 64

INFO = {
    "object": "score.info",
    "scoremode_version": "9.9.9",
    "vllm_version": "0.32.0",
    "model": "bytes",
    "max_model_len": MAX_MODEL_LEN,
    "vocab_size": 257,
    "max_top_logprobs": 20,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "adds_bos": True,
    "dtype": "float32",
    "quantization": None,
}

Handler = Callable[[httpx.Request], httpx.Response | None]
"""Answers a request; a handler of `serve` may give None to drop the connection instead."""


def logprob(tokens: list[int], position: int) -> float:
    """log p(tokens[position] | tokens[:position]), in nats."""
    return -(1 + (3 * tokens[position] + 5 * tokens[position - 1] + position) % 29) / 8


def error(status: int, message: str, **fields) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": status, **fields}})


def copy_of(response: httpx.Response) -> httpx.Response:
    """The same answer anew: httpx binds a response to the request that it answered. A stream is not copied."""
    if isinstance(response.stream, httpx.ByteStream):
        return httpx.Response(response.status_code, headers=response.headers, content=response.content)
    return response


def token_text(token: int) -> str:
    """Of one token."""
    return "<s>" if token == BOS else chr(token)


def rank(tokens: list[int], position: int) -> int:
    """Of tokens[position]; made up, as if each rank stood for one logprob."""
    return round(-8 * logprob(tokens, position))


def score_response(sequences: list[list[int]], return_ranks: bool = False) -> dict:
    """The answer to `/v1/score` with `encoding_format: base64`, for prompts given as token ids."""
    results = []
    for index, tokens in enumerate(sequences):
        values = [float("nan"), *(logprob(tokens, position) for position in range(1, len(tokens)))]
        results.append(
            {
                "index": index,
                "prompt_index": index,
                "continuation_index": None,
                "token_ids": tokens,
                "logprobs": base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode(),
                "sum_logprob": sum(values[1:]),
                "num_scored": len(tokens) - 1,
            }
        )
        if return_ranks:
            results[-1]["ranks"] = [None, *(rank(tokens, position) for position in range(1, len(tokens)))]
    usage = {"prompt_tokens": 0, "cached_tokens": 0, "total_tokens": 0}
    return {"id": "score-1", "object": "score", "created": 0, "model": "bytes", "data": results, "usage": usage}


def answer(request: httpx.Request) -> httpx.Response:
    """What the server answers to everything but `/v1/perplexity`."""
    body = json.loads(request.content) if request.content else {}
    match (request.method, request.url.path):
        case ("GET", "/v1/score"):
            return httpx.Response(200, json=INFO)
        case ("POST", "/v1/score"):
            return httpx.Response(200, json=score_response(body["prompt"], body["return_ranks"]))
        case ("POST", "/tokenize"):
            tokens = [BOS] * body["add_special_tokens"] + list(body["prompt"].encode())
            return httpx.Response(200, json={"tokens": tokens, "count": len(tokens), "max_model_len": MAX_MODEL_LEN})
        case ("POST", "/detokenize"):
            text = "".join(map(token_text, body["tokens"]))
            return httpx.Response(200, json={"prompt": text})
        case ("POST", "/v1/tokens"):
            return httpx.Response(200, json={"object": "tokens", "tokens": [*map(token_text, body["token_ids"])]})
    return error(404, "Not Found")


def events(*objects: dict) -> bytes:
    """Server-sent events, one an object, and the mark of the end."""
    return b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in objects) + b"data: [DONE]\n\n"


def window_event(index: int, num_windows: int, nlls: list[float], **so_far) -> dict:
    return {
        "object": "perplexity.window",
        "index": index,
        "num_windows": num_windows,
        "num_scored": len(nlls),
        "nll_sum": sum(nlls),
        **so_far,
    }


def result_event(**figures) -> dict:
    """A `PerplexityResponse`; made-up where a test does not say."""
    return {
        "id": "ppl-1",
        "object": "perplexity",
        "created": 0,
        "model": "bytes",
        "method": "sliding",
        "context_length": 4,
        "stride": 1,
        "perplexity": 7.5,
        "perplexity_stderr": 0.5,
        "nll_sum": 20.0,
        "nll_mean": 2.0,
        "nll_stderr": 0.1,
        "bits_per_byte": 1.25,
        "word_perplexity": 99.0,
        "num_tokens": 11,
        "num_scored": 10,
        "num_windows": 2,
        "num_bytes": 10,
        "num_words": 3,
        "usage": {"prompt_tokens": 11, "cached_tokens": 0, "total_tokens": 11},
        **figures,
    }


class _HTTPServer(ThreadingHTTPServer):
    # socketserver's queue of 5 overflows where a test connects many times at once: the kernel drops the rest, and
    # they connect again after 1, 3, 7, 15 seconds, and so on.
    request_queue_size = 1024

    def handle_error(self, *arguments) -> None:
        # Clients that are killed close their connections.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*arguments)


@contextmanager
def serve(handler: Handler, port: int = 0) -> Iterator[str]:
    """Serve `handler` on a real socket, of a free port unless one is given; gives the server's address."""

    class Adapter(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            request = httpx.Request(
                self.command, f"http://fake{self.path}", headers=dict(self.headers), content=self.rfile.read(length)
            )
            response = handler(request)
            if response is None:
                return
            self.send_response(response.status_code)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        do_GET = do_POST = do_DELETE = _handle  # noqa: N815

        def log_message(self, *_) -> None:
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
