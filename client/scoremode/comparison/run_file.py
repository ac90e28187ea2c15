"""Reads runs that `ppl-client` wrote, each as JSON with a file of every token's values next to it, and labels them."""

import hashlib
import json
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load

from scoremode._texts import first_fault, model_name, printable
from scoremode.errors import RunError, file_errors
from scoremode.kld import POSITION_DTYPES, Floats
from scoremode.results import TOP_DTYPES, TopTokens
from scoremode.runs import ARRAYS_SUFFIX, RECORD_VERSION, Arrays, ExpertRoutes, in_lane, weights_in_words
from scoremode.windows import Method
from scoremode.wire import LOWEST_LOGPROB, CorpusInfo, Lane, Reference, ServerInfo, wrong_value


@dataclass(frozen=True, slots=True)
class _Arrays:
    file: str
    sha256: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Record:
    """The fields that are read from a run's JSON."""

    kind: Literal["perplexity", "kld"]
    model: Annotated[str, AfterValidator(model_name)]
    """The model's served name."""
    server: ServerInfo
    """The server when the run began."""
    client_version: str
    finished: str | None = None
    """The time in ISO 8601 and UTC; None if the file does not have it."""
    arrays: _Arrays | None = None
    """The file with the values of single tokens."""
    token_texts: dict[int, str] = field(default_factory=dict)
    """The text of every token id in the arrays; empty for a run without texts."""
    token_bytes: dict[int, Annotated[str, Field(pattern="^([0-9a-f]{2})+$")]] = field(default_factory=dict)
    """The bytes, in hexadecimal, of tokens that end within a character."""
    labels: Sequence[str] = ()
    """The values of the `--by` column."""
    prompts: Sequence[str] = ()
    """For conversations, one text per window: the text between the previous window's turn and the window's own turn."""
    reference: Reference | None = None
    """The reference that the run was compared with; None for kind `perplexity`."""
    as_noise_floor: bool = False
    """Whether the run compares the reference with its own model."""
    lane: Lane = "prefill"
    """The lane in which the served model was measured, which says how many tokens an engine step takes of a window."""
    corpus: CorpusInfo | None = None
    """The source of the text; None if the reference of a run of kind `kld` does not name it."""
    method: Method
    context_length: PositiveInt
    stride: PositiveInt
    num_tokens: PositiveInt
    """Tokens of the measured text."""
    num_bytes: NonNegativeInt | None = None
    """UTF-8 bytes of the measured text; None if a reference was recorded from token ids."""
    mean_batch: float | None = None
    """Mean number of sequences in an engine step; None in the prefill lane."""
    positions_per_second: float | None = None
    """Speed of a run of kind `kld`; None if other servers shared the GPU."""
    routes: ExpertRoutes | None = None
    """The figures of `ppl-client kld --routes`, without arrays."""


