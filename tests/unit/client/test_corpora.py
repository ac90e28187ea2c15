"""Corpora from every kind of source."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call

import pyarrow
import pyarrow.parquet
import pytest

from scoremode import CorpusError
from scoremode.runs import load_corpus

ROWS = ["", " = Title = \n", "One line\u2028still the same.", "Ünïcode", "last"]
ROWS_SHA256 = hashlib.sha256("\n\n".join(ROWS).encode()).hexdigest()


def write_parquet(path: Path, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, "label": list(range(len(rows)))}), path)


def test_a_folder_is_read_as_the_hub_lays_it_out(tmp_path):
    """As WikiText-2, its test split in two files."""
    wikitext_like = tmp_path / "wikitext"
    splits = {
        "test-00000-of-00002": ROWS[:3],
        "test-00001-of-00002": ROWS[3:],
        "train-00000-of-00001": ["training text"],
    }
    for name, rows in splits.items():
        write_parquet(wikitext_like / "wikitext-2-raw-v1" / f"{name}.parquet", rows)
    corpus = load_corpus(str(wikitext_like))
    assert (corpus.name, corpus.fingerprint, corpus.num_rows) == ("wikitext", ROWS_SHA256, len(ROWS))
    assert load_corpus(str(wikitext_like), split="train").text == "training text"
    with pytest.raises(CorpusError, match="train-00000-of-00001"):
        load_corpus(str(wikitext_like), split="validation")
    write_parquet(wikitext_like / "wikitext-103-raw-v1" / "test-00000-of-00001.parquet", ["another"])
    with pytest.raises(CorpusError, match="wikitext-103-raw-v1, wikitext-2-raw-v1"):
        load_corpus(str(wikitext_like))
    assert load_corpus(str(wikitext_like), config="wikitext-103-raw-v1").text == "another"
    with pytest.raises(CorpusError, match="no configuration 'v9'"):
        load_corpus(str(wikitext_like), config="v9")


def test_a_single_file_is_read_by_its_suffix(tmp_path):
    write_parquet(tmp_path / "rows.parquet", ROWS)
    lines = [json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "rows.txt").write_bytes("\n\n".join(ROWS).encode())
    for name, num_rows in (("rows.parquet", 5), ("rows.jsonl", 5), ("rows.txt", 1)):
        corpus = load_corpus(str(tmp_path / name))
        assert (corpus.fingerprint, corpus.num_rows) == (ROWS_SHA256, num_rows)
    (tmp_path / "text").write_bytes(b"one\r\ntwo\n")
    assert load_corpus(text_file=tmp_path / "text").text == "one\r\ntwo\n"


LINES = '{"text": "one"}\n{"text": "zwei ü"}\n'


@pytest.mark.parametrize(
    ("encoding", "mark"),
    [
        *(("utf-8", b""), ("utf-8-sig", b""), ("utf-16", b""), ("utf-16-be", b"\xfe\xff")),
        *(("utf-32", b""), ("utf-32-be", b"\0\0\xfe\xff")),
    ],
)
def test_files_may_be_in_the_encodings_of_windows(tmp_path, encoding, mark):
    # PowerShell's `>` writes UTF-16 with a mark, and ends lines with both characters.
    for name, content in {"a.jsonl": LINES.replace("\n", "\r\n"), "a.txt": "one\n\nzwei ü"}.items():
        (tmp_path / name).write_bytes(mark + content.encode(encoding))
        assert load_corpus(str(tmp_path / name)).text == "one\n\nzwei ü"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"dataset": "pydoc", "by": "topic"}, r"'topic' is a column, and .* has none"),
        ({"text": "x", "by": "topic"}, r"'topic' is a column, and .* has none"),
        ({"text": "of a terminal: \udcff"}, "not valid Unicode"),
    ],
)
def test_texts_without_columns_or_outside_unicode_are_refused(source: dict[str, str], message: str):
    with pytest.raises(CorpusError, match=message):
        load_corpus(**source)


NOT_UTF8 = pyarrow.array([b"fine", b"\xff\xfe"]).view(pyarrow.string())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 5}\n', r"row 2 of .*a\.jsonl: column 'text' is not text but int"),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', "row 2 of .*not text but null"),
        ("a.jsonl", b'{"text": null, "body": "x"}\n' * 2, r"column 'text' of .*a\.jsonl is null in every row"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "a\\ud800"}\n', "row 2 of .*not valid Unicode at character 1"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "a\xff"}\n', "row 2 of .*not valid Unicode at character 1"),
        ("a.jsonl", b'{"text": "x"}\n{"texts": "y"}\n', "no column 'text' in row 2 of "),
        ("a.jsonl", LINES.encode("utf-16")[:-1], r"a\.jsonl at row 2: 'utf-16-le' codec"),
        ("text.parquet", b"no parquet", "cannot read .*magic bytes"),
        ("labels.parquet", pyarrow.table({"content": ROWS, "label": [1] * 5}), "no column 'text'.*content, label"),
        ("a.parquet", pyarrow.table({"text": NOT_UTF8, "other": NOT_UTF8}), r"a\.parquet at row 2: 'utf-8' codec"),
        ("a.txt", b"ab\xff", "byte 2 is not UTF-8"),
        ("a.docx", b"x", r"\.parquet, \.jsonl, \.txt"),
    ],
)
def test_files_that_cannot_be_read_are_an_error(tmp_path, name, content, message):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        pyarrow.parquet.write_table(content, tmp_path / name)
    with pytest.raises(CorpusError, match=message):
        load_corpus(str(tmp_path / name))


@pytest.fixture
def load_dataset(monkeypatch):
    """The hub's function; its table has a column `text`."""
    table = MagicMock(column_names=["text"])
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=(load := Mock(return_value=table))))
    return load


def test_of_a_sample_no_more_rows_are_read(tmp_path, load_dataset):
    folder = tmp_path / "texts"
    write_parquet(folder / "test-00000-of-00002.parquet", ["one", "two", None])
    (folder / "test-00001-of-00002.parquet").write_bytes(b"broken")
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "one"}\n{"text": "two"}\n{"text": \xff\n')
    rows = iter([{"text": "one"}, {"text": "two"}, {"text": "three"}])
    load_dataset.return_value.__iter__.return_value = rows
    for path in (str(folder), str(tmp_path / "rows.jsonl"), "some/dataset"):
        assert load_corpus(path, num_samples=2).text == "one\n\ntwo"
    assert next(rows) == {"text": "three"}
    assert load_dataset.call_args.kwargs == {"split": "test", "streaming": True}


def test_wikitext_is_wikitext_2_on_the_hub(load_dataset):
    load_dataset.return_value.__iter__.return_value = [{"text": row} for row in ROWS]
    assert load_corpus("wikitext").fingerprint == ROWS_SHA256
    load_corpus("some/dataset")
    assert load_dataset.call_args_list == [
        call("Salesforce/wikitext", "wikitext-2-raw-v1", split="test"),
        call("some/dataset", None, split="test"),
    ]
