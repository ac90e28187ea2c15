"""Loads texts to measure: literal text, local files and folders, Hugging Face datasets, and Python's manual.

A dataset's rows are joined with a blank line between them, as is usual for WikiText-2, or by the rules of a preset.
"""

import hashlib
import json
import logging
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from scoremode._texts import encoding_of, valid_text
from scoremode.errors import BadRequestError, CorpusError, ScoremodeError, extra, file_errors
from scoremode.metrics import count_words
from scoremode.runs import presets
from scoremode.runs.conversations import MEDIA, OPTIONAL_COLUMNS, RENDERED, Conversation, read_conversation
from scoremode.runs.lines import json_lines
from scoremode.runs.presets import Preset
from scoremode.wire import Answers, CorpusInfo

DEFAULT_SPLIT = "test"
DEFAULT_COLUMN = "text"

PYDOC = "pydoc"
HUB_ALIASES = {"wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1")}
"""Short names of hub datasets: the repository and its default config."""

PROMPT_COLUMNS = ("messages", "conversations", "prompt")
"""Columns that may have prompts, in the order of search; only the last may have texts."""

MAX_LABEL = 1024
"""The server's limit on the characters of a label."""

_Row = tuple[str, Mapping[str, Any]]
"""A row's place, as error messages name it, and its values by column."""
_SUFFIXES = (".parquet", ".jsonl", ".txt")

