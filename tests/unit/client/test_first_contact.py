"""What `ppl-client` says of commands, servers and outputs that are not what was meant."""

import json

import pytest
from fake_server import FakeServer, serve

from scoremode.cli import main

TEXT = ["--text", "The quick brown fox jumps over the lazy dog", "--method", "disjoint", "--context-length", "8"]


@pytest.mark.parametrize(
    ("command", "message"), [("kdl --reference r", "no command kdl; did you mean kld?\n"), ("xyz", "no command xyz\n")]
)
def test_an_unknown_command_is_answered_with_the_nearest(command, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("usage: ppl-client [perplexity | record | kld | compare | sweep | corpus] [options]\n")
    assert printed.endswith(message)


def test_a_text_that_is_too_short_names_the_option_and_shows_no_empty_bar(capsys):
    with serve(FakeServer()) as url:
        assert main(["perplexity", "--url", url, *TEXT[2:], "--text", "a"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "give a smaller context_length (--context-length)" in line


@pytest.mark.parametrize(
    ("has_answered", "options", "seconds"), [(False, [], 30), (False, ["--retry-for", "90"], 90), (True, [], 600)]
)
def test_a_server_that_never_answered_is_waited_for_half_a_minute(has_answered, options, seconds, waits, clock, capsys):
    with serve(FakeServer(allowed=0) if has_answered else lambda request: None) as url:
        assert main(["--url", url, *TEXT, "--concurrency", "1", "--quiet", *options]) == 1
    assert sum(waits) == pytest.approx(seconds)
    printed = capsys.readouterr().err
    assert f"{seconds} s at most" in printed
    assert ("--retry-for waits longer" in printed) == (seconds == 30)


@pytest.mark.parametrize("name", ["run.json", "run.safetensors"])
def test_a_finished_output_is_replaced_by_force_alone(tmp_path, name, capsys):
    (tmp_path / name).write_text("finished")
    server, command = FakeServer(), [*TEXT, "--quiet", "--output", str(tmp_path / "run.json")]
    with serve(server) as url:
        for more in ([], ["--resume"]):
            assert main(["--url", url, *command, *more]) == 1
            assert f"{tmp_path / name} is there already: --force replaces it" in capsys.readouterr().err
        assert (server.requests, (tmp_path / name).read_text()) == ([], "finished")
        assert main(["--url", url, *command, "--force"]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["kind"] == "perplexity"
