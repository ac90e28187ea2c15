"""What somebody makes in a clone who does as README says is neither committed, nor packed, nor copied into an image."""

import re
from fnmatch import fnmatch
from pathlib import Path

from scoremode.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


def test_folders_that_readme_and_commands_make_are_ignored_by_git_and_docker():
    texts = [(ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    made = {name for text in texts for name in re.findall(r"-m venv (\S+)", text)}
    assert made == {".venv", ".venv-docs"}
    for command in ("quick", "example"):
        options = (option for group in COMMANDS[command].groups for option in group.options)
        made |= {str(option.settings["default"]) for option in options if option.name == "--output"}
    for name in (".gitignore", ".dockerignore"):
        patterns = [line.rstrip("/") for line in (ROOT / name).read_text().splitlines()]
        assert [
            each for each in made | {"dist", "site"} if not any(fnmatch(each, pattern) for pattern in patterns)
        ] == []


def test_readme_says_how_the_clone_is_made():
    assert "git clone URL scoremode && cd scoremode" in (ROOT / "README.md").read_text()