_CATEGORIES = Path(__file__).with_name("categories")
"""Folder of the texts by category; its SOURCES.md describes them. A line `%` separates documents, as in
`fortune` files; none follows the last."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text and its source."""

    name: str
    text: str
    source: str
    """Describes the text well enough to find it again."""
    num_rows: int = 1
    """Rows that the text was joined from; 1 if it is not from a dataset."""
    config: str | None = None
    """The dataset's configuration; `config` and `split` are None for other texts."""
    split: str | None = None
    preset: Preset | None = None
    """The tool whose rules join the text."""
    max_windows: int | None = None
    """How many of the first windows are measured; None for all that the preset cuts."""
    documents: tuple[str, ...] = ()
    """Texts that are scored in place of `text`, each without the others as context; empty if `text` is scored."""
    num_bytes: int | None = None
    """The number of bytes that bits per byte are computed with. It and `num_words` are None if they are those of the
    scored text."""
    num_words: int | None = None
    conversations: tuple[Conversation, ...] = ()
    """Conversations that are scored in place of `text`."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    by: str | None = None
    """The column that has the labels."""
    labels: tuple[str, ...] = ()
    """One label per conversation or document, such as its language; empty without `by`."""
    answers: Answers | None = None
    """A model's answers, if the conversations or documents are prompts."""

    @property
    def info(self) -> CorpusInfo:
        """The description that is stored with a reference."""
        names = CorpusInfo.model_fields.keys() - {"sha256"}
        return CorpusInfo(sha256=self.fingerprint, **{name: getattr(self, name) for name in names})

    @property
    def prompt(self) -> dict[str, Any]:
        """The fields of a request for the whole corpus."""
        if self.answers is not None:
            return {"answers": self.answers}
        if self.conversations:
            return self.messages(0, len(self.conversations))
        return {"texts": list(self.documents)} if self.documents else {"prompt": self.text}

    def messages(self, start: int, stop: int) -> dict[str, Any]:
        """The fields of a request for the conversations [start, stop)."""
        some = self.conversations[start:stop]
        return {
            "messages": [item.messages for item in some],
            "tools": [item.tools for item in some] if any(item.tools for item in some) else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    def named(self, error: BadRequestError, start: int = 0) -> ScoremodeError:
        """Turn a server's error about a conversation into one that names its row; other errors stay as they are.
        `start` is the index of the request's first conversation."""
        match = re.match(r"messages\[(\d+)\](?:\[(\d+)\])?", str(error))
        if match is None or not self.conversations:
            return error
        message = "" if match[2] is None else f", message {int(match[2]) + 1}"
        where = self.conversations[start + int(match[1])].where
        return CorpusError(f"{where}{message}{str(error)[match.end() :]}")

    @property
    def fingerprint(self) -> str:
        """sha256 of the text in UTF-8, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def warn_of_unscored(self, scored: Iterable[int]) -> None:
        """Log which conversations or documents have no window; `scored` are the indices of those that have one."""
        num_rows = len(self.conversations or self.documents)
        reason = "have nothing to score and are left out"
        if self.answers is not None:
            reason = "have an empty answer, which keeps its place with length 0"
        self.warn_of_rows({*range(num_rows)} - {*scored}, reason)

    def warn_of_rows(self, indices: Collection[int], reason: str) -> None:
        """Log a warning about some conversations or documents, if there are any; `reason` completes the sentence."""
        if indices:
            numbers = ", ".join(str(index + 1) for index in sorted(indices)[:10])
            numbers += ", ..." if len(indices) > 10 else ""
            num_rows = len(self.conversations or self.documents)
            _log.warning("%d of %d rows of %s %s: %s", len(indices), num_rows, self.source, reason, numbers)


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
    max_windows: int | None = None,
    messages: str | None = None,
    by: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Corpus:
    """Load a corpus from one of `dataset`, `text` and `text_file`; the preset `categories` needs none of them.

    Args:
        dataset: `pydoc` (the Python language reference in the standard library); an alias such as `wikitext`; a path
            to a parquet, jsonl or txt file, or to a folder of them laid out like the hub's; or a name on the hub.
            Write `./wikitext` for a local folder of that name.
        text: The text itself.
        text_file: Path of a file that has the text, in UTF-8, or in UTF-16 or UTF-32 with a byte order mark.
        config: Configuration of the dataset; for a local dataset, a subfolder.
        split: Split of the dataset.
        column: Column of the dataset that has the text.
        num_samples: Read only this many rows.
        preset: Join the rows as this tool does. `categories` has its own texts.
        max_windows: Stored in the corpus, for its description; `presets.window_settings` applies the limit.
        messages: Column of the dataset that has conversations, used in place of `column`. A column `tools` may have
            their tools, and a column `system` a system message.
        by: Column of the dataset that has a label for each row. Rows are then not joined.
        chat_template_kwargs: Passed to the chat template.

    Raises:
        CorpusError: the text cannot be read, or is empty.
        ValueError: more or fewer than one source is given.
    """
    is_own_text = preset == presets.CATEGORIES
    if sum(source is not None for source in (dataset, text, text_file)) != (0 if is_own_text else 1):
        raise ValueError("exactly one of dataset, text and text_file is needed, or preset 'categories' alone")
    if dataset in (None, PYDOC) and (messages or by):
        raise CorpusError(f"{messages or by!r} is a column, and {dataset or 'a text'} has none")
    if is_own_text:
        return _load_categories()
    rows: list[_Row]
    if text is not None:
        corpus, rows = Corpus("text", "", f"the text {text!r}"), [("the text", {column: text})]
    elif text_file is not None:
        path = Path(text_file)
        corpus, rows = Corpus(path.name, "", f"file {path.name}"), [(str(path), {column: _read_text(path)})]
    else:
        assert dataset is not None
        columns = [messages or column, *([by] if by else [])]
        corpus, rows = _load_dataset(dataset, config, split, columns, OPTIONAL_COLUMNS if messages else (), num_samples)
        _check_filled(rows, columns, dataset)
    # `by` is only possible for datasets.
    labels = tuple(_label(values[by]) for _, values in rows) if by else ()
    corpus = replace(corpus, num_rows=len(rows), by=by, labels=labels)
    if messages is not None:
        return _with_conversations(corpus, rows, messages, chat_template_kwargs)
    texts = [valid_text(values[column], f"{where}: column {column!r}") for where, values in rows]
    if not any(texts):
        raise CorpusError(f"no text in {corpus.source}")
    if num_samples is not None and dataset is not None:
        corpus = replace(corpus, source=f"{corpus.source}, first {len(texts)} rows")
    joined = presets.as_lines(texts) if preset in ("llama.cpp", "lm-eval") else "\n\n".join(texts)
    corpus = replace(corpus, text=joined, preset=preset, max_windows=max_windows)
    if by is not None:
        return replace(corpus, documents=tuple(texts))
    if preset == "llama.cpp":
        # llama.cpp removes the newline at a file's end.
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


def _load_categories() -> Corpus:
    """Load the texts that come with the package. The hash is that of the files, joined in the order of names."""
    files = {file.stem: file.read_bytes().decode() for file in sorted(_CATEGORIES.glob("*.txt"))}
    rows = [(name, text) for name, file in files.items() for text in file.removesuffix("\n").split("\n%\n")]
    return Corpus(
        f"{presets.CATEGORIES} v{presets.CATEGORIES_VERSION}",
        "".join(files.values()),
        f"the texts of {len(files)} categories that come with Scoremode",
        num_rows=len(rows),
        preset=presets.CATEGORIES,
        documents=tuple(text for _, text in rows),
        by="category",
        labels=tuple(name for name, _ in rows),
    )


def load_prompts(
    path: Path,
    *,
    messages: str | None = None,
    by: str | None = None,
    num_samples: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Corpus:
    """Load prompts for a model to answer, as conversations or documents.

    Args:
        path: A jsonl or parquet file.
        messages: Column that has conversations; by default the first of PROMPT_COLUMNS that has a value in any row.
            Only the column `prompt` may have texts instead. A last message of the assistant is left out.
        by: This and the arguments after it are as for `load_corpus`.

    Raises:
        CorpusError: the file cannot be read, has no such column or no row, or a row has no prompt.
    """
    columns = [name for name in (messages, by) if name]
    rows = list(islice(read_file(path, columns, [*PROMPT_COLUMNS, *OPTIONAL_COLUMNS]), num_samples))
    _check_filled(rows, columns, path.name)
    column = messages or next((name for name in PROMPT_COLUMNS if any(row.get(name) for _, row in rows)), None)
    if column is None:
        raise CorpusError(
            f"--prompts: {path} has no value in any of the columns {', '.join(PROMPT_COLUMNS)}: name another column "
            "with --messages COLUMN"
        )
    is_text = messages is None and column == "prompt" and not any(isinstance(row.get(column), list) for _, row in rows)
    if is_text and chat_template_kwargs:
        raise CorpusError(f"--chat-template-kwargs is for conversations, but column {column!r} of {path} has texts")
    labels = tuple(_label(values[by]) for _, values in rows) if by else ()
    if long := [where for (where, _), label in zip(rows, labels, strict=False) if len(label) > MAX_LABEL]:
        raise CorpusError(f"{long[0]}: column {by!r} has a label of more than {MAX_LABEL:,} characters")
    corpus = Corpus(path.name, "", f"{path.name}, column {column}", num_rows=len(rows), by=by, labels=labels)
    if not is_text:
        return _with_conversations(corpus, rows, column, chat_template_kwargs, are_prompts=True)
    texts = tuple(valid_text(values.get(column), f"{where}: column {column!r}") for where, values in rows)
    return replace(corpus, text="\n".join(map(json.dumps, texts)), documents=texts)


def _check_filled(rows: list[_Row], columns: Iterable[str], where: str) -> None:
    """Raise CorpusError for a column that is null in every row, such as one that only the dataset's other files use."""
    for column in columns:
        if rows and all(values[column] is None for _, values in rows):
            raise CorpusError(f"column {column!r} of {where} is null in every row: name another column")


def _label(value: Any) -> str:
    return "(no label)" if value in (None, "") else str(value)


def _with_conversations(
    corpus: Corpus,
    rows: list[_Row],
    column: str,
    chat_template_kwargs: Mapping[str, Any] | None,
    *,
    are_prompts: bool = False,
) -> Corpus:
    if empty_row := next((where for where, values in rows if values.get(column) is None), None):
        raise CorpusError(f"{empty_row}: column {column!r} is null, not a list of messages as in other rows")
    conversations = tuple(read_conversation(values, column, where, is_prompt=are_prompts) for where, values in rows)
    if not conversations:
        raise CorpusError(f"no conversation in {corpus.source}")
    fields = {name for conversation in conversations for message in conversation.messages for name in message}
    if unused := sorted(fields - RENDERED):
        _log.warning(
            "fields of messages in %s are not used%s: %s",
            corpus.source,
            "" if are_prompts else ", and every turn of the assistant is scored",
            ", ".join(unused),
        )
    # This text identifies the corpus by its hash; it is not scored.
    lines = [json.dumps([item.messages, item.tools, chat_template_kwargs], default=str) for item in conversations]
    return replace(
        corpus,
        text="\n".join(lines),
        source=f"{corpus.source}, {len(rows)} conversations",
        conversations=conversations,
        chat_template_kwargs=chat_template_kwargs,
    )


def local_path(dataset: str, folder: Path = Path()) -> Path | None:
    """The file or folder in `folder` with a dataset's name; None if there is none, and for aliases."""
    path = folder / Path(dataset).expanduser()
    return path if dataset not in (PYDOC, *HUB_ALIASES) and path.exists() else None


def _load_dataset(
    dataset: str,
    config: str | None,
    split: str,
    columns: list[str],
    optional: Collection[str],
    num_samples: int | None,
) -> tuple[Corpus, list[_Row]]:
    """Load a dataset's first rows, and describe it as a corpus without text."""
    if dataset == PYDOC:
        from pydoc_data.topics import topics

        source = f"pydoc_data.topics of Python {platform.python_version()}"
        rows: list[_Row] = [(name, {columns[0]: topics[name]}) for name in sorted(topics)]
        return Corpus(PYDOC, "", source), rows[:num_samples]
    if (path := local_path(dataset)) is not None:
        return _load_local(path, config, split, columns, optional, num_samples)
    if Path(dataset).suffix in _SUFFIXES or dataset.startswith((".", "/", "~")):
        raise CorpusError(f"no such file or folder: {dataset}")
    return _load_from_hub(dataset, config, split, columns, num_samples)


def _load_local(
    path: Path,
    config: str | None,
    split: str,
    columns: list[str],
    optional: Collection[str],
    num_samples: int | None,
) -> tuple[Corpus, list[_Row]]:
    folder = None if path.is_file() else _config_folder(path, config)
    files = [path]
    if folder is not None:
        # The hub names files `test.parquet`, or in order `test-00000-of-00002.parquet`, ...
        files = [file for file in _data_files(folder) if file.stem == split or file.stem.startswith(f"{split}-")]
        if not files:
            raise CorpusError(f"no split {split!r} in {folder}; its files are: {_names(_data_files(folder))}")
    rows = list(islice((row for file in files for row in read_file(file, columns, optional)), num_samples))
    source = f"{_names(files)}, column {columns[0]}"
    if folder is None:
        return Corpus(path.name, "", source), rows
    config = None if folder == path else folder.name
    return Corpus(path.resolve().name, "", source, config=config, split=split), rows


def _config_folder(folder: Path, config: str | None) -> Path:
    """The folder with the files of the splits: `folder` itself, or the configuration's subfolder."""
    subfolders = sorted(entry for entry in folder.iterdir() if entry.is_dir() and _data_files(entry))
    if config is not None:
        if not (folder / config).is_dir():
            raise CorpusError(f"no configuration {config!r} in {folder}; there are: {_names(subfolders)}")
        return folder / config
    if _data_files(folder):
        return folder
    if len(subfolders) != 1:
        raise CorpusError(f"{folder} does not have exactly one configuration; name one of: {_names(subfolders)}")
    return subfolders[0]


def _data_files(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.suffix in _SUFFIXES)


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths) or "none"


