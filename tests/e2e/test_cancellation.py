"""When a client disconnects, its requests are aborted in the engine."""

import subprocess
import sys
import time

import httpx

from tests.e2e.metrics import metric

# vLLM's are those after its last step: they read 0 while it is at work, if what comes next has not reached it.
RUNNING = r"(?:vllm:num_requests_(?:running|waiting)\{.*\}|scoremode_(?:running|waiting)_sequences)"


def requests_in_engine(server: str) -> float:
    return metric(server, RUNNING)


def wait_for(server: str, busy: bool, seconds: float) -> bool:
    """Whether the engine came to have requests, or to have none, in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (requests_in_engine(server) > 0) == busy:
            return True
        time.sleep(0.1)
    return False


def test_killing_ppl_client_leaves_no_request_running(smollm2_server, wikitext, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(wikitext)
    command = [sys.executable, "-m", "scoremode.cli", "--url", smollm2_server, "--text-file", str(text)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_for(smollm2_server, busy=True, seconds=60), "the engine never got a request"
    finally:
        process.kill()
        process.wait()
    # The windows in the engine's running step are finished; thousands of tokens after them are not begun. The whole
    # text would take minutes.
    assert wait_for(smollm2_server, busy=False, seconds=60), "requests of a client that is gone are still running"


def test_a_bad_sequence_in_a_batch_leaves_no_request_running(smollm2_server):
    response = httpx.post(f"{smollm2_server}/v1/score", json={"prompt": [[5] * 2000] * 8 + [[10**9]]}, timeout=60)
    assert response.status_code == 400
    assert requests_in_engine(smollm2_server) == 0
