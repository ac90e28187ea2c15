"""A server that the tests, the demo and the benchmarks start does not outlive the process that started it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

STARTER = """
import http.server, sys, time
from pathlib import Path
from local_server import server_process

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

if "--port" in sys.argv:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Healthy).serve_forever()
with server_process("model", log=Path(sys.argv[1]), command=(sys.executable, __file__)) as server:
    print(server.url, flush=True)
    time.sleep(60)
"""


@pytest.mark.processes
def test_a_server_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    starter = subprocess.Popen(
        [sys.executable, script, tmp_path / "server.log"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "scripts")},
        stdout=subprocess.PIPE,
    )
    url = starter.stdout.readline().decode().strip()
    assert httpx.get(url).status_code == 200
    starter.kill()
    starter.communicate()
    with pytest.raises(httpx.TransportError):  # noqa: PT012
        for _ in range(300):
            httpx.get(url)
            time.sleep(0.1)
