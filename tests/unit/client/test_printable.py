"""What servers and folders call things is printed without what a terminal would obey."""

import fake_server
import pytest
from fake_server import FakeServer, error, serve

from scoremode.cli import main

TEXT = ["--text", "The quick brown fox jumps over the lazy dog", "--context-length", "8", "--quiet"]
KLD = ["kld", "--reference", "base", "--quiet"]
SHOWN = r"evil\x1b[2J\x9b"
NAME = "evil\x1b[2J\x9b"


class Refusing(FakeServer):
    """Has nothing to say but what is wrong."""

    def score(self, body):
        return error(400, NAME)


@pytest.fixture
def shown(capsys):
    def run(server, status, *command):
        """Stdout and stderr of a command with a server."""
        with serve(server) as url:
            assert main([*command, "--url", url]) == status
        both = capsys.readouterr()
        for text in (both.out, both.err):
            assert all(character.isprintable() for character in text.replace("\n", ""))
        return both

    return run


def test_results_are_printed_with_escapes(shown, monkeypatch):
    monkeypatch.setitem(fake_server.MODEL, "dtype", NAME)
    server = FakeServer(info={"dtype": NAME})
    for command in (TEXT, ["record", "--reference", "base", *TEXT, "--text", "\x1b\x9b\x7f" * 20], KLD):
        assert SHOWN in shown(server, 0, *command).out
    assert r"\x7f" in shown(FakeServer(server.references, noise=0.5), 0, *KLD).out, "most divergent tokens"


def test_errors_and_what_is_logged_are_printed_with_escapes(shown, tmp_path):
    assert SHOWN in shown(Refusing(), 1, *TEXT).err
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    corpus = ["corpus", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "o"), "--quiet"]
    assert SHOWN in shown(Refusing(), 0, *corpus).out
    command = [*TEXT, "--output", str(tmp_path / f"{NAME}.json"), "--retry-for", "0", "--concurrency", "1"]
    assert f"{SHOWN}.json.journal has 2 of" in shown(FakeServer(allowed=2), 1, *command).err
