"""What is printed on stderr while a command works."""

import pytest

from scoremode.cli import progress
from scoremode.runs import Progress


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_a_bar_on_a_terminal_and_else_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
):
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0)
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    with progress.lines_on_stderr(), progress.progress_bar("ppl", quiet=False) as advance:
        advance(Progress(3, 8, 300, 1.0, num_resumed=200))
    printed = capsys.readouterr().err
    if is_terminal:
        # The clock starts now: a server may have loaded its model until the first window was done.
        assert "- tok/s" in printed
        assert "windows:" not in printed
        assert printed.endswith("\x1b[2K"), "no bar is left"
    else:
        assert printed == "ppl-client: windows: 3 of 8 after 0 s\n"
