"""The folder of all references, `--reference-dir`. Each reference has a folder with these files:

    manifest.json           its description (`manifest.py`)
    answers.jsonl           prompt_token_ids, token_ids and text of each answer, for a reference of answers to prompts
    tokens.safetensors      token_ids [n] int32 of all documents, one after the other; windows [windows, 5] int32;
                            origins [windows, 3] int32
    lm_head.safetensors     weight [vocabulary, hidden] without padding; bias [vocabulary] where there is one
    windows/000000.safetensors, ...
                            hidden_states [scored, hidden] after the final norm; logprobs [scored] float32, nats
    layers/000000/000.safetensors, ...
                            stream [fed, hidden] of a window at each boundary of decoder layers, if these are
                            recorded; fed: the window's tokens given to the engine, all but the last
    routes/000000.safetensors, ...
                            experts [fed, layers, k] uint8 or int16 of a window's tokens, by descending weight, if
                            they are recorded

A row of `windows` has the position of the document's first token in `token_ids`, the window's start, end and first
target within the document, and the id of the token put before the window (-1 for none). The window's hidden states
predict its targets. A row of `origins` has three indices: of the text, conversation or answer in the request's list, of
its label in the manifest's `text.labels`, and of the turn's role in `text.roles`; -1 for no label or role. References
of earlier versions have no `origins`.
"""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scoremode.windows import Window
from scoremode.wire.references import REFERENCE_NAME, Answer, KeptWithReference, Reference
from scoremode_server.references.files.manifest import Manifest, Result
from scoremode_server.references.files.tensors import BrokenFileError, moving_into_place, read_tensors, write_tensors

_MANIFEST = "manifest.json"
_HEAD = "lm_head.safetensors"
_SHARD = re.compile(r"(\d{6,})\.safetensors")
_DELETED = ".deleted-"
_MOST_NAMED = 20
"""Limit on the existing references that the error for an unknown name lists."""


class NoReferenceError(Exception):
    """No reference has that name."""