def read_rows(file: Path, column: str) -> list[str]:
    """The texts in a column of a parquet or jsonl file, or the text of a txt file."""
    rows = read_file(file, [column])
    return [valid_text(values[column], f"{where}: column {column!r}") for where, values in rows]


def read_file(file: Path, columns: list[str], optional: Collection[str] = ()) -> Iterator[_Row]:
    """Yield the rows of a file. A row has all `columns`, and each of the `optional` ones that exists in the file."""
    if file.suffix == ".parquet":
        rows = _parquet_rows(file, columns, optional)
    elif file.suffix == ".jsonl":
        rows = (row for _, row in json_lines(file))
    elif file.suffix != ".txt":
        raise CorpusError(f"cannot read {file}: its name should end in one of {', '.join(_SUFFIXES)}")
    elif len(columns) > 1 or optional:
        raise CorpusError(f"{file} is a text, without columns")
    else:
        rows = iter([{columns[0]: _read_text(file)}])
    number = 0
    try:
        for number, values in enumerate(rows, 1):
            _check_columns(columns, values, f"row {number} of {file}")
            yield f"row {number} of {file}", values
    except (OSError, ValueError, RuntimeError) as error:
        raise CorpusError(f"cannot read {file} at row {number + 1}: {error}") from error


def _parquet_rows(file: Path, columns: list[str], optional: Collection[str]) -> Iterator[dict[str, Any]]:
    with extra("datasets"):
        import pyarrow.parquet as pq
    with pq.ParquetFile(file) as table:
        names = table.schema_arrow.names
        _check_columns(columns, names, str(file))
        present = {*optional} & {*names}
        # Media are not read: it is enough to know whether there are any.
        media = dict.fromkeys((name for name in present & {*MEDIA} if _has_values(table, name)), True)
        for batch in table.iter_batches(256, columns=[*dict.fromkeys([*columns, *present - {*MEDIA}])]):
            for index in range(batch.num_rows):
                yield media | {name: _without_nulls(batch.column(name)[index].as_py()) for name in batch.schema.names}


