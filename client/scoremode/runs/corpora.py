"""Texts to measure perplexity on: literal text, local files and folders, Hugging Face datasets, Python's own manual.

The rows of a dataset are joined with a blank line, as the field does for WikiText-2, or as a preset says.
"""

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scoremode.errors import CorpusError, extra
from scoremode.metrics import count_words
from scoremode.runs import presets
from scoremode.runs.conversations import Conversation, read_conversation
from scoremode.runs.presets import Preset
from scoremode.wire.references import CorpusInfo

ROW_SEPARATOR = "\n\n"
DEFAULT_SPLIT = "test"
DEFAULT_COLUMN = "text"

PYDOC = "pydoc"
HUB_ALIASES = {"wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1")}
"""Short names of hub datasets: the repository and its default config."""

_Rows = list[tuple[Any, ...]]
"""Of a dataset: the values of its columns."""
_TOOLS = "tools"
_SUFFIXES = (".parquet", ".jsonl", ".txt")


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text and where it is from."""

    name: str
    text: str
    source: str
    """In words, enough to find the text again."""
    num_rows: int
    """Rows that the text was joined from, 1 for a text that is not a dataset."""
    config: str | None = None
    """Configuration of a dataset; this and the next are None for other texts."""
    split: str | None = None
    preset: Preset | None = None
    """Whose rules it is joined by."""
    documents: tuple[str, ...] = ()
    """What is scored, each without the others as context, where that is not the text as a whole."""
    num_bytes: int | None = None
    """Bytes that bits per byte divide by, and next the words, where they differ from those of the scored text."""
    num_words: int | None = None
    conversations: tuple[Conversation, ...] = ()
    """In the place of a text."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    labels: tuple[str, ...] = ()
    """Of each conversation or document, such as its language; empty without `by`."""

    @property
    def info(self) -> CorpusInfo:
        """What a reference keeps of it."""
        names = CorpusInfo.model_fields.keys() - {"sha256"}
        return CorpusInfo(sha256=self.fingerprint, **{name: getattr(self, name) for name in names})

    @property
    def prompt(self) -> dict[str, Any]:
        """The fields of a request that have it."""
        if self.conversations:
            return self.messages(0, len(self.conversations))
        return {"texts": list(self.documents)} if self.documents else {"prompt": self.text}

    def messages(self, start: int, stop: int) -> dict[str, Any]:
        """The fields of a request that have some of the conversations."""
        some = self.conversations[start:stop]
        return {
            "messages": [each.messages for each in some],
            "tools": [each.tools for each in some] if any(each.tools for each in some) else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    @property
    def fingerprint(self) -> str:
        """sha256 of the text in UTF-8, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_corpus(
    dataset: str | None = None,
    *,
    text: str | None = None,
    text_file: str | Path | None = None,
    config: str | None = None,
    split: str = DEFAULT_SPLIT,
    column: str = DEFAULT_COLUMN,
    num_samples: int | None = None,
    preset: Preset | None = None,
    messages: str | None = None,
    by: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Corpus:
    """Load a corpus from one of `dataset`, `text` and `text_file` (UTF-8).

    Args:
        dataset: `pydoc` (the Python language reference in the standard library); an alias such as `wikitext`; a path
            to a parquet, jsonl or txt file, or to a folder of them laid out like the hub's; or a name on the hub.
            A folder called `wikitext` is `./wikitext`.
        config: Configuration of the dataset; a subfolder of a local one. It has a `split`, and the text in a `column`.
        num_samples: Take the first rows only.
        preset: Join it as this tool does.
        messages: Column of the dataset that holds conversations, in the place of `column`; their tools are in the
            column `tools`, if there is one.
        by: Column of the dataset that holds a label of each row. Rows are then not joined.

    Raises:
        CorpusError: the text cannot be read, or there is none.
        ValueError: not exactly one source.
    """
    if sum(source is not None for source in (dataset, text, text_file)) != 1:
        raise ValueError("exactly one of dataset, text and text_file is needed")
    if dataset in (None, PYDOC) and (messages or by):
        raise CorpusError(f"{messages or by!r} is a column, and {dataset or 'a text'} has none")
    values: _Rows
    if text is not None:
        corpus, values = Corpus("text", "", f"the text {text!r}", 1), [(text,)]
    elif text_file is not None:
        path = Path(text_file)
        corpus, values = Corpus(path.name, "", f"file {path.resolve()}", 1), [(_read_text(path),)]
    else:
        assert dataset is not None
        columns = [messages or column, *([by] if by else []), *([_TOOLS] if messages else [])]
        corpus, values = _load_dataset(dataset, config, split, columns)
        values = values[:num_samples]
    # Only datasets have rows of several columns.
    corpus = replace(corpus, num_rows=len(values), labels=tuple(str(row[1]) for row in values if by))
    if messages is not None:
        return _with_conversations(corpus, values, chat_template_kwargs)
    rows = [row[0] for row in values]
    if not any(rows):
        raise CorpusError(f"no text in {corpus.source}")
    if num_samples is not None and dataset is not None:
        corpus = replace(corpus, source=f"{corpus.source}, first {len(rows)} rows")
    is_raw = preset in ("llama.cpp", "lm-eval")
    joined = presets.as_lines(rows) if is_raw else ROW_SEPARATOR.join(rows)
    corpus = replace(corpus, text=joined, preset=preset)
    if by is not None:
        return replace(corpus, documents=tuple(rows))
    if preset == "llama.cpp":
        # It reads a file without the newline at its end.
        return replace(corpus, documents=(joined.removesuffix("\n"),))
    if preset == "lm-eval":
        pages = presets.lm_eval_pages(joined)
        return replace(
            corpus,
            documents=tuple(map(presets.detokenized, pages)),
            num_bytes=sum(len(page.encode()) for page in pages),
            num_words=sum(map(count_words, pages)),
        )
    return corpus


def _with_conversations(corpus: Corpus, rows: _Rows, chat_template_kwargs: Mapping[str, Any] | None) -> Corpus:
    conversations = tuple(
        read_conversation(row[0], row[-1], f"row {number} of {corpus.source}") for number, row in enumerate(rows, 1)
    )
    if not conversations:
        raise CorpusError(f"no conversation in {corpus.source}")
    # What tells it from others.
    lines = [json.dumps([each.messages, each.tools, chat_template_kwargs], default=str) for each in conversations]
    return replace(
        corpus,
        text="\n".join(lines),
        source=f"{corpus.source}, {len(rows)} conversations",
        conversations=conversations,
        chat_template_kwargs=chat_template_kwargs,
    )


def local_path(dataset: str, folder: Path = Path()) -> Path | None:
    """The file or folder in `folder` that a dataset's name means, if any; that of an alias is never one."""
    path = folder / Path(dataset).expanduser()
    return path if dataset not in (PYDOC, *HUB_ALIASES) and path.exists() else None


def _load_dataset(dataset: str, config: str | None, split: str, columns: list[str]) -> tuple[Corpus, _Rows]:
    """Its rows, and a corpus that has none of their text yet."""
    if dataset == PYDOC:
        from pydoc_data.topics import topics

        source = f"pydoc_data.topics of Python {platform.python_version()}"
        return Corpus(PYDOC, "", source, len(topics)), [(topics[name],) for name in sorted(topics)]
    if (path := local_path(dataset)) is not None:
        return _load_local(path, config, split, columns)
    if Path(dataset).suffix in _SUFFIXES or dataset.startswith((".", "/", "~")):
        raise CorpusError(f"no such file or folder: {dataset}")
    return _load_from_hub(dataset, config, split, columns)


def _load_local(path: Path, config: str | None, split: str, columns: list[str]) -> tuple[Corpus, _Rows]:
    folder = None if path.is_file() else _config_folder(path, config)
    files = [path]
    if folder is not None:
        # By the hub's naming: `test.parquet`, `test-00000-of-00002.parquet`, ..., in order.
        files = [file for file in _data_files(folder) if file.stem == split or file.stem.startswith(f"{split}-")]
        if not files:
            raise CorpusError(f"no split {split!r} in {folder}; its files are: {_names(_data_files(folder))}")
    rows = [row for file in files for row in _read_columns(file, columns)]
    source = f"{', '.join(str(file.resolve()) for file in files)}, column {columns[0]}"
    if folder is None:
        return Corpus(path.name, "", source, len(rows)), rows
    return Corpus(path.resolve().name, "", source, len(rows), None if folder == path else folder.name, split), rows


def _config_folder(folder: Path, config: str | None) -> Path:
    """The folder whose files hold the splits: `folder` itself, or the subfolder of the configuration."""
    subfolders = sorted(entry for entry in folder.iterdir() if entry.is_dir() and _data_files(entry))
    if config is not None:
        if not (folder / config).is_dir():
            raise CorpusError(f"no configuration {config!r} in {folder}; there are: {_names(subfolders)}")
        return folder / config
    if _data_files(folder):
        return folder
    if len(subfolders) != 1:
        raise CorpusError(f"{folder} has several or no configurations, name one of: {_names(subfolders)}")
    return subfolders[0]


def _data_files(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.suffix in _SUFFIXES)


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths) or "none"


