"""JSON lines: one type a column over the whole file, and nothing lost unsaid."""

import gzip
import json

import pyarrow as pa
import pytest

from scoremode import CorpusError
from scoremode.corpus import json_lines
from scoremode.corpus.json_lines import JsonLines


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a few lines are several blocks."""
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 64)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    lines = JsonLines(path)
    batches = list(lines.batches())
    assert all(batch.schema == lines.schema for batch in batches)
    return lines.schema, [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_rows_come_back_in_order_however_they_are_compressed(tmp_path, suffix):
    rows = [{"text": f"text {index} é", "id": index} for index in range(50)]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path = tmp_path / f"rows{suffix}"
    with pa.output_stream(str(path), compression="detect") as stream:
        stream.write(content)
    assert read(path)[1] == rows
    if suffix == ".jsonl.gz":
        assert gzip.decompress(path.read_bytes()) == content


def test_columns_and_numbers_that_come_late_are_found(tmp_path):
    early = [{"text": "a", "n": 1, "meta": {"a": 1}, "list": []} for _ in range(20)]
    late = [{"text": "b", "n": 2.5, "new": "x", "meta": {"b": [True]}, "list": [1]} for _ in range(20)]
    schema, rows = read(write(tmp_path / "rows.jsonl", early + late))
    assert schema.field("n").type == pa.float64()
    assert rows[0] == {"text": "a", "n": 1.0, "meta": {"a": 1, "b": None}, "list": [], "new": None}
    assert rows[-1] == {"text": "b", "n": 2.5, "meta": {"a": None, "b": [True]}, "list": [1], "new": "x"}


def test_what_looks_like_a_time_stays_the_text_that_it_is(tmp_path):
    rows = [{"text": "a", "when": "2024-01-01", "all": [{"at": "2024-01-01 10:00:00"}]}] * 3 + [
        {"text": "b", "when": "yesterday", "all": []}
    ]
    assert read(write(tmp_path / "rows.jsonl", rows))[1] == rows


def test_long_lines_empty_lines_and_a_last_line_without_an_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"text": "' + "x" * 500 + '"}\r\n\n\n{"text": "y"}\n\n{"text": "z"}')
    assert [row["text"] for row in read(path)[1]] == ["x" * 500, "y", "z"]


def test_no_line_is_no_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n")
    assert read(tmp_path / "rows.jsonl") == (pa.schema([]), [])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"text": "x", "id": "seven"}', "id"),
        ('{"text": "x", "id": {"a": 1}}', "id"),
        ('{"text": "broken', "in line"),
        ("[1, 2]", "in line"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"text": "x", "id": 12345678901234567890}', "too large to be kept"),
    ],
    ids=["text for number", "object for number", "torn", "no object", "surrogate", "large number"],
)
@pytest.mark.parametrize("place", [1, 21], ids=["second line", "line 22"])
def test_what_has_no_one_type_is_refused_with_file_and_line(tmp_path, line, named, place):
    lines = [f'{{"text": "a", "id": {index}}}' for index in range(30)]
    lines[place] = line
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(CorpusError, match=named) as failure:
        read(path)
    message = str(failure.value)
    assert "rows.jsonl" in message
    numbers = [int(word) for word in message.replace(":", " ").replace(",", " ").split() if word.isdigit()]
    assert "line" in message
    assert min(numbers) <= place + 1 <= max(numbers)
    assert max(numbers) - min(numbers) <= 3


def test_a_damaged_archive_is_named(tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-20])
    with pytest.raises(CorpusError, match=r"rows\.jsonl\.gz"):
        read(tmp_path / "rows.jsonl.gz")
