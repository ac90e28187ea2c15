"""Decides which runs of a sweep are reused: those of which nothing has changed that is known to matter.

A run's file has a digest of each such thing, and none of them in words, because flags and variables may hold keys.
"""

import json
import logging
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from scoremode.runs import ARRAYS_SUFFIX, JOURNAL_SUFFIX, Corpus, identity
from scoremode.sweep.plan import ModelEntry, SweepPlan
from scoremode.wire import ServerInfo

_log = logging.getLogger(__name__)

FIELD = "sweep"
"""Of a run's file: what the functions here return, by name."""

Marks = dict[str, Any]


def text_marks(plan: SweepPlan, corpus: Corpus) -> Marks:
    """The marks that all runs of a plan share."""
    windows, text = plan.windows, plan.text
    # Only where they are used, so that runs from before there were any are kept.
    chosen = (windows.preset, windows.max_windows, text.messages, text.by)
    return {
        "text": _digest(corpus.fingerprint, text.max_tokens),
        "windows": _digest(windows.model_dump(exclude={"preset", "max_windows"}), *(chosen if any(chosen) else ())),
        "floor": plan.floor,
    }


def answers_marks(plan: SweepPlan, prompts: Corpus | None, marks: Marks) -> Marks:
    """The marks of a run on answers to prompts, made of those of the same model's run on the text."""
    return {**marks, "text": _digest(prompts and prompts.fingerprint, plan.max_new_tokens), "windows": None}


def served_marks(plan: SweepPlan, entry: ModelEntry, folder: Path) -> Marks:
    """The marks of a model before it is served: how it will be, and the files of one that is in a local folder."""
    assert entry.model is not None
    return {
        "model": _digest(entry.model),
        "flags": _digest(entry.command or plan.command, plan.serve + entry.serve, plan.env | entry.env),
        "files": _digest(_files(folder / entry.model)),
    }


def running_marks(info: ServerInfo, entry: ModelEntry) -> Marks:
    """The mark of a model that a running server describes; None without a fingerprint."""
    return {"model": _digest(identity(info), entry.model) if info.fingerprint else None}


def reference_name(entry: ModelEntry, marks: Mapping[str, Any]) -> str:
    """The name of the reference that the first model leaves: another for another model, text or windows."""
    letters = "".join(each if each.isascii() and (each.isalnum() or each in "._-") else "-" for each in entry.name)
    decisive = {name: value for name, value in marks.items() if name != "floor"}
    return f"sweep-{letters[:64]}-{_digest(decisive)[:12]}"


def changes(run: Path, marks: Mapping[str, Any]) -> str | None:
    """The names of marks that differ between the run's file and the run that is wanted; empty where it can be reused.

    None where there is no usable file.
    """
    marks_of_run = _field(run, FIELD)
    if not isinstance(marks_of_run, dict) or not run.with_suffix(ARRAYS_SUFFIX).is_file():
        return None
    return ", ".join(name for name in marks if marks_of_run.get(name) != marks[name] or marks["model"] is None)


def prepare_resume(run: Path, marks: Mapping[str, Any]) -> bool:
    """Delete a journal of another run, and note the marks for the next one. Returns whether a journal is left.

    The journal itself knows of the model only what a server says of it, which not all flags change.
    """
    journal, begun = run.with_name(run.name + JOURNAL_SUFFIX), _begun(run)
    if journal.exists() and (
        marks["model"] is None or not begun.is_file() or begun.read_bytes() != json.dumps(marks).encode()
    ):
        _log.info("%s is of another run, and is deleted", journal)
        journal.unlink()
    begun.write_text(json.dumps(marks))
    return journal.exists()


def finish(run: Path) -> None:
    """Forget what `prepare_resume` noted, once the run is written."""
    _begun(run).unlink(missing_ok=True)


def is_complete(reference: Path) -> bool:
    """Whether the folder of a reference has all of its windows, which its manifest says in the end."""
    return _field(reference / "manifest.json", "result") is not None


def log_path(base: Path, gguf: Path) -> Path:
    """Where the log of llama-perplexity on a GGUF file is: another one for another file or base."""
    return base.with_name(f"{gguf.stem}-{_digest(base.name, _files(gguf))[:12]}.log")


def _field(file: Path, name: str) -> Any:
    """A field of a file in JSON; None where there is none, or no such file."""
    try:
        return json.loads(file.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _begun(run: Path) -> Path:
    return run.with_name(f"{run.name}.begun")


def _files(path: Path) -> list[tuple[str, int, int]]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files if each.is_file()]


def _digest(*values: Any) -> str:
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