def read_rows(file: Path, column: str) -> list[str]:
    """The texts in a column of a parquet or jsonl file, or the text of a txt file."""
    return [text for (text,) in _read_columns(file, [column])]


def _read_columns(file: Path, columns: list[str]) -> _Rows:
    """The values of columns, of which `tools` may be missing."""
    if file.suffix not in _SUFFIXES:
        raise CorpusError(f"cannot read {file}: its name should end in one of {', '.join(_SUFFIXES)}")
    if file.suffix == ".parquet":
        with extra("datasets"):
            import pyarrow.parquet as pq
        try:
            names = pq.read_schema(file).names
            _check_columns(columns, names, str(file))
            table = pq.read_table(file, columns=[name for name in dict.fromkeys(columns) if name in names])
        except (OSError, ValueError) as error:
            raise CorpusError(f"cannot read {file}: {error}") from error
        return _checked_rows(table.to_pylist(), columns, str(file))
    text = _read_text(file)
    if file.suffix == ".txt":
        if len(columns) > 1:
            raise CorpusError(f"{file} is a text, without columns")
        return [(text,)]
    rows = []
    # Not str.splitlines: a row may hold U+2028 and its like.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(json_row(line, f"cannot read {file}: line {number}"))
            _check_columns(columns, rows[-1], f"{file}, line {number}")
    return _checked_rows(rows, columns, str(file))


