"""Tells API servers why an engine died. vLLM's engine sends them only that it died, and logs the error."""

import re
import sys
import textwrap
from typing import Any

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.executor.multiproc_executor import WorkerProc

from scoremode_server.errors import engine_errors

MARK = EngineCoreProc.ENGINE_CORE_DEAD


def describe(error: BaseException | None) -> str:
    """The type and message of an error in one line. If vLLM says that a worker failed, they are the worker's."""
    line = textwrap.shorten(f"{type(error).__name__}: {error}", 1000, placeholder=" ...")
    return re.sub("RuntimeError: Worker failed with error '(.*)', please check.*", r"\1", line)


def patch() -> None:
    """Patch the engine and its workers to send their error, and the client to note it."""
    send, validate, handle = (
        EngineCoreProc._send_engine_dead,
        BackgroundResources.validate_alive,
        WorkerProc.handle_output,
    )

    def send_with_error(self: Any) -> None:
        # vLLM sends this constant, and compares messages with it: `note_and_validate` replaces it too.
        EngineCoreProc.ENGINE_CORE_DEAD = MARK + describe(sys.exception()).encode()
        send(self)

    def note_and_validate(self: Any, frames: Any) -> None:
        if frames[0].buffer[: len(MARK)] == MARK:
            EngineCoreProc.ENGINE_CORE_DEAD = bytes(frames[0].buffer)
            engine_errors.append(EngineCoreProc.ENGINE_CORE_DEAD[len(MARK) :].decode())
        validate(self, frames)

    def handle_with_type(self: Any, output: Any) -> None:
        # Add the type to the message, because vLLM passes on only an error's message.
        handle(self, RuntimeError(describe(output)) if isinstance(output, Exception) else output)

    EngineCoreProc._send_engine_dead = send_with_error
    BackgroundResources.validate_alive = note_and_validate
    WorkerProc.handle_output = handle_with_type
