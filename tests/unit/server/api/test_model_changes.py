"""References that another model, an older server or another GPU began."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scoremode.wire.protocol import ComputedBy
from scoremode_server.scoring import recorder
from tests.bad_inputs import REFERENCES
from tests.unit.server.api.light_app import client_of, error_of, light_app
from tests.unit.server.api.reference_engine import BODY, ReferenceEngine, record

OF_NAMES, OF_OTHER_NAMES = "0" * 32, "1" * 32
"""As older servers made them."""


def client_of_model(root: Path, **identity: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """A client of a server whose model has this identity."""
    return client_of(light_app(ReferenceEngine(root, **identity)))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(recorder.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


async def test_a_reference_with_an_old_fingerprint_resumes_with_a_warning(tmp_path: Path, warnings: list[str]):
    async with client_of_model(tmp_path, fingerprint=OF_NAMES, old_fingerprint=OF_NAMES) as client:
        before = await record(client)
    warnings.clear()
    async with client_of_model(tmp_path, fingerprint="v2-of contents", old_fingerprint=OF_NAMES) as client:
        assert await record(client) == before
        assert len(warnings) == 1
        assert "without the contents of weights" in warnings[0]
        floor = await client.post("/v1/kld", json={"reference": "base", "as_noise_floor": True})
        assert floor.status_code == 200
    async with client_of_model(tmp_path, fingerprint="v2-of contents", old_fingerprint=OF_OTHER_NAMES) as client:
        status, param, message = error_of(await client.post(REFERENCES, json=BODY))
        assert (status, param) == (409, "name")
        assert "another model" in message


async def test_a_reference_says_what_recorded_it_and_other_gpus_are_logged(tmp_path: Path, warnings: list[str]):
    first, second = (ComputedBy(device=device, kernels=["UnquantizedLinearMethod"]) for device in ("A100", "H200"))
    async with client_of_model(tmp_path, computed_by=first) as client:
        assert (await record(client))["computed_by"] == first.model_dump()
        assert not warnings
    async with client_of_model(tmp_path, computed_by=second) as client:
        assert (await record(client))["computed_by"] == first.model_dump(), "it is that of most of its windows"
    assert len(warnings) == 1
    assert "A100" in warnings[0]
    assert "H200" in warnings[0]