@dataclass(frozen=True)
class StoredReference:
    """One reference. Its files are read on demand. Methods that read a file raise BrokenFileError if it is missing, cut
    short or changed."""

    name: str
    path: Path
    manifest: Manifest

    @cached_property
    def text(self) -> "StoredText":
        tensors = read_tensors(self.path / "tokens.safetensors", self.about("tokens"))
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        if "origins" not in arrays:
            documents = np.unique(arrays["windows"][:, 0], return_inverse=True)[1]
            arrays["origins"] = np.column_stack((documents, np.full((len(documents), 2), -1))).astype(np.int32)
        return StoredText(**arrays)

    def shard(self, index: int) -> Path:
        return self.path / "windows" / f"{index:06}.safetensors"

    @property
    def boundaries(self) -> range:
        """The boundaries at which the residual stream is recorded."""
        layers = self.manifest.layers
        return range(0 if layers is None else layers.num_boundaries)

    def has_head(self) -> bool:
        """Whether the LM head is on disk and whole."""
        try:
            self.read_head()
        except BrokenFileError:
            return False
        return True

    def recorded_windows(self) -> set[int]:
        return {int(name[1]) for path in (self.path / "windows").glob("*") if (name := _SHARD.fullmatch(path.name))}

    def write_shard(self, index: int, hidden_states: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Write a window's hidden states [scored, hidden], in the served dtype, and logprobs [scored] float32."""
        tensors = {"hidden_states": hidden_states, "logprobs": logprobs}
        write_tensors(self.shard(index), tensors, self.about(f"window {index}"))

    def read_shard(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a window's hidden states [scored, hidden] and logprobs [scored]."""
        tensors = read_tensors(self.shard(index), self.about(f"window {index}"))
        return tensors["hidden_states"], tensors["logprobs"]

    def stream(self, index: int, boundary: int) -> Path:
        return self.path / "layers" / f"{index:06}" / f"{boundary:03}.safetensors"

    def write_stream(self, index: int, boundary: int, stream: torch.Tensor) -> None:
        """Write a window's residual stream [fed, hidden] at a boundary, in the served dtype."""
        path = self.stream(index, boundary)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, {"stream": stream}, self.about(f"window {index}, boundary {boundary}"))

    def read_stream(self, index: int, boundary: int) -> torch.Tensor:
        return read_tensors(self.stream(index, boundary), self.about(f"window {index}, boundary {boundary}"))["stream"]

    def experts_path(self, index: int) -> Path:
        return self.path / "routes" / f"{index:06}.safetensors"

    def write_experts(self, index: int, experts: torch.Tensor) -> None:
        """Write the experts [fed, layers, k] that the model chose for a window's tokens."""
        path = self.experts_path(index)
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, {"experts": experts}, self.about(f"experts of window {index}"))

    def read_experts(self, index: int) -> torch.Tensor:
        return read_tensors(self.experts_path(index), self.about(f"experts of window {index}"))["experts"]

    def read_window(self, index: int) -> torch.Tensor:
        """Read a window's logprobs [scored], and check that its other files are whole."""
        for boundary in self.boundaries:
            self.read_stream(index, boundary)
        if self.manifest.routes is not None:
            self.read_experts(index)
        return self.read_shard(index)[1]

    def write_head(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        write_tensors(self.path / _HEAD, tensors, self.about("LM head"))

    def read_head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read the weight [vocabulary, hidden] and the bias [vocabulary], None if the head has no bias."""
        tensors = read_tensors(self.path / _HEAD, self.about("LM head"))
        return tensors["weight"], tensors.get("bias")

    def save(self, manifest: Manifest) -> "StoredReference":
        with moving_into_place(self.path / _MANIFEST) as partial:
            partial.write_text(manifest.to_json())
        return StoredReference(self.name, self.path, manifest)

    def disk_bytes(self) -> int:
        """The size in bytes of all files, except those that are being written."""
        num_bytes = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                # The file may have been moved or deleted meanwhile.
                with suppress(FileNotFoundError):
                    num_bytes += 0 if name.startswith(".") else os.path.getsize(os.path.join(folder, name))
        return num_bytes

    def described(self) -> Reference:
        manifest, text, result = self.manifest, self.manifest.text, self.manifest.result
        return Reference(
            name=self.name,
            complete=result is not None,
            vocab_size=manifest.head.vocab_size,
            text_fingerprint=text.fingerprint,
            num_recorded=len(self.recorded_windows()),
            disk_bytes=self.disk_bytes(),
            **manifest.model.model_dump(exclude={"tokenizer_fingerprint"}),
            **text.model_dump(exclude={"fingerprint"}),
            **(dict(result) if result else dict.fromkeys(Result.model_fields)),
            **{name: getattr(manifest, name) for name in KeptWithReference.model_fields},
        )

    def about(self, part: str) -> dict[str, str]:
        """The description written into a file of tensors, so that the file is not taken for another one, or for another
        reference's."""
        return {"reference": self.manifest.identity, "part": part}


@dataclass(frozen=True, slots=True)
class StoredText:
    """Tokens [n] int32, windows [windows, 5] int32 and origins [windows, 3] int32, as on disk."""

    token_ids: np.ndarray
    windows: np.ndarray
    origins: np.ndarray

    @classmethod
    def from_documents(
        cls, documents: Sequence[tuple[Sequence[int], Sequence[Window]]], origins: Sequence[tuple[int, int, int]]
    ) -> "StoredText":
        """Join documents, each with its tokens and windows. `origins` has an entry per window: see the module."""
        offset, rows = 0, []
        for token_ids, windows in documents:
            rows += [
                (
                    offset,
                    window.start,
                    window.end,
                    window.first_target,
                    -1 if window.leading_token is None else window.leading_token,
                )
                for window in windows
            ]
            offset += len(token_ids)
        joined = [np.asarray(token_ids, np.int32) for token_ids, _ in documents]
        return cls(np.concatenate(joined), np.array(rows, np.int32), np.array(origins, np.int32))

    def window(self, index: int) -> tuple[list[int], int]:
        """A window's tokens, and the position of its first target among them."""
        offset, start, end, first_target, leading = self.windows[index].tolist()
        token_ids = self.token_ids[offset + start : offset + end].tolist()
        window = Window(0, end - start, first_target - start, None if leading < 0 else leading)
        return window.token_ids(token_ids), window.first_scored

    @property
    def num_context(self) -> np.ndarray:
        """The number of tokens [windows] before the first target of each window."""
        _, start, _, first_target, leading = self.windows.T
        return np.array(first_target - start + (leading >= 0))

    @property
    def num_tokens(self) -> np.ndarray:
        """The number of tokens [windows] of each window."""
        _, start, end, _, leading = self.windows.T
        return np.array(end - start + (leading >= 0))


@dataclass(frozen=True, slots=True)
class ReferenceDirectory:
    """The folder of references. Methods that need a reference raise NoReferenceError if no reference has that name or
    the name is not valid, and BrokenFileError if the manifest cannot be read."""

    root: Path

    def names(self) -> list[str]:
        """The names of all folders that may be references. Their files are not read, because that could hang."""
        try:
            return sorted(name for name in os.listdir(self.root) if re.fullmatch(REFERENCE_NAME, name))
        except FileNotFoundError:
            return []

    def open(self, name: str) -> StoredReference:
        path = self._path(name)
        try:
            return StoredReference(name, path, Manifest.from_json((path / _MANIFEST).read_text()))
        except (FileNotFoundError, NotADirectoryError):
            raise self._unknown(name) from None
        except (OSError, ValueError) as error:
            raise BrokenFileError(f"{path / _MANIFEST}: {error}") from None

    def open_same(self, name: str, identity: str) -> StoredReference:
        """Open a reference. NoReferenceError if another reference has its name now."""
        reference = self.open(name)
        if reference.manifest.identity != identity:
            raise NoReferenceError(f"reference {name!r} was deleted meanwhile, and another has its name now")
        return reference

    def update(self, reference: StoredReference, changes: Callable[[Manifest], dict[str, Any]]) -> StoredReference:
        """Change some fields of the manifest on disk. `changes` gets the manifest that is on disk now, so that changes
        by others are not undone. NoReferenceError as from `open_same`."""
        folder = os.open(self.open(reference.name).path, os.O_RDONLY)
        try:
            # Keep out other threads and processes, also on other hosts if the file system can.
            with suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            current = self.open_same(reference.name, reference.manifest.identity)
            return current.save(current.manifest.model_copy(update=changes(current.manifest)))
        finally:
            os.close(folder)

    def create(
        self, name: str, manifest: Manifest, text: StoredText, answers: Sequence[Answer] = ()
    ) -> StoredReference:
        """Create a reference; FileExistsError if there is one of that name."""
        # Write it elsewhere and move it, so that no reference is ever without a manifest.
        path = self._path(name)
        self.root.mkdir(parents=True, exist_ok=True)
        partial = self.root / f".{uuid.uuid4().hex}"
        reference = StoredReference(name, partial, manifest)
        try:
            (partial / "windows").mkdir(parents=True)
            tensors = {array_name: torch.from_numpy(array) for array_name, array in asdict(text).items()}
            write_tensors(partial / "tokens.safetensors", tensors, reference.about("tokens"))
            if answers:
                lines = (f"{answer.model_dump_json()}\n" for answer in answers)
                (partial / "answers.jsonl").write_text("".join(lines), encoding="utf-8")
            reference.save(manifest)
            os.rename(partial, path)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if path.exists():
                raise FileExistsError(f"there is a reference {name!r} already") from error
            raise
        return StoredReference(name, path, manifest)

    def delete(self, name: str) -> None:
        path, trash = self._path(name), self.root / f"{_DELETED}{uuid.uuid4().hex}"
        try:
            # Rename it first, so that no reader sees a half-deleted reference.
            path.rename(trash)
        except FileNotFoundError:
            raise self._unknown(name) from None
        # Also remove what earlier deletions left because a process was killed or a file was written at the same time.
        for folder in self.root.glob(f"{_DELETED}*"):
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                # Remove a link, but not its target.
                folder.unlink(missing_ok=True)

    def _unknown(self, name: str) -> NoReferenceError:
        names = self.names()
        named = [*names[:_MOST_NAMED], *([f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else [])]
        there_are = f"; there are {', '.join(named)}" if named else ""
        return NoReferenceError(f"there is no reference {name!r}{there_are}")

    def _path(self, name: str) -> Path:
        if not re.fullmatch(REFERENCE_NAME, name):
            raise NoReferenceError(f"{name!r} is not a valid reference name")
        return self.root / name
