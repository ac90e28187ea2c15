"""A run is read back as it was written, has a label of its own, and is refused by name if it is not whole.

No terminal obeys its names."""

import hashlib
import json
import math
import os

import numpy as np
import pytest
from run_files import (
    TEXT,
    WINDOW_SIZES,
    kld_run,
    made_up_nlls,
    made_up_reference,
    made_up_tokens,
    write_kld_run,
    write_perplexity_run,
)
from safetensors.numpy import load_file, save

from scoremode.cli.main import main
from scoremode.comparison import load_run
from scoremode.errors import RunError
from scoremode.runs import Corpus

NLLS = made_up_nlls(1)
KLD = np.abs(made_up_nlls(2) - made_up_nlls(3)).astype(np.float32)
NAME, SHOWN = "evil\x1b[2J\x9b\u202e\ud800\r\nbetter", r"evil\x1b[2J\x9b\u202e\ud800\r\nbetter"


@pytest.fixture
def perplexity_file(tmp_path):
    return write_perplexity_run(tmp_path / "run.json", NLLS)


def test_runs_are_read_back_as_they_were_written(perplexity_file, tmp_path):
    run = load_run(perplexity_file)
    assert (run.kind, run.label, run.nlls.dtype, run.token_texts) == ("perplexity", "bytes", np.float64, {})
    assert (run.nlls.tolist(), run.token_ids.tolist()) == (NLLS.tolist(), made_up_tokens().tolist())
    assert (run.num_windows, run.num_scored, run.num_tokens, run.num_bytes) == (30, 3000, 3001, 12004)
    assert (run.corpus.name, run.text_identity) == ("text", Corpus("text", TEXT, "", 1).fingerprint)
    assert (run.kld, run.same_top, run.reference, run.noise_floor) == (None,) * 4
    of_kld = kld_run(tmp_path, "mine", NLLS, KLD, reference=made_up_reference(noise_floor=0.01))
    assert (of_kld.kind, of_kld.label, of_kld.num_bytes) == ("kld", "mine", 12004)
    assert of_kld.kld.tolist() == KLD.astype(np.float64).tolist()
    assert of_kld.reference_nlls.tolist() == made_up_nlls(0).tolist()
    assert of_kld.same_top.tolist() == (KLD < 0.1).tolist()
    assert (of_kld.reference.name, of_kld.noise_floor, of_kld.as_noise_floor) == ("base", 0.01, False)
    assert of_kld.reference_identity == ("of the model", "of the text")
    assert of_kld.window_sizes.tolist() == WINDOW_SIZES


