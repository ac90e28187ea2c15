"""Why a server ended, as its log says: the last error with every line of its message, and none of what follows."""

import asyncio
import sys

import pytest

from scoremode.errors import ServerError
from scoremode.sweep.processes import ModelServer, ProcessError, _reason

TOKENIZER = """ValueError: Couldn't instantiate the backend tokenizer from one of:
(1) a `tokenizers` library serialization file,
(2) a slow tokenizer instance to convert or
(3) an equivalent slow tokenizer class to instantiate and convert.
You need to have sentencepiece or tiktoken installed to convert a slow tokenizer to a fast one."""
PYDANTIC = """pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (9000) is greater than the derived max_model_len [type=value_error]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error"""
MEMORY = """ValueError: No available memory for the cache blocks.

Try increasing `gpu_memory_utilization`."""
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    fail()\n'
SUMMARY = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
WORKER = "(Worker pid=8) ERROR 11-28 09:08:58 [multiproc_executor.py:1063] "
FAILED = "RuntimeError: Worker failed with error '{}', please check the stack trace above for the root cause"
DEAD = "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
ENDED = "scoremode: the engine has died: its error is further up"
REQUEST = "(APIServer pid=1) INFO 11-28 09:09:00 [requests.py:9] request status=503\n"
ENGINE = "(EngineCore pid=7) ERROR 11-28 09:08:58 [core.py:1100] "
END = "(APIServer pid=1) INFO 11-28 09:09:00 [launcher.py:9] Shutting down"
LEAK = "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: There appear to be 1 leaked objects"


def prefixed(text: str, prefix: str) -> str:
    return "\n".join(prefix + line for line in text.splitlines())


@pytest.mark.parametrize("message", [TOKENIZER, PYDANTIC, MEMORY], ids=["tokenizer", "pydantic", "blank line"])
@pytest.mark.parametrize(
    "log",
    [
        "INFO before\n{traceback}{message}",
        "{traceback}{message}\n{end}\n{leak}\n  warnings.warn(\n",
        "ValueError: an earlier one\n{traceback}{message}\n[rank0]:[W1128 09:09:00] destroy_process_group()",
        "{engine}\n{end}\n{traceback}{summary}",
        "{engine}\nERROR 11-28 09:09:00 [core.py:9] EngineCore failed to start.\n{summary}",
        "{message}\nDuring handling of the above exception, another exception occurred:\n{traceback}{summary}",
        "{message}\n{summary}",
        # An engine that dies while it computes, with many requests in flight.
        "{worker}\n{worker_failed}\n{requests}(APIServer pid=1) {dead}\n{requests}{ended}\nnanobind: leaked!",
    ],
)
def test_the_last_error_is_reported_with_all_of_its_lines(tmp_path, log, message):
    parts = {"traceback": TRACEBACK, "message": message, "end": END, "leak": LEAK, "summary": SUMMARY}
    path = tmp_path / "server.log"
    parts |= {"dead": DEAD, "ended": ENDED, "requests": REQUEST * 300}
    parts |= {"worker": prefixed(TRACEBACK + message, WORKER)}
    parts |= {"worker_failed": prefixed(TRACEBACK + FAILED.format(message), ENGINE)}
    path.write_text(log.format(**parts, engine=prefixed(TRACEBACK + message, ENGINE)))
    assert _reason(path) == f" (log {path}): {' '.join(message.split())}"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", "it printed nothing"),
        ("ValueError: \n  first line\n  second", "ValueError: first line second"),
        ("main: loading\nerror: failed to load model", "error: failed to load model"),
        ("(EngineCore pid=1) torch.OutOfMemoryError: CUDA out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
        ("a\nValueError: no\nRuntimeError: Engine core initialization failed. See above", "ValueError: no"),
        ("SystemExit: 1\nErrors: 5", "SystemExit: 1"),
        ("ERROR torch._dynamo.exc.Unsupported: no graph\n  Hint: none", "torch._dynamo.exc.Unsupported: no graph"),
        ("KeyError: 1\nWARNING can cause `OSError: [Errno 24] Too many files`", "KeyError: 1"),
        (
            "WARNING TypeError: not of the end\nscoremode: no tokenizer can be loaded from m: ... (ValueError: no)",
            "scoremode: no tokenizer can be loaded from m: ... (ValueError: no)",
        ),
        ("KeyError: 'a'\n" + "a line of words\n" * 199, "KeyError: 'a' " + "a line of words " * 61 + "a line ..."),
    ],
)
def test_a_reason_is_one_line_of_bounded_length(tmp_path, log, reason):
    path = tmp_path / "server.log"
    path.write_text(log)
    assert _reason(path) == f" (log {path}): {reason}"
    assert len(reason) <= 1000


@pytest.mark.processes
@pytest.mark.parametrize("ends", [True, False])
async def test_work_that_fails_as_its_server_dies_is_reported_by_the_servers_log(tmp_path, ends, monkeypatch):
    monkeypatch.setattr("scoremode.sweep.processes._END_SECONDS", 60 if ends else 0.1)
    path = tmp_path / "server.log"
    path.write_text(f"RuntimeError: expect A to be bfloat16\n{ENDED}\n")
    program = "input(); raise SystemExit(1)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE)
    failure = ServerError("the engine has died", status_code=503)

    async def fail() -> None:
        if ends:
            process.stdin.write(b"\n")
        raise failure

    with pytest.raises(ProcessError if ends else ServerError) as raised:
        await ModelServer("", path, process).while_it_runs(fail())
    if ends:
        reason = "RuntimeError: expect A to be bfloat16"
        assert str(raised.value) == f"the server ended with status 1 (log {path}): {reason}"
    else:
        process.kill()
        await process.wait()