_RECORD = TypeAdapter(_Record)
_OPTIONAL_ARRAYS = (
    "window_contexts",
    "window_documents",
    "window_labels",
    "classes",
    "top_ties",
    "ranks",
    "kld",
    "top_token_ids",
    "reference_top_token_ids",
    "reference_confidence",
    "forced_kld",
    "differing_layers",
)
"""Arrays that are not in every file."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunFile(_Record):
    """One run. Arrays have one value per target (scored token), [n], in the order of windows, or one per window."""

    path: Path
    label: str
    """The run's name in tables and plots, unique in a comparison."""
    window_sizes: NDArray[np.int32]
    """[windows]; their sum is n."""
    token_ids: NDArray[np.int32]
    nlls: Floats
    """[n], in nats."""
    ranks: NDArray[np.int32] | None
    """[n], the target's rank: 1 for the most likely token. None if the file has no ranks."""
    kld: Floats | None
    """[n], KL divergence from the reference in nats. This and the next four fields are None for kind `perplexity`."""
    reference_nlls: Floats | None
    top_token_ids: NDArray[np.int32] | None
    """[n], the served model's most likely token."""
    reference_top_token_ids: NDArray[np.int32] | None
    reference_confidence: Floats | None
    """[n], the reference's probability of its top token."""
    top_tokens: TopTokens | None = None
    """Top tokens at the most divergent positions; None if the run does not have them."""
    window_contexts: NDArray[np.int32] | None = None
    """[windows], number of tokens in the window before its first target; None in files of earlier versions."""
    window_documents: NDArray[np.int32] | None = None
    """[windows], index of the window's document, not decreasing; None for a text without documents."""
    window_labels: NDArray[np.int32] | None = None
    """[windows], index into `labels`; None for a run without `--by`."""
    classes: NDArray[np.uint8] | None = None
    """[n], index into `TOKEN_CLASSES`; None if the text is not conversations."""
    top_ties: NDArray[np.uint8] | None = None
    """[n], whether the top token is another token than the target, but has the same logit; None unless the text is
    greedy answers."""
    forced_kld: Floats | None = None
    """[n], KL divergence in nats with the reference's experts; None for a run without `routes`."""
    differing_layers: NDArray[np.int32] | None = None
    """[n], the number of layers that choose other experts than the reference's; None for a run without `routes`."""
    simulated_bits: float | None = None
    """Bits per weight of a simulated quantization, whose files have rounded weights in the original's dtype."""
    is_reference: bool = False
    """Whether this run stands for the other runs' reference, and has no file: see `compare._run_of_reference`."""
    answers: "RunFile | None" = None
    """A run of the same model on the original's answers, if there is one in addition to this run on a text. Figures on
    answers come from that run."""

    @property
    def is_of_answers(self) -> bool:
        """Whether the text is the original's answers."""
        return self.reference is not None and self.reference.answers is not None

    @property
    def num_scored(self) -> int:
        return len(self.nlls)

    @property
    def num_windows(self) -> int:
        return len(self.window_sizes)

    @property
    def reference_identity(self) -> tuple[str, str] | None:
        """Fingerprints of the reference's model and text, which do not depend on its name; None without a reference."""
        return None if self.reference is None else (self.reference.fingerprint, self.reference.text_fingerprint)

    @property
    def noise_floor(self) -> float | None:
        """Mean KL divergence of the reference's model from itself in this lane, in nats; None if the run has none."""
        floor = None if self.reference is None else self.reference.noise_floor_of(self.lane)
        return None if floor is None else floor.mean

    @property
    def is_of_original(self) -> bool:
        """Whether the run is of its reference's own model."""
        return self.reference is not None and self.reference.is_of(self.server)

    @property
    def text_identity(self) -> str:
        """The corpus's hash, or the reference's hash of tokens and windows: equal for runs of one kind on one text."""
        if self.reference is not None:
            return self.reference.text_fingerprint
        assert self.corpus is not None
        return self.corpus.sha256

    @property
    def text_in_words(self) -> str:
        """The text's name and hash, or its fingerprint if it has no name."""
        return f"text {self.text_identity[:12]}" if self.corpus is None else self.corpus.in_words

    @property
    def gib(self) -> float | None:
        """Size of the weight files in GiB, or of a simulated quantization; None if not known."""
        size, number = self.server.weight_bytes, self.server.num_parameters
        if self.simulated_bits is not None:
            size = None if number is None else round(self.simulated_bits * number / 8)
        return None if size is None else size / 2**30

    @property
    def bits_per_weight(self) -> float | None:
        """Bits in the weight files per parameter, or those of a simulated quantization; None if not known."""
        size, number = self.server.weight_bytes, self.server.num_parameters
        if self.simulated_bits is not None:
            return self.simulated_bits
        return None if size is None or not number else 8 * size / number

    @property
    def format(self) -> tuple[str | None, int | None]:
        """The quantization and its bits per weight, rounded down: runs that share both have one color in plots."""
        bits = self.bits_per_weight
        return self.server.quantization, None if bits is None else int(bits)

    @property
    def weights(self) -> str:
        """Describe the quantization and dtype, and the lane if it is not prefill."""
        weights = weights_in_words(self.server)
        if self.simulated_bits is not None:
            weights += f", simulating {self.simulated_bits:g} bits"
        if self.lane == "prefill":
            return weights
        batch = "" if self.mean_batch is None else f", {self.mean_batch:.1f} sequences in a step"
        return f"{weights}, {self.lane} lane{batch}"

    @property
    def versions(self) -> str:
        return f"scoremode {self.server.scoremode_version}, vLLM {self.server.vllm_version}"

    @property
    def same_top(self) -> NDArray[np.bool_] | None:
        """[n], whether the top token is the reference's; None for kind `perplexity`."""
        if self.top_token_ids is None or self.reference_top_token_ids is None:
            return None
        return np.equal(self.top_token_ids, self.reference_top_token_ids)

    @property
    def delta_p(self) -> Floats | None:
        """[n], the target's probability minus the reference's; None for kind `perplexity`."""
        return None if self.reference_nlls is None else np.exp(-self.nlls) - np.exp(-self.reference_nlls)

    @property
    def same_experts(self) -> Floats | None:
        """[n], the share of layers that choose the reference's experts; None if they were not compared."""
        if self.routes is None or self.differing_layers is None:
            return None
        return 1 - self.differing_layers / len(self.routes.layers)

    @property
    def rerouting(self) -> Floats | None:
        """[n], KL divergence that other experts add; None if they were not compared, or a divergence is infinite."""
        if self.kld is None or self.forced_kld is None or not np.isfinite(self.kld + self.forced_kld).all():
            return None
        return self.kld - self.forced_kld


