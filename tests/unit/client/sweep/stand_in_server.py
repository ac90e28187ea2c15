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

import httpx

sys.path.append(str(Path(__file__).parents[1]))

from fake_references import KldServer
from fake_scoremode import copy_of, error, serve

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
            self._allowed -= 1
            if self._allowed < 0:
                print("no more windows are allowed", flush=True)
                # Those before it are answered meanwhile.
                time.sleep(1)
                os._exit(7)
        response = self._server(request)
        if self._files is not None and (path == "/v1/references" or b'"as_noise_floor":true' in request.content):
            for name, stored in self._server.references.items():
                (self._files / name).mkdir(exist_ok=True)
                (self._files / name / "stored").write_bytes(pickle.dumps(stored))
                (self._files / name / "manifest.json").write_text('{"result": {}}')
        return response


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
