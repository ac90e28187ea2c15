"""A command that stands in for `scoremode serve MODEL`, without an engine: the fake server in a process of its own.

MODEL says what it does: `noise=0.5` is so far away from the reference's model, `broken` does not start, and `foreign`
has another tokenizer. References are kept in --reference-dir. The log has every request.
"""

import argparse
import os
import pickle
import sys
import time
from pathlib import Path
from threading import Condition

import httpx

sys.path.append(str(Path(__file__).parents[1]))

from fake_references import KldServer
from fake_scoremode import copy_of, error, serve

from scoremode.pool import DEFAULT_CONCURRENCY

ALLOWED = "STAND_IN_ALLOWED"
"""Variable: a file that says how many windows are compared until the process ends; without it, all are."""


class StandIn:
    """Answers as `KldServer`, and keeps references in files."""

    def __init__(self, model: str, references: Path | None) -> None:
        noise = float(model.partition("=")[2] or 0)
        known = {} if references is None else {path.parent.name: _read(path) for path in references.glob("*/stored")}
        self._model = model
        self._files = references
        self._server = KldServer(known, noise=noise)
        allowed = Path(os.environ.get(ALLOWED, "none"))
        self._allowed = int(allowed.read_text()) if allowed.is_file() else 10**9
        self._num_asked = 0
        self._another_asks = Condition()

    def __call__(self, request: httpx.Request) -> httpx.Response | None:
        path = request.url.path
        if path == "/health":
            return httpx.Response(200)
        # In one piece: requests are answered in threads, whose pieces of lines would mix.
        sys.stdout.write(f"{request.method} {path}\n")
        sys.stdout.flush()
        if path == "/v1/kld" and self._model == "foreign":
            return copy_of(error(400, "the tokenizers differ", param="reference"))
        if path.startswith("/v1/references") and self._files is None:
            return copy_of(error(404, "this server keeps no references: start it with --reference-dir DIR"))
        if path == "/v1/kld":
            self._end_if_no_more_is_allowed()
        response = self._server(request)
        if self._files is not None and (path == "/v1/references" or b'"as_noise_floor":true' in request.content):
            for name, stored in self._server.references.items():
                (self._files / name).mkdir(exist_ok=True)
                (self._files / name / "stored").write_bytes(pickle.dumps(stored))
                (self._files / name / "manifest.json").write_text('{"result": {}}')
        return response

    def _end_if_no_more_is_allowed(self) -> None:
        with self._another_asks:
            self._num_asked += 1
            self._another_asks.notify_all()
            if self._num_asked > self._allowed:
                # Who asks for one more than are in flight at once has kept an answer.
                self._another_asks.wait_for(lambda: self._num_asked > DEFAULT_CONCURRENCY)
                print("no more windows are allowed", flush=True)
                os._exit(7)


def _read(path: Path) -> object:
    return pickle.loads(path.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--reference-dir", type=Path)
    parser.add_argument("--flag")
    options = parser.parse_args()
    if options.model == "broken":
        sys.exit("out of memory, as always")
    with serve(StandIn(options.model, options.reference_dir), options.port):
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
