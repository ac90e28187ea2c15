"""Both clients as tools see them: `help`, `inspect`, mocks and mypy."""

import inspect
import pydoc
import subprocess
import sys

import pytest

import write_sync_client
from scoremode import AsyncScoreClient, ScoreClient, ServerInfo

SNIPPET = """
from scoremode import AsyncScoreClient, ScoreClient

async def use(client: AsyncScoreClient, other: ScoreClient) -> None:
    reveal_type(await client.info())
    reveal_type(other.info())
    reveal_type(other.score)
"""


def test_help_and_signatures_are_those_of_the_methods():
    assert "info(self) -> scoremode.wire.protocol.ServerInfo" in pydoc.plain(pydoc.render_doc(ScoreClient))
    for name, method in inspect.getmembers(AsyncScoreClient, inspect.iscoroutinefunction):
        synchronous = getattr(ScoreClient, name.replace("__a", "__"))
        assert not inspect.iscoroutinefunction(synchronous)
        assert inspect.signature(synchronous) == inspect.signature(method)
        assert synchronous.__doc__ == method.__doc__
    assert inspect.signature(ScoreClient.info).return_annotation is ServerInfo
    assert inspect.iscoroutinefunction(AsyncScoreClient.info)


@pytest.mark.processes
def test_mypy_knows_the_types_of_both(tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "snippet.py")]
    revealed = subprocess.run(
        command, capture_output=True, text=True, cwd=write_sync_client.PACKAGE.parent.parent
    ).stdout
    lines = [line.partition("Revealed type is ")[2] for line in revealed.splitlines() if "Revealed" in line]
    info = '"scoremode.wire.protocol.ServerInfo"'
    assert lines[:2] == [info, info]
    assert lines[2].endswith('-> list[scoremode.results.Score]"')
