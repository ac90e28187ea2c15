"""The one text of all tests, in the repository: see tests/data/README.md."""

from pathlib import Path

DATA = Path(__file__).with_name("data")
WIKITEXT = DATA / "wikitext.txt"
"""84,288 characters of WikiText-2's test split."""
