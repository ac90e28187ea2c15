"""A small reference: two documents, windows with and without a head, random hidden states."""

import time
from pathlib import Path

import torch

from scoremode import NoiseFloor, Window
from scoremode_server.references.files.directory import ReferenceDirectory, StoredReference, StoredText
from scoremode_server.references.files.manifest import HeadFormat, Manifest, Result, TextPlan, text_fingerprint
from scoremode_server.references.worker.sinks import WorkerWindows
from scoremode_server.scoring.model_identity import ModelIdentity

HIDDEN = 8
HEAD = HeadFormat(
    vocab_size=100,
    hidden_size=HIDDEN,
    weight_dtype="bfloat16",
    head_dtype="bfloat16",
    has_bias=False,
    scale=1.0,
    soft_cap=None,
)
MODEL = ModelIdentity(
    model="a/model",
    revision=None,
    dtype="bfloat16",
    quantization=None,
    scoremode_version="1.0",
    vllm_version="0.32.0",
    fingerprint="of the model",
    tokenizer_fingerprint="of the tokenizer",
)
DOCUMENTS = [
    (list(range(10, 30)), [Window(0, 8, 0, 99), Window(4, 12, 8), Window(12, 20, 13, 99)]),
    (list(range(50, 57)), [Window(0, 7, 1)]),
]
TEXT = StoredText.from_documents(DOCUMENTS, [(0, -1, -1)] * 3 + [(1, -1, -1)])
PLAN = TextPlan(
    fingerprint=text_fingerprint(TEXT.token_ids, TEXT.windows, "sliding"),
    method="sliding",
    context_length=8,
    stride=4,
    num_tokens=27,
    num_windows=4,
    num_scored=8 + 4 + 7 + 6,
    num_bytes=None,
    num_words=None,
)

FLOOR = NoiseFloor(mean=1e-7, p99=2e-6, max=1e-5, num_scored=25, created=1_700_000_100)
RESULT = Result(perplexity=2.0, perplexity_stderr=0.5, nll_mean=1 / 3)


def manifest(identity: str = "one", head: HeadFormat = HEAD) -> Manifest:
    return Manifest(identity=identity, created=1_700_000_000, model=MODEL, head=head, text=PLAN)


def create(root: Path, name: str = "base", identity: str = "one", text: StoredText = TEXT) -> StoredReference:
    """A reference without a window and without its head's file."""
    return ReferenceDirectory(root).create(name, manifest(identity), text)


def random_shard(num_scored: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(num_scored, HIDDEN, generator=generator).to(dtype)
    return hidden_states, -torch.rand(num_scored, generator=generator)


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def full_disk(*arguments: object) -> None:
    """Stands in for a function that writes a file."""
    raise OSError(28, "No space left on device")


def let_all_be_written(windows: WorkerWindows) -> None:
    """Wait until no thread of a worker has anything to do."""
    while windows.reads.threads._waiting:
        time.sleep(0.001)
