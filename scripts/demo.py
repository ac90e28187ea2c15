"""`make demo`: a real server on a real small model, a real text, and the table that `ppl-client` prints."""

import subprocess
import sys
import tempfile
from pathlib import Path

from demo_model import demo_model
from local_server import running_server

NAME = "SmolLM2-135M"
OPTIONS = ("--dataset", "pydoc", "--max-tokens", "4096", "--context-length", "1024", "--stride", "512")


def main() -> int:
    """Serve, score, stop; the exit status is `ppl-client`'s."""
    print(f"Preparing {NAME} (converted once, then cached) ...", flush=True)
    model = demo_model()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        print(f"$ scoremode serve {model}      (a minute or two)", flush=True)
        with running_server(model, "--served-model-name", NAME, "--max-model-len", "2048", log=log) as url:
            print(f"$ ppl-client --url {url} {' '.join(OPTIONS)}", flush=True)
            client = [sys.executable, "-m", "scoremode.cli", "--url", url, *OPTIONS]
            status = subprocess.run(client).returncode
    print("The server is stopped.")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
