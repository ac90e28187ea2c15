"""Which files a run reads, and what each becomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scoremode.errors import CorpusError

SUFFIXES = (".parquet", ".jsonl", ".jsonl.zst", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of documents."""

    path: Path
    name: str
    """Its place below the folder that was named, or its own name, with `/`."""

    @property
    def output_name(self) -> str:
        """Where its rows go, below the output folder."""
        return f"{self.name.removesuffix(_suffix(self.name) or '')}.parquet"


def find_inputs(paths: Sequence[Path], output: Path) -> list[InputFile]:
    """The files that are named, and those in folders that are named, at any depth, in order.

    Files and folders whose names begin with `.` or `_` are left out of a folder.

    Raises:
        CorpusError: there is none, one has another suffix, two would become one output, or the output would be read.
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
            raise CorpusError(f"--output {output} is in {path}, which is read: choose a folder beside it")
        files = [
            InputFile(file, file.relative_to(path).as_posix())
            for file in sorted(path.rglob("*"))
            if file.is_file() and _suffix(file.name) and not _is_hidden(file.relative_to(path))
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


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
