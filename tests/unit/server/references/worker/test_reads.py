"""When a file counts as not read in time."""

from types import SimpleNamespace

import pytest

from scoremode_server.references.worker import reads
from scoremode_server.references.worker.orders import OVERDUE
from scoremode_server.references.worker.reads import SECONDS_TO_READ, FileReads
from scoremode_server.threads import CallThreads


def test_a_file_has_its_time_from_when_a_thread_begins_to_read_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reads, "time", clock := SimpleNamespace(now=1000.0, monotonic=lambda: clock.now))
    files, outcomes = FileReads(CallThreads(most=1)), []

    def read_first() -> None:
        files.begin("second", "base", read_second)
        files.begin("third", "base", lambda: "content")
        clock.now += SECONDS_TO_READ - 1

    def read_second() -> None:
        for seconds in (SECONDS_TO_READ, 1):
            clock.now += seconds
            outcomes.append([files.outcome(ticket) for ticket in ("second", "third")])

    files.begin("first", "base", read_first)
    files._reads["first"].result.result(60)
    files._reads["third"].result.result(60)
    assert outcomes == [[None, None], [OVERDUE, OVERDUE]]
    # An answer that comes late is an answer.
    assert [files.outcome(ticket) for ticket in ("first", "second", "third")] == ["", "", ""]
    assert files.find("third") == "content"
