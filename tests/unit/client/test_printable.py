"""What servers and folders call things is printed without what a terminal would obey."""

import fake_server
import pytest
from fake_server import FakeServer, error, serve

from scoremode.cli import main

TEXT = ["--text", "The quick brown fox jumps over the lazy dog", "--context-length", "8", "--quiet"]
SHOWN = r"evil\x1b[2J\x9b"
NAME = "evil\x1b[2J\x9b"


class Refusing(FakeServer):
    """Has nothing to say but what is wrong."""

    def score(self, body):
        return error(400, NAME)


@pytest.fixture
def server(monkeypatch):
    """Its dtype and quantization, and those of its references, are made to be shown."""
    monkeypatch.setitem(fake_server.MODEL, "dtype", NAME)
    return FakeServer(info={"dtype": NAME})


def printed(capsys, status, command, server):
    with serve(server) as url:
        assert main([*command, "--url", url]) == status
    both = capsys.readouterr()
    for text in (both.out, both.err):
        assert all(character.isprintable() for character in text.replace("\n", ""))
    return both


def test_results_are_printed_with_escapes(capsys, server):
    for command in (TEXT, ["record", "--reference", "base", *TEXT], ["kld", "--reference", "base", "--quiet"]):
        assert SHOWN in printed(capsys, 0, command, server).out


def test_most_divergent_tokens_are_printed_with_escapes(capsys):
    text = ["--text", "\x1b\x9b\x7f" * 20, "--context-length", "8", "--quiet"]
    server = FakeServer()
    printed(capsys, 0, ["record", "--reference", "base", *text], server)
    other = FakeServer(server.references, noise=0.5)
    assert r"\x7f" in printed(capsys, 0, ["kld", "--reference", "base", "--quiet"], other).out


def test_errors_and_what_is_logged_are_printed_with_escapes(capsys, tmp_path):
    assert SHOWN in printed(capsys, 1, TEXT, Refusing()).err
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    corpus = ["corpus", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "o"), "--quiet"]
    assert SHOWN in printed(capsys, 0, corpus, Refusing()).out
    command = [*TEXT, "--output", str(tmp_path / f"{NAME}.json"), "--retry-for", "0", "--concurrency", "1"]
    assert f"{SHOWN}.json.journal has 2 of" in printed(capsys, 1, command, FakeServer(allowed=2)).err