def load_run(path: str | Path, label: str | None = None) -> RunFile:
    """Read the output of `ppl-client --output` or `ppl-client kld --output`.

    Args:
        path: The JSON file. The arrays are in a file next to it, which it names, or which has the same stem.
        label: The run's label; the model's name when left out.

    Raises:
        RunError: the file cannot be read, is not such an output or has another version, or its arrays are missing,
            belong to another run, or do not fit.
    """
    path = Path(path)
    with file_errors(RunError, f"read {path}"):
        content = path.read_bytes()
    record = _read_record(path, content)
    return _run(path, record, _read_arrays(path, record), label)


def finished_run(record: Mapping[str, object], arrays: Arrays) -> RunFile:
    """Make a `RunFile` from a run that was just measured, as `load_run` would read it from a file."""
    path = Path("run.json")
    return _run(path, _read_record(path, json.dumps(record).encode()), arrays)


def _run(path: Path, record: _Record, arrays: Arrays, label: str | None = None) -> RunFile:
    _check_arrays(path, record, arrays)
    tops = {name: arrays.get(f"top_tokens.{name}", np.empty(0)) for name in TOP_DTYPES}
    try:
        top_tokens = TopTokens(**tops, num_scored=len(arrays["token_ids"])) if tops["positions"].size else None
    except ValueError as error:
        raise RunError(f"{path}: its top tokens do not fit: {error}") from error
    values: dict[str, Any] = {part.name: getattr(record, part.name) for part in fields(record)}
    values |= {name: arrays.get(name) for name in _OPTIONAL_ARRAYS}
    floats = ("kld", "reference_confidence", "forced_kld")
    values |= {name: arrays[name].astype(np.float64) for name in floats if name in arrays}
    if (reference := record.reference) is not None:
        values["reference"] = reference.model_copy(update={"model": model_name(reference.model)})
    return RunFile(
        **values,
        path=path,
        label=record.model if label is None else printable(label),
        window_sizes=arrays["window_sizes"],
        token_ids=arrays["token_ids"],
        nlls=_nlls(arrays["logprobs"]),
        reference_nlls=_nlls(arrays["reference_logprobs"]) if record.kind == "kld" else None,
        top_tokens=top_tokens,
    )


