"""Reads the plan of a sweep: a YAML file that says which models to measure, on which text, in which windows."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from math import inf, pow
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from scoremode._texts import faults, printable
from scoremode.errors import ScoremodeError, file_errors
from scoremode.runs import (
    CATEGORIES,
    DEFAULT_COLUMN,
    DEFAULT_SPLIT,
    Corpus,
    Preset,
    load_corpus,
    local_path,
    window_settings,
)
from scoremode.windows import TextMethod, WindowSettings, resolve_stride
from scoremode.wire import Lane, server_root


class PlanError(ScoremodeError):
    """A plan cannot be read, or asks for something that a sweep cannot do."""


def _flags(words: list[str]) -> list[str]:
    for word in words:
        if word.partition("=")[0] in ("--host", "--port", "--reference-dir", "--uds"):
            raise ValueError(f"{word.partition('=')[0]} is set by the sweep")
    return words


def _label(name: str) -> str:
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError("must also be a valid file name: not empty, without '/', and not starting with '.'")
    return name


Word = Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]
"""A string. A number in YAML is converted to a string."""
Words = Annotated[list[Word], BeforeValidator(lambda value: shlex.split(value) if isinstance(value, str) else value)]
"""The words of a command line. In YAML: a list, or one string, which is split as a shell splits it."""
Flags = Annotated[Words, AfterValidator(_flags)]
FlagName = Annotated[str, AfterValidator(lambda name: _flags([f"--{name}"])[0].removeprefix("--"))]
LocalPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, or a name such as a model's on the hub; a leading `~` becomes the home folder."""
Column = Annotated[str, Field(min_length=1)]
Environment = dict[str, Word]
Command = Annotated[Words, Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextOptions(_Part):
    """The text to measure. Each field means the same as the `ppl-client` option of its name."""

    dataset: LocalPath | None = None
    text: str | None = None
    text_file: LocalPath | None = None
    dataset_config: str | None = None
    split: str = DEFAULT_SPLIT
    text_column: str = DEFAULT_COLUMN
    messages: Column | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    by: Column | None = None
    num_samples: PositiveInt | None = None
    max_tokens: PositiveInt | None = None

    @property
    def num_sources(self) -> int:
        return sum(source is not None for source in (self.dataset, self.text, self.text_file))

    @model_validator(mode="after")
    def _one_source(self) -> "TextOptions":
        if self.num_sources > 1:
            raise ValueError("give one of dataset, text and text_file")
        if self.dataset is None and (self.messages or self.by):
            raise ValueError("messages and by are columns of a dataset")
        return self

    def load(self, folder: Path, preset: Preset | None = None, max_windows: int | None = None) -> Corpus:
        """Load the text. Paths in the plan are relative to `folder`, the plan's folder."""
        path = None if self.dataset is None else local_path(self.dataset, folder)
        dataset = self.dataset if path is None else str(path.absolute())
        file = None if self.text_file is None else folder / self.text_file
        return load_corpus(
            dataset,
            text_file=file,
            config=self.dataset_config,
            column=self.text_column,
            preset=preset,
            max_windows=max_windows,
            **self.model_dump(include={"text", "split", "num_samples", "messages", "chat_template_kwargs", "by"}),
        )


class WindowOptions(_Part):
    """Settings that cut the text into windows. Each field means the same as the `ppl-client` option of its name."""

    preset: Preset | None = None
    max_windows: PositiveInt | None = None
    method: TextMethod = "sliding"
    context_length: PositiveInt | None = None
    stride: PositiveInt | None = None

    @model_validator(mode="after")
    def _no_contradictions(self) -> "WindowOptions":
        if self.preset is not None:
            if conflicts := self.model_fields_set & {"method", "stride"}:
                raise ValueError(f"preset sets {' and '.join(sorted(conflicts))}")
            window_settings(self.preset, self.context_length, self.max_windows)
            return self
        if self.max_windows is not None:
            raise ValueError("max_windows needs a preset")
        if self.context_length is not None:
            resolve_stride(self.method, self.context_length, self.stride)
        return self


class ModelEntry(_Part):
    """A model that the sweep serves, or with `url` a model on a server that runs already."""

    name: Annotated[str, AfterValidator(_label)]
    """The model's name in tables and plots. The names of its runs' files begin with it."""
    model: LocalPath | None = None
    """The model to serve. With `url`, the name of a model or adapter on that server; by default its main model."""
    url: Annotated[str, AfterValidator(server_root)] | None = None
    command: Command | None = None
    serve: Flags = []
    env: Environment = {}
    repeats: NonNegativeInt = 1
    """How often to measure the model on its server: once as usual, then with fewer windows in flight. The first model
    may have 0: it is only recorded."""

    @model_validator(mode="after")
    def _served_or_running(self) -> "ModelEntry":
        if self.url is None and self.model is None:
            raise ValueError("give a model to serve, or the url of a server that runs")
        if self.url is not None and (self.command or self.serve or self.env):
            raise ValueError("command, serve and env are for a model that is served here, not for a url")
        return self


class VaryOptions(_Part):
    """The paths on which `ppl-client paths` measures the plan's one model: each value alone, next to the default path.
    Without any value, `scoremode paths` says what the installed vLLM has for the model."""

    flags: dict[FlagName, Annotated[list[Word | Literal[True]], Field(min_length=1)]] = {}
    """Values of flags of the server, such as `attention-backend`; True for a flag without a value."""
    env: dict[Word, Annotated[list[Word], Field(min_length=1)]] = {}
    """Values of environment variables."""
    command: list[Command] = []
    """Other command lines that start a server, such as that of another version of vLLM."""
    product: bool = False
    """Whether to measure all combinations of values too."""
    repeats: Annotated[int, Field(ge=2)] = 4
    """How often each path is measured, and the default path again for the floor, on a server of its own."""
    blocks: bool = True
    """Whether to find the blocks of the paths that differ, on eager servers that start afterwards."""
    original: ModelEntry | None = None
    """The model that was quantized, to tell which path is nearer to it."""


class GgufOptions(_Part):
    """GGUF files, which llama.cpp measures against the first model's reference."""

    llama_perplexity: Annotated[LocalPath, Field(min_length=1)] = "llama-perplexity"
    """llama.cpp's program, by name or path."""
    files: Annotated[list[LocalPath], Field(min_length=1)]


class CompareOptions(_Part):
    """Report, plots and card, which the sweep writes at the end. Paths are relative to the plan's `output`."""

    html: str | None = "report.html"
    plots: str | None = "plots"
    card: str | None = None
    """A Markdown file; the card replaces the text between its marks, or is added at its end."""


class SweepPlan(_Part):
    output: LocalPath
    text: TextOptions = TextOptions()
    windows: WindowOptions = WindowOptions()
    models: Annotated[list[ModelEntry], Field(min_length=1)]
    command: Command = ["scoremode", "serve"]
    """Command line that starts a server; each model's name or path is appended."""
    serve: Flags = []
    """Flags for every model's server; those of a model's entry follow them."""
    env: Environment = {}
    """Environment variables for every model's server; those of a model's entry take precedence."""
    start_timeout: Annotated[int, Field(ge=1, le=10**9)] = 3600
    """Seconds that a server may take to start."""
    lane: Lane | Literal["both"] = "prefill"
    """How many tokens of a window an engine step takes: `prefill`, as many as fit; `decode`, one, as in generation;
    `verify`, as in speculative decoding; `both`, a run in prefill and a run in decode."""
    floor: bool = False
    """Whether to measure the noise floor in each lane: the first model's divergence from its own reference."""
    prompts: LocalPath | None = None
    """A jsonl or parquet file, as for `record --prompts`. The first model answers the prompts greedily, and the
    sweep compares the other models with its answers in the decode lane."""
    max_new_tokens: PositiveInt = 256
    """Limit on the tokens of an answer."""
    gguf: GgufOptions | None = None
    layers: bool = False
    """Whether to record the first model with its layers, and to measure the cost of each block of the others. Every
    server then needs `--enforce-eager`."""
    speeds: bool = False
    """Whether servers that start at once are only measured when all are up. Without it their runs have no speeds,
    because a server that starts takes part of the GPU."""
    vary: VaryOptions | None = None
    compare: CompareOptions = CompareOptions()

    def flags(self, entry: ModelEntry) -> list[str]:
        """The flags of a model's server."""
        return [*self.serve, *entry.serve]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes in which models are measured. The first model always has a run in prefill too."""
        return ("prefill", "decode") if self.lane == "both" else (self.lane,)

    @model_validator(mode="after")
    def _no_contradictions(self) -> "SweepPlan":
        """Check that names differ, and that text, windows, `gguf` and `--max-model-len` fit together."""
        names = [entry.name for entry in self.models]
        names += [] if self.gguf is None else [Path(file).stem for file in self.gguf.files]
        folded = [name.casefold() for name in names]
        if repeated := [name for name in names if folded.count(name.casefold()) > 1]:
            raise ValueError(f"models: two are called {repeated[0]!r}")
        text, preset = self.text, self.windows.preset
        if text.num_sources != (0 if preset == CATEGORIES else 1):
            raise ValueError("text: give one of dataset, text and text_file, or windows.preset: categories alone")
        if preset is not None and (text.messages or text.by or text.max_tokens or text.num_samples):
            raise ValueError(
                "windows.preset measures the whole text: it takes no messages, by, max_tokens, num_samples"
            )
        limits = [flag_value(self.flags(entry), "max-model-len") or inf for entry in self.models]
        if (context := self.window_settings.get("context_length") or 0) > min(limits):
            raise ValueError(f"windows of {context} tokens do not fit in --max-model-len {min(limits):.0f}")
        if self.gguf is not None and preset != "llama.cpp" and self.windows.method != "llama.cpp":
            raise ValueError("gguf needs windows.preset: llama.cpp")
        if self.vary is not None and (
            len(names) > 1
            or self.prompts
            or any(entry.url for entry in (self.models[0], self.vary.original) if entry is not None)
        ):
            raise ValueError("vary needs exactly one model, and takes no url, gguf or prompts")
        return self

    @property
    def window_settings(self) -> WindowSettings:
        """The settings by which the text is cut into windows."""
        windows = self.windows
        if windows.preset is not None:
            return window_settings(windows.preset, windows.context_length, windows.max_windows)
        return {
            "method": windows.method,
            "context_length": windows.context_length,
            "stride": windows.stride,
            "max_tokens": self.text.max_tokens,
        }


def flag_value(flags: Sequence[str], name: str) -> float | None:
    """The number that a flag of vLLM sets, such as 8G; None without the flag. `name` is a regular expression."""
    pattern = rf"(?<!\S)--{name.replace('-', '[-_]')}[ =]([\d.]+)([kmgt]?)(?!\S)"
    # vLLM uses the last of repeated flags.
    for number, unit in re.findall(pattern, " ".join(flags), re.IGNORECASE)[-1:]:
        return float(number) * pow(1000.0 if unit.islower() else 1024.0, " kmgt".index(unit.lower()))
    return None


def check_local_models(plan: SweepPlan, folder: Path) -> None:
    """Raise PlanError if a model that can only be a local path does not exist. Call this before the sweep, which would
    find it out after hours of work on earlier models."""
    missing = [
        f"{entry.name}: there is no {folder / entry.model}"
        for entry in plan.models
        if entry.url is None and entry.model and _is_local(entry.model) and not (folder / entry.model).exists()
    ]
    if missing:
        raise PlanError("; ".join(missing))


def _is_local(model: str) -> bool:
    """Whether a model cannot be on the hub, where names are ORGANIZATION/NAME or ORGANIZATION/NAME/FILE.gguf."""
    if model.startswith(("/", "./", "../")):
        return True
    return model.count("/") > 1 and "://" not in model and not model.endswith(".gguf")


def read_plan(path: Path) -> SweepPlan:
    """Read a plan. If something is wrong, PlanError names the file, the entry and the field."""
    try:
        with file_errors(PlanError, f"read {path}"):
            content = yaml.safe_load(path.read_bytes())
            # JSON joins surrogate pairs, which YAML reads as two characters.
            content = json.loads(json.dumps(content, default=str))
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise PlanError(f"{path} is not YAML{place}: {getattr(error, 'problem', error)}") from error
    if not isinstance(content, dict):
        raise PlanError(f"{path} is not a plan: it should have output, text and models")
    return checked_plan(content, str(path))


def checked_plan(fields: dict[str, Any], name: str) -> SweepPlan:
    """Check a plan's fields. PlanError begins with `name` and lists the faults."""
    try:
        # All values must encode: names become file names, and flags are passed to processes.
        os.fsencode(json.dumps(fields, ensure_ascii=False, default=str))
        return SweepPlan.model_validate(fields)
    except UnicodeEncodeError as error:
        character = printable(error.object[error.start : error.end])
        raise PlanError(f"{name}: a value has {character}, which is not valid Unicode") from error
    except ValidationError as error:
        raise PlanError(f"{name}: {'; '.join(faults(error))}") from error
