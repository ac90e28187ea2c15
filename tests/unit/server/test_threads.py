"""Threads for files: a call that hangs holds up its own reference alone."""

import threading

from scoremode_server.threads import THREADS, CallThreads


def test_calls_that_hang_leave_other_references_alone():
    threads, let_go = CallThreads(), threading.Event()
    hang = [threads.submit("hangs", let_go.wait) for _ in range(2 * THREADS)]
    assert threads.submit("answers", lambda: 5).result(30) == 5
    assert sum(future.running() for future in hang) <= THREADS
    # What has not begun can be canceled.
    assert hang[-1].cancel()
    let_go.set()
    assert threads.submit("hangs", lambda: 6).result(30) == 6
