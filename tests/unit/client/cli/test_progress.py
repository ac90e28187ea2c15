"""Commands print their progress on stderr."""

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
        # Windows of one step are reported together.
        for done, tokens in ((1, 100), (3, 300), (4, 400)):
            advance(Progress(done, 8, tokens, 1.0, num_resumed=100, seconds=1.2))
    printed = capsys.readouterr().err
    if is_terminal:
        # Tokens of this session by its time, which resumed ones are not of.
        assert "250 tok/s" in printed
        assert "windows:" not in printed
        assert printed.endswith("\x1b[2K"), "no bar is left"
    else:
        assert printed.startswith("ppl-client: windows: 1 of 8 after 0 s\n")
