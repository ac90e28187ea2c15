"""When a file counts as not read in time."""

from threading import Event
from types import SimpleNamespace

import pytest

from scoremode_server.references.worker import reads
from scoremode_server.references.worker.orders import OVERDUE
from scoremode_server.references.worker.reads import SECONDS_TO_READ, FileReads
from scoremode_server.threads import CallThreads


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that the test says have passed."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(reads, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_file_has_its_time_from_when_a_thread_begins_to_read_it(clock: SimpleNamespace):
    files = FileReads(CallThreads(most=1))
    begun, answers = Event(), Event()

    def hang() -> str:
        begun.set()
        answers.wait(60)
        return "first"

    files.begin("first", "base", hang)
    begun.wait(60)
    clock.now += SECONDS_TO_READ / 2
    files.begin("second", "base", lambda: "second")
    files.begin("other", "other", lambda: "other")
    clock.now += SECONDS_TO_READ / 2
    assert [files.outcome(ticket) for ticket in ("first", "second")] == [None, None]
    clock.now += 1
    # The one that waits for the thread was ordered later.
    assert [files.outcome(ticket) for ticket in ("first", "second")] == [OVERDUE, None]
    clock.now += SECONDS_TO_READ / 2
    assert files.outcome("second") == OVERDUE
    answers.set()
    for ticket in ("first", "second", "other"):
        files._reads[ticket].result.result(60)
    # An answer that comes late is an answer.
    assert [files.outcome(ticket) for ticket in ("first", "second", "other")] == ["", "", ""]
    assert [files.find(ticket) for ticket in ("first", "second", "other")] == ["first", "second", "other"]


def test_a_file_that_cannot_be_read_has_a_reason():
    files = FileReads(CallThreads())
    files.begin("ticket", "base", lambda: 1 / 0)
    files._reads["ticket"].result.exception(60)
    assert (files.outcome("ticket"), files.find("ticket")) == ("division by zero", None)
    files.forget("ticket")
    assert (files.outcome("ticket"), len(files)) == (None, 0)
