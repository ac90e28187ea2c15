"""Files of bench/results have the one schema that bench/README.md describes, and a page of docs/ leads to each."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "bench" / "results").glob("*.json"))
FIELDS = {"what", "hardware", "versions", "command", "commit", "date", "rows"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_have_one_schema_and_a_link(file):
    results = json.loads(file.read_text())
    assert set(results) == {"subject", "measurements"}
    for measurement in results["measurements"]:
        assert set(measurement) - {"notes"} == FIELDS
        assert all(measurement[field] for field in FIELDS)
        if measurement["commit"] == "as in each row":
            assert all("commit" in row for row in measurement["rows"])
    assert any(f"](../bench/results/{file.name})" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
