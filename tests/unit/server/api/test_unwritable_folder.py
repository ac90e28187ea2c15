"""A folder of references in which files cannot be written to their end, or not be made."""

from pathlib import Path

import pytest

from tests.bad_inputs import KLD, REFERENCES, SCORE
from tests.unit.server.api.light_app import client_of, error_of, light_app
from tests.unit.server.api.reference_engine import BODY, ReferenceEngine, record
from tests.unit.server.references.reference_setup import files, no_file_longer_than


# Tokens have 692 bytes, and are written first; manifests have some 850, and the LM head 32 KB.
@pytest.mark.parametrize(("num_bytes", "status_of_floor"), [(650, 507), (16_384, 200)])
async def test_a_full_folder_is_told_and_the_rest_goes_on(tmp_path: Path, num_bytes: int, status_of_floor: int):
    async with client_of(light_app(ReferenceEngine(tmp_path))) as client:
        whole = await record(client, name="whole")
        with no_file_longer_than(num_bytes):
            status, param, message = error_of(await client.post(REFERENCES, json=BODY))
            assert (status, param, "File too large" in message) == (507, "name", True)
            assert str(tmp_path) not in message
            assert not [name for name in files(tmp_path) if "/." in f"/{name}"]
            assert (await client.get(f"{REFERENCES}/whole")).json() == whole
            for route, body in ((SCORE, {"prompt": [5, 6]}), (KLD, {"reference": "whole"})):
                assert (await client.post(route, json=body)).status_code == 200
            floor = await client.post(KLD, json={"reference": "whole", "as_noise_floor": True})
            assert floor.status_code == status_of_floor
        assert (await record(client))["complete"]


async def test_a_folder_that_cannot_be_written_to_is_told_without_its_path():
    """Not even by root."""
    async with client_of(light_app(ReferenceEngine(Path("/proc/self/fdinfo")))) as client:
        status, param, message = error_of(await client.post(REFERENCES, json=BODY))
        assert (status, param) == (507, "name")
        assert message.startswith("reference 'base' could not be written: ")
        assert "/proc" not in message
        assert (await client.get(REFERENCES)).json()["data"] == []
