"""What is printed on stderr while a command works."""

import pytest

from scoremode.cli import progress
from scoremode.runs.run import Progress


def test_without_a_terminal_progress_is_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0)
    with progress.lines_on_stderr(), progress.progress_bar("ppl", quiet=False) as advance:
        advance(Progress(3, 8, 300, 1.0, num_resumed=200))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "ppl-client: windows: 3 of 8 after 0 s"
    # The clock starts now: a server may have loaded its model until the first window was done.
    assert "3/8 - tok/s" in lines[-1]
