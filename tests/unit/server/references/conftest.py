"""An engine with a folder of references, and a client of its server."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.unit.server.light_app import client_of, light_app
from tests.unit.server.references.reference_engine import ReferenceEngine


@pytest.fixture
def engine(tmp_path: Path) -> ReferenceEngine:
    return ReferenceEngine(tmp_path)


@pytest.fixture
async def client(engine: ReferenceEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(light_app(engine)) as client:
        yield client
