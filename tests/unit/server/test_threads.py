"""Threads for calls that may hang: they hold up their own subject alone, and canceled calls hold nothing."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from scoremode_server.threads import THREADS, CallThreads, drop_canceled


def test_calls_that_hang_leave_other_references_alone():
    threads, let_go = CallThreads(), threading.Event()
    hang = [threads.submit("hangs", let_go.wait) for _ in range(2 * THREADS)]
    assert threads.submit("answers", lambda: 5).result(30) == 5
    assert sum(future.running() for future in hang) <= THREADS
    # A call that has not begun can be canceled.
    assert hang[-1].cancel()
    let_go.set()
    assert threads.submit("hangs", lambda: 6).result(30) == 6


class Body:
    """The body that a request holds."""


@pytest.mark.parametrize("submit", [partial(CallThreads(2).submit, "all"), drop_canceled(ThreadPoolExecutor(2)).submit])
def test_canceled_calls_hold_nothing_while_others_hang(submit: Any):
    let_go, bodies = threading.Event(), list[weakref.ref[Body]]()
    hang = [submit(let_go.wait) for _ in range(2)]
    for _ in range(500):
        body = Body()
        bodies.append(weakref.ref(body))
        assert submit(partial(id, body)).cancel()
    del body
    assert sum(body() is not None for body in bodies) == 0
    waits = submit(lambda: 5)
    let_go.set()
    assert (waits.result(30), *(future.result(30) for future in hang)) == (5, True, True)
