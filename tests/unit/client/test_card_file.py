"""The file of a model card: what is between its marks changes, and no other byte."""

from pathlib import Path

import pytest

from scoremode.errors import RunError
from scoremode.runs import read_card, with_block

START, END = "<!-- scoremode -->", "<!-- /scoremode -->"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\n---\n", f"---\n---\n\n{START}\none\ntwo\n{END}\n"),
        (f"A\r\n{START}\r\n{END}\r\nB  \r\n", f"A\r\n{START}\r\none\r\ntwo\r\n{END}\r\nB  \r\n"),
        (f"\ufeff{START}  \nold\n{END}", f"\ufeff{START}  \none\ntwo\n{END}"),
        ("\ufeffA  \r\n\r\n\r\n", f"\ufeffA  \r\n\r\n\r\n{START}\r\none\r\ntwo\r\n{END}\r\n"),
        ("A", f"A\n\n{START}\none\ntwo\n{END}\n"),
        (f"see `{START}`\n", f"see `{START}`\n\n{START}\none\ntwo\n{END}\n"),
        # The head's own are YAML's comments or a part of its texts.
        (
            f"---\n# {START}\n# {END}\na: '\n{START}\n'\n---\n{START}\n{END}",
            f"---\n# {START}\n# {END}\na: '\n{START}\n'\n---\n{START}\none\ntwo\n{END}",
        ),
    ],
)
def test_line_ends_marks_and_all_other_bytes_stay(tmp_path, text, expected):
    path = tmp_path / "card.md"
    path.write_bytes(text.encode())
    assert with_block(path, read_card(path), "one\ntwo") == expected
    assert with_block(path, expected, "one\ntwo") == expected, "the same again"


@pytest.mark.parametrize(
    "text",
    [f"{END}\n", f"{END}\n{START}\n", 2 * f"{START}\n{END}\n", f"{START}\n{END}\n{END}\n"],
)
def test_marks_that_are_not_one_pair_are_refused(text):
    with pytest.raises(RunError, match=f"README.md: keep one {START} and one {END} after it"):
        with_block(Path("README.md"), text, "")
