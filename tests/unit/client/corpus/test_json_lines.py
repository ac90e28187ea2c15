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


CONTENT = '{"text": "one"}\r\n\r\n{"text": "zwei ü\u2028"}\n{"text": "\U0001f600"}'


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_the_encodings_of_windows_are_read(tmp_path, encoding, suffix):
    path = tmp_path / f"rows{suffix}"
    with pa.output_stream(str(path), compression="detect") as stream:
        stream.write(CONTENT.encode(encoding))
    assert [row["text"] for row in read(path)[1]] == ["one", "zwei ü\u2028", "\U0001f600"]
    with pa.output_stream(str(path), compression="detect") as stream:
        stream.write("".encode(encoding))
    assert read(path) == (pa.schema([]), [])


def zstd_frame(content: bytes, window_log: int, *, last: int = 1) -> bytes:
    """By RFC 8878, section 3.1.1: magic number, a descriptor without flags, the window's descriptor, and one raw
    block."""
    header = b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3])
    return header + (last | len(content) << 3).to_bytes(3, "little") + content


LINES = b'{"text": "a"}\n{"text": "b"}\n'


@pytest.mark.parametrize("window_log", [10, 27, 28, 31])
@pytest.mark.parametrize("num_frames", [1, 3])
def test_zstd_windows_are_read_up_to_those_of_long_31(tmp_path, window_log, num_frames):
    """2 GiB, as Reddit's dumps have them."""
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(zstd_frame(LINES, window_log) * num_frames)
    assert [row["text"] for row in read(path)[1]] == ["a", "b"] * num_frames


@pytest.mark.parametrize("window_log", [20, 31])
@pytest.mark.parametrize(
    "change",
    [lambda frame: frame + b"garbage", lambda frame: frame[:-3], lambda frame: frame + bytes(100)],
    ids=["garbage", "cut", "zeros"],
)
def test_a_zstd_file_that_is_cut_or_continues_as_something_else_is_named(tmp_path, window_log, change):
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(change(zstd_frame(LINES, window_log)))
    with pytest.raises(CorpusError, match=r"cannot read .*rows\.jsonl\.zst: \w.*"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT.encode("utf-16")[:-1], r"cannot read .*rows\.jsonl: 'utf-16-le' codec can't decode"),
        ('{"text": "a\ud800"}'.encode("utf-16", "surrogatepass"), r"cannot read .*rows\.jsonl: 'utf-16-le' codec"),
        (b"\xef\xbb\xbf" + LINES + b'{"text": "\xff"}', r"rows\.jsonl: line 3.* surrogates not allowed"),
        (LINES + b'{"text": "\xff"}', r"rows\.jsonl: line 3 is not JSON: 'utf-8' codec"),
        (LINES + bytes(16), r"rows\.jsonl: line 3 is not JSON"),
        (b'{"text": "a\0"}', r"rows\.jsonl: line 1 is not JSON: Invalid control character"),
        (LINES.replace(b"\n", b"\r"), r"rows\.jsonl: line 1 is not JSON: Extra data"),
    ],
)
def test_what_cannot_be_decoded_is_named(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        read(tmp_path / "rows.jsonl")


def test_a_damaged_archive_and_a_line_without_an_end_are_named(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(b'{"text": "a"}\n' * 100)
    path.write_bytes(whole + whole)
    assert len(read(path)[1]) == 200, "members of one file follow each other"
    path.write_bytes(whole + b"garbage")
    with pytest.raises(CorpusError, match=r"rows\.jsonl\.gz"):
        read(path)
    path.write_bytes(whole[:-20])
    with pytest.raises(CorpusError, match=r"rows\.jsonl\.gz"):
        read(path)
    monkeypatch.setattr(rows, "LONGEST_LINE_BYTES", 1 << 20)
    path.write_bytes(gzip.compress(b"x" * (3 << 20)))
    with pytest.raises(CorpusError, match="line 1 has more than 1 MiB"):
        read(path)