def _has_values(table: Any, column: str) -> bool:
    """Whether a parquet file's column, or a field nested in it, may have values: its statistics do not say that all are
    null."""
    groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    return any(
        chunk.path_in_schema.partition(".")[0] == column
        and (chunk.statistics is None or chunk.statistics.null_count != chunk.num_values)
        for chunk in chunks
    )


def _without_nulls(value: Any) -> Any:
    """Remove null fields from a table's value. All objects in a column have the same fields, and unused ones are
    null."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _read_text(file: Path) -> str:
    try:
        with file_errors(CorpusError, f"read {file}"):
            return file.read_bytes().decode(encoding_of(file))
    except UnicodeDecodeError as error:
        raise CorpusError(f"cannot read {file}: byte {error.start} is not {error.encoding.upper()}") from error


def _load_from_hub(
    dataset: str, config: str | None, split: str, columns: list[str], num_samples: int | None
) -> tuple[Corpus, list[_Row]]:
    repository, default_config = HUB_ALIASES.get(dataset, (dataset, None))
    config = config or default_config
    with extra("datasets"):
        import datasets
    # Stream, so that only the first rows are downloaded.
    streaming = {} if num_samples is None else {"streaming": True}
    try:
        table = datasets.load_dataset(repository, config, split=split, **streaming)
        # A stream may not know its column names.
        _check_columns(columns, table.column_names or next(iter(table), {}), repository)
        records = list(islice(table, num_samples))
    except CorpusError:
        raise
    # Errors come from half a dozen libraries that `datasets` uses, each with its own exceptions.
    except Exception as error:
        raise CorpusError(
            f"cannot load {repository} from the Hugging Face hub: {error}. Without the hub, pass a copy: "
            "`--dataset PATH`, a folder laid out like the hub's or a parquet, jsonl or txt file"
        ) from error
    rows: list[_Row] = [
        (f"row {number} of {repository}", {name: _without_nulls(value) for name, value in row.items()})
        for number, row in enumerate(records, 1)
    ]
    source = f"hub dataset {repository}, config {config or 'default'}, split {split}, column {columns[0]}"
    return Corpus(dataset, "", source, config=config, split=split), rows


def _check_columns(columns: list[str], names: Iterable[str], where: str) -> None:
    for column in columns:
        if column not in names:
            raise CorpusError(f"no column {column!r} in {where}; there are: {', '.join(names)}")
