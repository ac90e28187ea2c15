"""Corpora from every kind of source."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from scoremode import CorpusError
from scoremode.corpora import load_corpus

ROWS = ["", " = Title = \n", "One line\u2028still the same.", "Ünïcode", "last"]
ROWS_SHA256 = hashlib.sha256("\n\n".join(ROWS).encode()).hexdigest()


def write_parquet(path: Path, rows: list[str], column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({column: rows, "label": list(range(len(rows)))}), path)


def write_jsonl(path: Path, rows: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def wikitext_like(tmp_path):
    """A folder laid out as the hub lays out WikiText-2, its test split in two files."""
    folder = tmp_path / "wikitext"
    config = folder / "wikitext-2-raw-v1"
    write_parquet(config / "test-00000-of-00002.parquet", ROWS[:3])
    write_parquet(config / "test-00001-of-00002.parquet", ROWS[3:])
    write_parquet(config / "train-00000-of-00001.parquet", ["training text"])
    return folder


def test_wikitext_from_a_folder_laid_out_like_the_hubs(wikitext_like):
    corpus = load_corpus(str(wikitext_like))
    assert (corpus.name, corpus.fingerprint, corpus.num_rows) == ("wikitext", ROWS_SHA256, len(ROWS))
    assert load_corpus(str(wikitext_like), config="wikitext-2-raw-v1").text == corpus.text


def test_num_samples_takes_the_first_rows(wikitext_like):
    corpus = load_corpus(str(wikitext_like), num_samples=4)
    assert corpus.text == "\n\n = Title = \n\n\nOne line\u2028still the same.\n\nÜnïcode"
    assert corpus.num_rows == 4
    assert "first 4 rows" in corpus.source


def test_split(wikitext_like):
    assert load_corpus(str(wikitext_like), split="train").text == "training text"


def test_a_missing_split_says_which_files_there_are(wikitext_like):
    with pytest.raises(CorpusError, match="train-00000-of-00001"):
        load_corpus(str(wikitext_like), split="validation")


def test_several_configurations_have_to_be_chosen_from(wikitext_like):
    write_parquet(wikitext_like / "wikitext-103-raw-v1" / "test-00000-of-00001.parquet", ["another"])
    with pytest.raises(CorpusError, match="wikitext-103-raw-v1, wikitext-2-raw-v1"):
        load_corpus(str(wikitext_like))
    assert load_corpus(str(wikitext_like), config="wikitext-103-raw-v1").text == "another"
    with pytest.raises(CorpusError, match="no configuration 'v9'"):
        load_corpus(str(wikitext_like), config="v9")


def test_single_files(tmp_path):
    write_parquet(tmp_path / "rows.parquet", ROWS)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.txt").write_bytes("\n\n".join(ROWS).encode())
    for suffix, num_rows in [("parquet", 5), ("jsonl", 5), ("txt", 1)]:
        corpus = load_corpus(str(tmp_path / f"rows.{suffix}"))
        assert (corpus.fingerprint, corpus.num_rows) == (ROWS_SHA256, num_rows)


def test_a_text_file_is_taken_byte_by_byte(tmp_path):
    (tmp_path / "text").write_bytes(b"one\r\ntwo\n")
    assert load_corpus(text_file=tmp_path / "text").text == "one\r\ntwo\n"


def test_literal_text_is_in_the_source_so_that_the_run_can_be_repeated():
    corpus = load_corpus(text="Hello")
    assert corpus.text == "Hello"
    assert "'Hello'" in corpus.source
    assert corpus.fingerprint == "185f8db32271fe25f561a6fc938b2e264306ec304eda518007d1764826381969"


def test_pydoc_is_the_language_reference_in_the_order_of_its_topics():
    from pydoc_data.topics import topics

    corpus = load_corpus("pydoc")
    assert corpus.num_rows == len(topics) > 50
    assert corpus.text.startswith(topics[min(topics)])
    assert corpus.text.endswith("\n\n" + topics[max(topics)])
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in corpus.source


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_a_missing_column_says_which_there_are(tmp_path, name):
    write_parquet(tmp_path / "rows.parquet", ROWS, column="content")
    (tmp_path / "rows.jsonl").write_text('{"content": "x", "label": 1}\n')
    with pytest.raises(CorpusError, match=r"no column 'text'.*content, label"):
        load_corpus(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', "line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 is not a JSON object"),
        ("a.jsonl", b'{"text": 5}\n', "not text"),
        ("a.parquet", b"nonsense", "cannot read"),
        ("a.txt", b"ab\xff", "byte 2 is not UTF-8"),
        ("a.txt", b"", "no text"),
        ("a.docx", b"x", r"\.parquet, \.jsonl, \.txt"),
    ],
    ids=["bad line", "no object", "no text", "bad parquet", "not UTF-8", "empty", "unknown kind"],
)
def test_files_that_cannot_be_read_say_why(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        load_corpus(str(tmp_path / name))


@pytest.mark.parametrize("dataset", ["./nowhere", "/no/where", "nowhere.parquet"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(dataset):
    with pytest.raises(CorpusError, match="no such file or folder"):
        load_corpus(dataset)


def test_a_missing_text_file():
    with pytest.raises(CorpusError, match="No such file"):
        load_corpus(text_file="nowhere.txt")


class Table(dict):
    """As much of `datasets.Dataset` as is used."""

    @property
    def column_names(self):
        return list(self)


def test_the_alias_wikitext_is_wikitext_2_on_the_hub(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return Table(text=ROWS)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_corpus("wikitext").fingerprint == ROWS_SHA256
    load_corpus("wikitext", config="wikitext-103-raw-v1", split="validation")
    load_corpus("some/dataset")
    assert asked == [
        (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test"}),
        (("Salesforce/wikitext", "wikitext-103-raw-v1"), {"split": "validation"}),
        (("some/dataset", None), {"split": "test"}),
    ]


def test_a_hub_out_of_reach_says_how_to_pass_a_local_path(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(CorpusError, match=r"Couldn't reach the Hub.*--dataset PATH"):
        load_corpus("wikitext")


@pytest.mark.parametrize(("module", "dataset"), [("datasets", "wikitext"), ("pyarrow.parquet", "rows.parquet")])
def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch, tmp_path, module, dataset):
    write_parquet(tmp_path / "rows.parquet", ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CorpusError, match=r"pip install 'scoremode\[datasets\]'"):
        load_corpus(dataset)


@pytest.mark.parametrize("sources", [{}, {"dataset": "pydoc", "text": "x"}])
def test_exactly_one_source(sources):
    with pytest.raises(ValueError, match="exactly one"):
        load_corpus(**sources)
