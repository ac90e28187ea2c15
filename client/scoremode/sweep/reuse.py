"""Decides which runs of an earlier sweep are reused: a run is reused if nothing that is known to affect it has changed.

The file of a run has a *mark* for each thing that affects it, such as the text or the server's flags. Most marks are
digests: flags and environment variables may hold keys, so they are not stored themselves.
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
"""The field of a run's file that has the run's marks."""

Marks = dict[str, Any]


def text_marks(plan: SweepPlan, corpus: Corpus) -> Marks:
    """The marks that all runs of a plan share."""
    windows, text = plan.windows, plan.text
    # Add newer options only if one of them is set, so that runs from before they existed are reused.
    newer = (windows.preset, windows.max_windows, text.messages, text.by)
    return {
        "text": _digest(corpus.fingerprint, text.max_tokens),
        "windows": _digest(windows.model_dump(exclude={"preset", "max_windows"}), *(newer if any(newer) else ())),
        "floor": plan.floor,
        **({"layers": True} if plan.layers else {}),
    }


def answers_marks(plan: SweepPlan, prompts: Corpus | None, marks: Marks) -> Marks:
    """The marks of a model's run on answers to prompts, given the `marks` of its run on the text."""
    return {**marks, "text": _digest(prompts and prompts.fingerprint, plan.max_new_tokens), "windows": None}


def served_marks(plan: SweepPlan, entry: ModelEntry, folder: Path) -> Marks:
    """The marks of a model that the sweep serves: its name, command line, environment, and files if it is local."""
    assert entry.model is not None
    return {
        "model": _digest(entry.model),
        "flags": _digest(entry.command or plan.command, plan.flags(entry), plan.env | entry.env),
        "files": _digest(_files(folder / entry.model)),
    }


def running_marks(info: ServerInfo, entry: ModelEntry) -> Marks:
    """The mark of a model on a running server: None if the server reports no fingerprint."""
    return {"model": _digest(identity(info), entry.model) if info.fingerprint else None}


def reference_name(entry: ModelEntry, marks: Mapping[str, Any]) -> str:
    """Make a name for the first model's reference that is different for every model, command line, text and windows."""
    letters = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in entry.name)
    decisive = {name: value for name, value in marks.items() if name != "floor"}
    return f"sweep-{letters[:64]}-{_digest(decisive)[:12]}"


def changes(run: Path, marks: Mapping[str, Any]) -> str | None:
    """List the names of `marks` that differ from the marks in a run's file, as text: empty if the run can be reused.

    None if there is no readable file with marks, or its arrays are missing. If the mark `model` is None, all names are
    listed, because it is not known whether the model is the same.
    """
    marks_of_run = _field(run, FIELD)
    if not isinstance(marks_of_run, dict) or not run.with_suffix(ARRAYS_SUFFIX).is_file():
        return None
    return ", ".join(name for name in marks if marks_of_run.get(name) != marks[name] or marks["model"] is None)


def prepare_resume(run: Path, marks: Mapping[str, Any]) -> bool:
    """Delete the journal, which has the windows of an interrupted run, unless that run is known to have the same marks.
    Store this run's marks, and return whether a journal is left to resume from.

    The journal's header is not enough: some flags of the server can change without changing its description of the
    model, which is in the header.
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
    """Delete the marks that `prepare_resume` stored, once the run is written."""
    _begun(run).unlink(missing_ok=True)


def is_complete(reference: Path) -> bool:
    """Whether the folder of a reference has all windows: its manifest has a result only then."""
    return _field(reference / "manifest.json", "result") is not None


def log_path(base: Path, gguf: Path) -> Path:
    """The path for llama-perplexity's log of a GGUF file. It differs for a base file of another name, and for a changed
    GGUF file. The base file's name contains the reference's."""
    return base.with_name(f"{gguf.stem}-{_digest(base.name, _files(gguf))[:12]}.log")


def _field(file: Path, name: str) -> Any:
    """Read a field of a JSON file; None if the field or the file is missing."""
    try:
        return json.loads(file.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _begun(run: Path) -> Path:
    return run.with_name(f"{run.name}.begun")


def _files(path: Path) -> list[tuple[str, int, int]]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def _digest(*values: Any) -> str:
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
