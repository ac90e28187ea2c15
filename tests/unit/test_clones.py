"""Tests have nothing but the repository: it is all that a clone has."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_test_names_a_folder_next_to_the_repository():
    # Written so that this file does not name one itself.
    outside = re.compile(r"\.\./share[d]|share[d]\W+data")
    assert [path for path in TESTS.rglob("*.py") if outside.search(path.read_text())] == []
