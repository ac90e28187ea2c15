"""`--filter`: Python's conditions on columns, computed by pyarrow."""

import pyarrow as pa
import pytest

from scoremode import CorpusError
from scoremode.corpus.filters import check_filter, parse_filter

TABLE = pa.table(
    {
        "row": [0, 1, 2, 3],
        "bits_per_byte": [0.5, 1.2, 3.0, None],
        "num_tokens": [1, 7, 10, None],
        "language": ["en", "de", None, "en"],
        "meta": [{"score": 1}, {"score": 2}, {"score": 3}, {"score": 4}],
        "my column": [True, False, True, True],
    }
)


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("bits_per_byte < 1.2", [0]),
        ("bits_per_byte <= 1.2", [0, 1]),
        ("1 < bits_per_byte <= 3", [1, 2]),
        ("not bits_per_byte < 1.2", [1, 2]),
        ("bits_per_byte is None", [3]),
        ("bits_per_byte is not None and row > 0", [1, 2]),
        ('language == "en" or row == 2', [0, 2, 3]),
        ('language in ["de", "fr"]', [1]),
        ("meta.score >= 3", [2, 3]),
        ('column("my column")', [0, 2, 3]),
        ('not column("my column")', [1]),
        ("num_tokens / 2 > 3", [1, 2]),
        ("num_tokens * 2 - row == 18", [2]),
        ("-row < -2", [3]),
        ("abs(row - 2) == 1", [1, 3]),
        ("len(language) != 3 and row + 1 > 1", [1, 3]),
    ],
)
def test_rows_that_a_condition_keeps(condition, rows):
    expression = parse_filter(condition)
    check_filter(expression, TABLE.schema)
    assert TABLE.filter(expression).column("row").to_pylist() == rows


@pytest.mark.parametrize(
    "condition",
    [
        *("", "row <", "None", "row; row", "row is 3", "row ** 2 > 1", "language in other", "row.__class__"),
        *("missing > 1", "language > 3", "row + 1"),
        *("open('x')", "__import__('os').system('true')", "(lambda: 1)()", "[row for row in row]"),
    ],
)
def test_other_conditions_are_refused(condition):
    with pytest.raises(CorpusError, match=r"--filter"):
        check_filter(parse_filter(condition), TABLE.schema)