def json_row(line: str | bytes, where: str) -> dict[str, Any]:
    """The row that is a line of a jsonl file."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise CorpusError(f"{where} is not a JSON object")
    return row


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise CorpusError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CorpusError(f"cannot read {file}: byte {error.start} is not UTF-8") from error


def _load_from_hub(dataset: str, config: str | None, split: str, columns: list[str]) -> tuple[Corpus, _Rows]:
    repository, default_config = HUB_ALIASES.get(dataset, (dataset, None))
    config = config or default_config
    with extra("datasets"):
        import datasets
    try:
        table = datasets.load_dataset(repository, config, split=split)
    # What can go wrong comes from half a dozen libraries below `datasets`, each with its own exceptions.
    except Exception as error:
        raise CorpusError(
            f"cannot load {repository} from the Hugging Face hub: {error}. Without the hub, pass a copy: "
            "`--dataset PATH`, a folder laid out like the hub's or a parquet, jsonl or txt file"
        ) from error
    _check_columns(columns, table.column_names, repository)
    rows = _checked_rows(list(table), columns, repository)
    source = f"hub dataset {repository}, config {config or 'default'}, split {split}, column {columns[0]}"
    return Corpus(dataset, "", source, len(rows), config, split), rows


def _check_columns(columns: list[str], names: Iterable[str], where: str) -> None:
    for column in columns:
        if column not in names and column != _TOOLS:
            raise CorpusError(f"no column {column!r} in {where}; there are: {', '.join(names)}")


def _checked_rows(rows: list[dict[str, Any]], columns: list[str], where: str) -> _Rows:
    if columns[-1] != _TOOLS and not all(isinstance(row[columns[0]], str) for row in rows):
        raise CorpusError(f"column {columns[0]!r} of {where} has rows that are not text")
    return [tuple(row.get(column) for column in columns) for row in rows]