def _read_record(path: Path, text: bytes) -> _Record:
    try:
        # Refuse integers that need more than 64 bits, because numpy cannot hold them.
        content: Any = json.loads(text, parse_int=lambda digits: int(np.int64(digits)))
        record: dict[str, Any] = _shown(content)
    except (ValueError, OverflowError, RecursionError) as error:
        raise RunError(f"{path} is not JSON: {error}") from error
    kind, version = (record.get("kind"), record.get("version")) if isinstance(record, dict) else (None, None)
    if kind not in ("perplexity", "kld"):
        raise RunError(f"{path} is not a result of `ppl-client --output` or `ppl-client kld --output`")
    if version != RECORD_VERSION:
        raise RunError(f"{path} is of version {version}; this ppl-client reads version {RECORD_VERSION}")
    # The reference of a `kld` run describes the run's windows and text.
    parts = [part for part in (record.get("reference"), record.get("settings")) if isinstance(part, dict)]
    unescaped = {name: content.get(name) for name in ("token_texts", "prompts")}
    # The reference has `routes` too, which are other fields.
    layers = ChainMap(unescaped, {"routes": record.get("routes")}, record, *parts)
    if record.get(needed := "reference" if kind == "kld" else "corpus") is None:
        raise RunError(f"{path}: {needed}: is required")
    try:
        return _RECORD.validate_python({name: value for name, value in layers.items() if value is not None})
    except ValidationError as error:
        raise RunError(f"{path}: {first_fault(error)}") from error


