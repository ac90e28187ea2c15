"""JSON lines: one type per column over the whole file, and nothing lost without an error."""

import gzip
import json

import pyarrow as pa
import pytest

from scoremode import CorpusError
from scoremode.corpus import rows
from scoremode.corpus.rows import open_rows
from scoremode.runs import lines


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A few lines are several blocks."""
    monkeypatch.setattr(rows, "_BATCH_ROWS", 2)


def read(path):
    schema, found = open_rows(path)
    batches = list(found)
    assert all(batch.schema == schema for batch in batches)
    return schema, [row for batch in batches for row in batch.to_pylist()]


def test_one_type_per_column_fits_early_and_late_rows(tmp_path):
    """Text that looks like a time stays text."""
    early = {"text": "a", "n": 1, "meta": {"a": 1}, "list": [], "when": "2024-01-01", "all": [{"at": "2024-01-01"}]}
    late = {"text": "b", "n": 2.5, "new": "x", "meta": {"b": [True]}, "list": [1], "when": "yesterday", "all": []}
    (tmp_path / "rows.jsonl").write_text(20 * f"{json.dumps(early)}\n" + 20 * f"{json.dumps(late)}\n")
    schema, rows = read(tmp_path / "rows.jsonl")
    assert schema.field("n").type == pa.float64()
    assert rows[:20] == [{**early, "meta": {"a": 1, "b": None}, "new": None}] * 20
    assert rows[20:] == [{**late, "meta": {"a": None, "b": [True]}}] * 20


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


TEXTS = ["one", "zwei ü\u2028", "x" * 500, "\U0001f600"]
CONTENT = "\n" + "\r\n\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS)
"""Lines may be long or empty, and the last without an end."""


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_the_encodings_of_windows_are_read_from_any_compression(tmp_path, encoding, suffix):
    path = tmp_path / f"rows{suffix}"
    for content, texts in ((CONTENT, TEXTS), ("", []), ("\n", [])):
        with pa.output_stream(str(path), compression="detect") as stream:
            stream.write(content.encode(encoding))
        assert [row["text"] for row in read(path)[1]] == texts


def zstd_frame(content: bytes, window_log: int) -> bytes:
    """Write a frame as in RFC 8878, section 3.1.1: magic number, a descriptor without flags, the window's descriptor,
    and one raw block, which is the last."""
    header = b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3])
    return header + (1 | len(content) << 3).to_bytes(3, "little") + content


LINES = b'{"text": "a"}\n{"text": "b"}\n'
ARCHIVES = {
    **{f"zst window {log}": (".zst", zstd_frame(LINES, log)) for log in (10, 20, 27, 28, 31)},
    "gz": (".gz", gzip.compress(LINES)),
}
"""Reddit's dumps have windows of 2 GiB, 31."""


@pytest.mark.parametrize(("suffix", "content"), ARCHIVES.values(), ids=ARCHIVES)
def test_archives_of_one_or_more_frames_are_read_and_damaged_ones_named(tmp_path, suffix, content):
    path = tmp_path / f"rows.jsonl{suffix}"
    for num_frames in (1, 3):
        path.write_bytes(content * num_frames)
        assert [row["text"] for row in read(path)[1]] == ["a", "b"] * num_frames
    for damaged in (content + b"garbage", content[:-3]):
        path.write_bytes(damaged)
        with pytest.raises(CorpusError, match=rf"cannot read .*rows\.jsonl\{suffix}: \w.*"):
            read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT.encode("utf-16")[:-1], r"cannot read .*rows\.jsonl: 'utf-16-le' codec can't decode"),
        ('{"text": "a\ud800"}'.encode("utf-16", "surrogatepass"), r"cannot read .*rows\.jsonl: 'utf-16-le' codec"),
        (b"\xef\xbb\xbf" + LINES + b'{"text": "\xff"}', r"rows\.jsonl: line 3.* surrogates not allowed"),
        (LINES + b'{"text": "\xff"}', r"rows\.jsonl: line 3.* surrogates not allowed"),
        (LINES + bytes(16), r"rows\.jsonl: line 3 is not JSON"),
        (b'{"text": "a\0"}', r"rows\.jsonl: line 1 is not JSON: Invalid control character"),
        (LINES.replace(b"\n", b"\r"), r"rows\.jsonl: line 1 is not JSON: Extra data"),
    ],
)
def test_what_cannot_be_decoded_is_named(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        read(tmp_path / "rows.jsonl")


def test_a_line_without_an_end_is_named(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl.gz"
    monkeypatch.setattr(lines, "LONGEST_LINE", 1 << 20)
    path.write_bytes(gzip.compress(b"x" * (3 << 20)))
    with pytest.raises(CorpusError, match="line 1 has more than 1 MiB"):
        read(path)
