"""Why a server ended, as its log says: the last error with every line of its message, and none of what follows."""

from itertools import product

import pytest

from scoremode.sweep.processes import _reason

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
ENGINE = "(EngineCore pid=7) ERROR 11-28 09:08:58 [core.py:1100] "
END = "(APIServer pid=1) INFO 11-28 09:09:00 [launcher.py:9] Shutting down"
LEAK = "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: There appear to be 1 leaked objects"


LOGS = [
    "INFO before\n{traceback}{message}",
    "{traceback}{message}\n{end}\n{leak}\n  warnings.warn(\n",
    "ValueError: an earlier one\n{traceback}{message}\n[rank0]:[W1128 09:09:00] destroy_process_group()",
    "{engine}\n{end}\n{traceback}{summary}",
    "{engine}\nERROR 11-28 09:09:00 [core.py:9] EngineCore failed to start.\n{summary}",
    "{message}\nDuring handling of the above exception, another exception occurred:\n{traceback}{summary}",
    "{message}\n{summary}",
]


def filled(log: str, message: str) -> str:
    """A log with an error's message."""
    engine = "\n".join(ENGINE + line for line in (TRACEBACK + message).splitlines())
    return log.format(traceback=TRACEBACK, message=message, end=END, leak=LEAK, summary=SUMMARY, engine=engine)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        *((filled(log, text), " ".join(text.split())) for log, text in product(LOGS, (TOKENIZER, PYDANTIC, MEMORY))),
        ("", "it printed nothing"),
        ("ValueError: \n  first line\n  second", "ValueError: first line second"),
        ("main: loading\nerror: failed to load model", "error: failed to load model"),
        (
            "WARNING TypeError: not of the end\nscoremode: no tokenizer can be loaded from m: ... (ValueError: no)",
            "scoremode: no tokenizer can be loaded from m: ... (ValueError: no)",
        ),
        # At most 1,000 characters.
        ("KeyError: 'a'\n" + "a line of words\n" * 199, "KeyError: 'a' " + "a line of words " * 61 + "a line ..."),
    ],
)
def test_the_last_error_is_reported_in_one_line(tmp_path, log, reason):
    path = tmp_path / "server.log"
    path.write_text(log)
    assert _reason(path) == f" (log {path}): {reason}"
