"""Finds the files that a run reads, and counts its progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scoremode.errors import CorpusError
from scoremode.metrics import exp

SUFFIXES = (".parquet", ".jsonl", ".jsonl.zst", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class InputFile:
    path: Path
    name: str
    """Path relative to the input folder, with `/`; the file's own name if the file itself is the input."""

    @property
    def output_name(self) -> str:
        """The path of this file's output, relative to the output folder."""
        return f"{self.name.removesuffix(_suffix(self.name) or '')}.parquet"


def find_inputs(paths: Sequence[Path], output: Path) -> list[InputFile]:
    """Find the files at these paths, and in folders at these paths at any depth, in order.

    In a folder, names that begin with `.` or `_` are skipped. CorpusError if no file is found, one has another suffix,
    two would become one output, or the output would be read.
    """
    files = [file for path in paths for file in _files_of(path, output)]
    sources: dict[str, Path] = {}
    for file in files:
        if (other := sources.setdefault(file.output_name, file.path)) is not file.path:
            raise CorpusError(f"{other} and {file.path} would both become {file.output_name}")
    return files


def _files_of(path: Path, output: Path) -> list[InputFile]:
    if path.is_dir():
        if output.resolve().is_relative_to(path.resolve()):
            raise CorpusError(f"--output {output} is in {path}, which is read: choose a folder next to it")
        files = [
            InputFile(file, file.relative_to(path).as_posix())
            for file in sorted(path.rglob("*"))
            if file.is_file()
            and _suffix(file.name)
            and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
        ]
        if not files:
            raise CorpusError(f"no file in {path} ends in one of {', '.join(SUFFIXES)}")
        return files
    if not path.is_file():
        raise CorpusError(f"no such file or folder: {path}")
    if _suffix(path.name) is None:
        raise CorpusError(f"cannot read {path}: its name should end in one of {', '.join(SUFFIXES)}")
    if path.resolve().parent == output.resolve():
        raise CorpusError(f"--output {output} has {path}, which is read: choose another folder")
    return [InputFile(path, path.name)]


def _suffix(name: str) -> str | None:
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


@dataclass(slots=True)
class CorpusProgress:
    """The progress of a run, and in the end its figures."""

    num_files: int
    files_done: int = 0
    num_finished_before: int = 0
    """How many of `files_done` an earlier session had finished; the fields below do not count their documents."""
    num_documents: int = 0
    num_resumed: int = 0
    """How many of `num_documents` an earlier session had scored."""
    num_unscored: int = 0
    num_tokens: int = 0
    num_tokens_resumed: int = 0
    """How many of `num_tokens` an earlier session had scored."""
    nll: float = 0.0
    """NLL in nats, summed over `num_tokens` tokens."""
    seconds: float = 0.0
    """Duration of this session so far."""
    first_error: str | None = None
    """The error of this session's first document without figures."""

    @property
    def perplexity(self) -> float | None:
        return exp(self.nll / self.num_tokens) if self.num_tokens else None


OnCorpusProgress = Callable[[CorpusProgress], object]
