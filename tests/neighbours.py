"""A pytest plugin: a test fails if its process opens a file in a folder next to the repository, which no clone has.

Hidden folders, those of Python, of temporary files and of caches, and those made during the session are not neighbours.
Neither is anything next to a repository right below `/` or in the folder of temporary files, which others use too.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CACHES = {"HOME", "XDG_CACHE_HOME", "HF_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
"""The environment variables that name folders of caches."""


class Neighbours:
    """The files that were opened in neighbouring folders."""

    def __init__(self, root: Path) -> None:
        root, temporary = root.resolve(), Path(tempfile.gettempdir()).resolve()
        caches = [os.environ[name] for name in CACHES & os.environ.keys()]
        others = [temporary, *(Path(path).resolve() for path in (*sys.path, sys.prefix, *caches))]
        siblings = [] if root.parent in (Path(root.anchor), temporary) else root.parent.iterdir()
        self.folders = tuple(
            f"{folder}{os.sep}"
            for folder in siblings
            if folder.is_dir() and folder != root and not folder.name.startswith((".", "pytest-of-"))
            if not any(path.is_relative_to(folder) for path in others)
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
