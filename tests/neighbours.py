"""A pytest plugin: a test fails if its process opens a file in a folder next to the repository, which no clone has.

Hidden folders, those that Python or an environment variable names (a cache may lie anywhere), and those made during the
session are not neighbours. Neither is anything next to a repository right below `/` or in the folder of temporary
files, which other programs use too.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


class Neighbours:
    """The files that were opened in neighbouring folders."""

    def __init__(self, root: Path) -> None:
        root = root.resolve()
        temporary = Path(tempfile.gettempdir()).resolve()
        from_environment = [path for value in os.environ.values() for path in value.split(os.pathsep)]
        named = [Path(path).resolve() for path in (*sys.path, sys.prefix, *filter(os.path.isabs, from_environment))]
        self.folders = tuple(
            f"{folder}{os.sep}"
            for folder in root.parent.iterdir()
            if root.parent not in (Path(root.anchor), temporary)
            if folder.is_dir() and folder != root and not folder.name.startswith((".", "pytest-of-"))
            if not any(path.is_relative_to(folder) for path in (*named, temporary))
        )
        self.opened: list[str] = []

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """An audit hook, which Python never removes."""
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            path = os.path.abspath(os.fspath(arguments[0]))
            if isinstance(path, str) and path.startswith(self.folders):
                self.opened.append(path)


def pytest_configure(config: pytest.Config) -> None:
    neighbours = Neighbours(config.rootpath)
    config.stash[NEIGHBOURS] = neighbours
    sys.addaudithook(neighbours.audit)


NEIGHBOURS = pytest.StashKey[Neighbours]()


@pytest.fixture(autouse=True)
def _opens_no_neighbours_file(request: pytest.FixtureRequest) -> Iterator[None]:
    neighbours = request.config.stash[NEIGHBOURS]
    yield
    opened, neighbours.opened = neighbours.opened, []
    assert not opened, f"a clone elsewhere does not have {opened}"