def _shown(value: Any) -> Any:
    """Make all texts in JSON safe for a terminal, XML and UTF-8."""
    if isinstance(value, dict):
        return {printable(name): _shown(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_shown(part) for part in value]
    return printable(value) if isinstance(value, str) else value


def _read_arrays(path: Path, record: _Record) -> Arrays:
    """Read the arrays that have the record's checksum. Their file may have been renamed together with the record's."""
    described = record.arrays
    if described is None:
        raise RunError(f"{path} has no values of single tokens: an earlier version measured it with --server-side")
    for candidate in (path.parent / Path(described.file).name, path.with_suffix(ARRAYS_SUFFIX)):
        try:
            content = candidate.read_bytes()
        except OSError:
            continue
        if hashlib.sha256(content).hexdigest() == described.sha256:
            try:
                return load(content)
            except (SafetensorError, KeyError, ValueError) as error:
                raise RunError(f"cannot read {candidate}: {type(error).__name__}: {error}") from error
    raise RunError(f"{path}: the values of its tokens, {described.file}, are not next to it or are of another run")


def _check_arrays(path: Path, record: _Record, arrays: Arrays) -> None:
    """Raise RunError for arrays that do not fit the record, although their checksum is right: they may be made by
    hand."""
    needed = POSITION_DTYPES if record.kind == "kld" else ("token_ids", "logprobs")
    if missing := [name for name in (*needed, "window_sizes") if name not in arrays]:
        raise RunError(f"{path}: its arrays lack {', '.join(missing)}")
    num_windows, num_scored = arrays["window_sizes"].size, int(arrays["window_sizes"].sum())
    for name, array in sorted(arrays.items()):
        field, shape = name.removeprefix("top_tokens."), (num_windows,) if name.startswith("window_") else (num_scored,)
        if field == name and array.shape != shape:
            raise RunError(f"{path}: {name} is of shape {array.shape} instead of {shape}")
        field = field.removeprefix("forced_")
        if (array.dtype.kind == "f") != (POSITION_DTYPES.get(field) == "<f4"):
            raise RunError(f"{path}: {name} is of type {array.dtype}")
        if wrong := wrong_value(field, array):
            raise RunError(f"{path}: {name} has {wrong}")
    if not num_scored:
        raise RunError(f"{path} has no scored token")
    if "window_labels" in arrays and (last := arrays["window_labels"].max()) >= len(record.labels):
        raise RunError(f"{path}: window_labels has {last}, and labels has {len(record.labels)}")
    if record.reference is not None and record.reference.answers is not None:
        _check_answers(path, record.reference, record.reference.answers.num_answers, arrays)
    if record.prompts and len(record.prompts) != num_windows:
        raise RunError(f"{path}: prompts has {len(record.prompts)}, and there are {num_windows} windows")


def _check_answers(path: Path, reference: Reference, num_answers: int, arrays: Arrays) -> None:
    documents = arrays.get("window_documents", np.empty(0))
    if not documents.size or (np.diff(documents, prepend=-1) <= 0).any() or documents[-1] >= num_answers:
        raise RunError(f"{path}: window_documents are not of the {num_answers} answers of its reference")
    for floor in filter(None, (reference.noise_floor, *reference.lane_noise_floors.values())):
        if floor.agreement_lengths is not None and len(floor.agreement_lengths) != num_answers:
            raise RunError(f"{path}: a noise floor has other than {num_answers} agreement_lengths")


def _nlls(logprobs: NDArray[Any]) -> Floats:
    """Negate logprobs. The lowest logprob stands for an impossible token, whose NLL is infinite."""
    return np.where(logprobs <= LOWEST_LOGPROB, np.inf, -logprobs.astype(np.float64))


def load_runs(paths: Sequence[str | Path], labels: Sequence[str] | None = None) -> list[RunFile]:
    """Read several runs, and give each its own label. If there are runs on a text, runs on answers join their models'.

    Args:
        paths: As for `load_run`.
        labels: One label per run. By default the model's name, with the lane if that is not prefill; if two runs share
            it, the file's name.

    Raises:
        RunError: a run cannot be read, there are more or fewer labels than runs, or the model of a run on answers has
            no run on the text.
    """
    runs = [load_run(path) for path in paths]
    labels = labels_of(labels, [in_lane(run.model, run.lane) for run in runs], [run.path for run in runs])
    labeled = [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]
    return reduce(with_run, sorted(labeled, key=lambda run: run.is_of_answers), list[RunFile]())


def with_run(runs: Sequence[RunFile], run: RunFile) -> list[RunFile]:
    """Add `run` to `runs`. If it is on answers and they are on a text, it becomes the `answers` of its model's run on
    the text. RunError if no run has its model and no answers yet."""
    if not run.is_of_answers or not runs or runs[0].is_of_answers:
        return [*runs, run]
    alike = [other for other in runs if other.server.fingerprint == run.server.fingerprint and other.answers is None]
    # The same weights may be served in two ways, so prefer the run with the same server settings.
    own = max(alike, key=lambda other: other.server == run.server, default=None)
    if own is None:
        raise RunError(f"{run.path} is on answers, but no run on a text has its model and no answers yet")
    return [replace(other, answers=replace(run, label=other.label)) if other is own else other for other in runs]


def with_bits(runs: Sequence[RunFile], bits: Mapping[str, float]) -> list[RunFile]:
    """Set the bits per weight of simulated quantizations, by label. RunError if no run has a label."""
    labels = [run.label for run in runs]
    if unknown := [label for label in bits if label not in labels]:
        raise RunError(f"--bits: no run is called {unknown[0]!r}; there are: {', '.join(labels)}")
    return [replace(run, simulated_bits=bits.get(run.label)) for run in runs]


def labels_of(chosen: Sequence[str] | None, names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """The chosen labels of runs, or by default unique names. RunError if there are more or fewer labels than runs."""
    labels = list(names if chosen is None else chosen)
    if len(labels) != len(paths):
        raise RunError(f"{len(labels)} labels for {len(paths)} runs")
    numbered = [f"{path} ({number})" for number, path in enumerate(paths, 1)]
    # Later alternatives are longer, and the last is different for every file.
    for longer in ([path.stem for path in paths], [str(path) for path in paths], numbered) if chosen is None else ():
        counts = Counter(labels)
        labels = [label if counts[label] == 1 else other for label, other in zip(labels, longer, strict=True)]
    return [printable(label) for label in labels]