def with_parts(path, labels=("code", "mathematics"), **changes):
    """A run of 15 documents of two windows, in two domains, whose first token is of another class."""
    windows = np.arange(30, dtype=np.int32)
    parts = {"window_contexts": 10 * windows, "window_documents": windows // 2, "window_labels": windows // 15}
    parts["classes"] = np.arange(3000) == 0
    with_arrays(path, **{**parts, "classes": parts["classes"].astype(np.uint8), **changes})
    changed(path, labels=labels)


@pytest.mark.parametrize("write", [write_perplexity_run, lambda path, nlls: write_kld_run(path, nlls, KLD)])
def test_documents_domains_and_classes_are_read_where_a_run_has_them(tmp_path, write):
    path = write(tmp_path / "run.json", NLLS)
    with_parts(path, labels=["code", "\x1b"])
    run = load_run(path)
    assert run.window_contexts.tolist() == list(range(0, 300, 10))
    assert run.window_documents.tolist() == [window // 2 for window in range(30)]
    assert (run.window_labels.tolist(), [*run.labels]) == ([0] * 15 + [1] * 15, ["code", r"\x1b"])
    assert run.classes.tolist() == [1] + [0] * 2999


def changed(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def with_arrays(path, **arrays):
    """The same record with other arrays, which it names with their checksum."""
    kept = {**load_file(path.with_suffix(".safetensors")), **arrays}
    content = save({name: array for name, array in kept.items() if array is not None})
    path.with_suffix(".safetensors").write_bytes(content)
    changed(path, arrays={"file": "run.safetensors", "sha256": hashlib.sha256(content).hexdigest()})


def with_tops(path, **changes):
    """A run with top tokens at three positions, but for `changes`."""
    top = {"positions": np.int32([0, 1, 2]), "token_ids": np.zeros((3, 2, 5), np.int32)}
    top = {**top, "logprobs": np.zeros((3, 2, 5), np.float32), **changes}
    with_arrays(write_kld_run(path, NLLS, KLD), **{f"top_tokens.{name}": array for name, array in top.items()})


def spoiled(name, value):
    """Puts a value that no model gives into a run, at the last place of an array."""

    def spoil(path):
        write_kld_run(path, NLLS, KLD)
        array = load_file(path.with_suffix(".safetensors"))[name]
        with_arrays(path, **{name: np.append(array[:-1], array.dtype.type(value))})

    return spoil


def of_reference(**changes):
    fields = {**made_up_reference().model_dump(mode="json"), **changes}
    return lambda path: changed(write_kld_run(path, NLLS, KLD), reference=fields)


IMPOSSIBLE = [
    *(("logprobs", value, shown) for value, shown in ((0.5, "0.5"), (math.inf, "inf"))),
    *(("ranks", value, str(value)) for value in (0, -1)),
    *(("reference_confidence", 1.5, "1.5"), ("kld", -0.5, "-0.5"), ("token_ids", -1, "-1")),
]
FLOOR = {"mean": 0.1, "p99": 0.2, "max": 0.3, "num_scored": 3000, "created": 1}
EMPTY = dict.fromkeys(("window_sizes", "window_contexts", "token_ids"), np.array([], np.int32))
WRONG_SIZES, NOT_NUMBERS = np.array([1, 2], np.int32), np.full(3000, np.nan, np.float32)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_text("{"), "{path} is not JSON"),
        (lambda path: changed(path, kind=[]), "{path} is not a result of `ppl-client --output`"),
        (lambda path: changed(path, arrays=None), "{path} has no values of single tokens"),
        (lambda path: path.with_suffix(".safetensors").unlink(), "{path}: the values of its tokens, run.safetensors"),
        (lambda path: with_arrays(path, token_ids=None), "{path}: its arrays lack token_ids"),
        (lambda path: with_arrays(write_kld_run(path, NLLS, KLD), kld=None, ranks=None), "its arrays lack kld, ranks"),
        (lambda path: with_arrays(path, window_sizes=WRONG_SIZES), "logprobs is of shape (3000,) instead of (3,)"),
        (lambda path: with_arrays(path, logprobs=NOT_NUMBERS), "{path}: logprobs has NaN"),
        (lambda path: with_arrays(path, logprobs=np.array([], np.float32), **EMPTY), "{path} has no scored token"),
        (
            lambda path: with_parts(path, window_contexts=WRONG_SIZES),
            "window_contexts is of shape (2,) instead of (30,)",
        ),
        (
            lambda path: with_tops(path, positions=np.int32([0, 1, 3000])),
            "positions are not ascending numbers from 0 to 2999",
        ),
        (
            lambda path: with_tops(path, logprobs=np.ones((3, 2, 5), np.float32)),
            "top_tokens.logprobs has 1.0 (not from",
        ),
        *((spoiled(name, value), f"{{path}}: {name} has {shown} (not from") for name, value, shown in IMPOSSIBLE),
        (lambda path: with_arrays(path, window_sizes=np.full(30, 100.0)), "window_sizes is of type float64"),
        (lambda path: with_arrays(path, logprobs=np.full(3000, -1)), "logprobs is of type int64"),
        (
            lambda path: with_arrays(path, window_sizes=np.array(3000, np.int32)),
            "is of shape (30,) instead of (1,)",
        ),
        (lambda path: with_parts(path, labels=["code"]), "{path}: window_labels has 1, and labels has 1"),
        (lambda path: changed(path, corpus=None), "{path}: corpus: is required"),
        (lambda path: changed(write_kld_run(path, NLLS, KLD), reference=None), "{path}: reference: is required"),
        (lambda path: changed(path, num_bytes=-1), "{path}: num_bytes: Input should be greater than or equal to 0"),
        (of_reference(perplexity=-2.0), "{path}: reference.perplexity: Input should be greater than or equal to 0.999"),
        (of_reference(noise_floor={**FLOOR, "mean": -1.0}), "{path}: reference.noise_floor.mean: Input should be"),
        (of_reference(noise_floor={**FLOOR, "p99": math.nan}), "{path}: reference.noise_floor.p99: Input should be"),
        (of_reference(context_length=0), "{path}: reference.context_length: Input should be greater than 0"),
    ],
)
def test_a_damaged_run_is_refused_by_name(perplexity_file, spoil, message):
    spoil(perplexity_file)
    with pytest.raises(RunError) as caught:
        load_run(perplexity_file)
    assert message.format(path=perplexity_file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_shown_without_what_a_terminal_obeys_or_a_report_cannot_hold(tmp_path, capsys):
    paths = [write_kld_run(tmp_path / f"{name}.json", NLLS, KLD) for name in ("base", "bad")]
    server = {**json.loads(paths[1].read_text())["server"], "dtype": NAME}
    reference = {**made_up_reference().model_dump(), "name": NAME, "model": NAME, "fingerprint": NAME}
    changed(paths[1], model=NAME, server=server, reference=reference, finished=NAME, token_texts={"7.0": "\x1b"})
    named = tmp_path / os.fsdecode(b"a\x1b\xff.json")
    paths[0].rename(named)
    paths[0].with_suffix(".safetensors").rename(named.with_suffix(".safetensors"))
    report = tmp_path / "report.html"
    assert main(["compare", str(named), "--csv"]) == 0
    assert r"a\x1b\udcff.json" in capsys.readouterr().out
    assert main(["compare", str(named), str(paths[1]), "--resamples", "100", "--html", str(report)]) == 0
    shown = capsys.readouterr().out
    assert SHOWN in shown
    assert all(character.isprintable() for character in shown.replace("\n", ""))
    text = report.read_text()
    assert SHOWN in text
    assert r"a\x1b\udcff.json" in text
