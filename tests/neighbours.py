"""A pytest plugin: a test fails if its process opens a file in a folder next to the repository, which no clone has.

Hidden folders, those of Python and of temporary files, and folders made during the session are not neighbours.
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
        installed = [Path(folder).resolve() for folder in (*sys.path, sys.prefix, tempfile.gettempdir())]
        self.folders = tuple(
            f"{folder}{os.sep}"
            for folder in root.resolve().parent.iterdir()
            if folder.is_dir() and folder != root.resolve() and not folder.name.startswith((".", "pytest-of-"))
            if not any(path.is_relative_to(folder) for path in installed)
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
