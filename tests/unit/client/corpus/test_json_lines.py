"""JSON lines: one type per column over the whole file, and nothing lost without an error."""

import gzip
import json

import pyarrow as pa
import pytest

from scoremode import CorpusError
from scoremode.corpus import rows
from scoremode.corpus.rows import open_rows


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A few lines are several blocks."""
    monkeypatch.setattr(rows, "_BATCH_ROWS", 2)


def read(path):
    schema, found = open_rows(path)
    batches = list(found)
    assert all(batch.schema == schema for batch in batches)
    return schema, [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_rows_are_read_in_order_from_any_compression(tmp_path, suffix):
    rows = [{"text": f"text {index} é", "id": index} for index in range(50)]
    path = tmp_path / f"rows{suffix}"
    with pa.output_stream(str(path), compression="detect") as stream:
        stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    assert read(path)[1] == rows


def test_one_type_per_column_fits_early_and_late_rows(tmp_path):
    """Text that looks like a time stays text."""
    early = {"text": "a", "n": 1, "meta": {"a": 1}, "list": [], "when": "2024-01-01", "all": [{"at": "2024-01-01"}]}
    late = {"text": "b", "n": 2.5, "new": "x", "meta": {"b": [True]}, "list": [1], "when": "yesterday", "all": []}
    (tmp_path / "rows.jsonl").write_text(20 * f"{json.dumps(early)}\n" + 20 * f"{json.dumps(late)}\n")
    schema, rows = read(tmp_path / "rows.jsonl")
    assert schema.field("n").type == pa.float64()
    assert rows[:20] == [{**early, "meta": {"a": 1, "b": None}, "new": None}] * 20
    assert rows[20:] == [{**late, "meta": {"a": None, "b": [True]}}] * 20


def test_lines_may_be_long_or_empty_and_the_last_without_an_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"text": "' + "x" * 500 + '"}\r\n\n\n{"text": "y"}\n\n{"text": "z"}')
    assert [row["text"] for row in read(path)[1]] == ["x" * 500, "y", "z"]
    path.write_text("\n")
    assert read(path) == (pa.schema([]), [])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"text": "x", "id": "seven"}', "id"),
        ('{"text": "x", "id": {"a": 1}}', "id"),
        ('{"text": "broken', "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"text": "x", "id": 12345678901234567890}', "too large"),
        ('{"text": "x", "id": 0, "n": [1, "a"]}', "n"),
    ],
)
@pytest.mark.parametrize("place", [1, 21])
def test_a_line_of_another_type_is_refused_with_file_and_line(tmp_path, line, named, place):
    lines = [f'{{"text": "a", "id": {index}}}' for index in range(30)]
    lines[place] = line
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(CorpusError, match=named) as failure:
        read(tmp_path / "rows.jsonl")
    assert f"rows.jsonl: line {place + 1}" in str(failure.value)


def test_a_damaged_archive_and_a_line_without_an_end_are_named(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-20])
    with pytest.raises(CorpusError, match=r"rows\.jsonl\.gz"):
        read(path)
    monkeypatch.setattr(rows, "LONGEST_LINE_BYTES", 1 << 20)
    path.write_bytes(gzip.compress(b"x" * (3 << 20)))
    with pytest.raises(CorpusError, match="line 1 has more than 1 MiB"):
        read(path)
