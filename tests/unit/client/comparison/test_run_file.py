"""A run is read back as it was written, and what is no run is refused by name."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from run_files import (
    TEXT,
    WINDOW_SIZES,
    made_up_nlls,
    made_up_reference,
    made_up_tokens,
    write_kld_run,
    write_perplexity_run,
)
from safetensors.numpy import load_file, save

from scoremode.comparison import load_run
from scoremode.corpora import Corpus
from scoremode.errors import RunError

NLLS = made_up_nlls(1)
KLD = np.abs(made_up_nlls(2) - made_up_nlls(3)).astype(np.float32)


@pytest.fixture
def perplexity_file(tmp_path):
    return write_perplexity_run(tmp_path / "run.json", NLLS)


@pytest.fixture
def kld_file(tmp_path):
    return write_kld_run(tmp_path / "run.json", NLLS, KLD, reference=made_up_reference(noise_floor=0.01))


def test_a_run_of_perplexity(perplexity_file):
    run = load_run(perplexity_file)
    assert (run.kind, run.label, run.model) == ("perplexity", "bytes", "bytes")
    assert run.nlls.dtype == np.float64
    assert run.nlls.tolist() == NLLS.tolist()
    assert run.token_ids.tolist() == made_up_tokens().tolist()
    assert run.window_sizes.tolist() == WINDOW_SIZES
    assert (run.method, run.context_length, run.stride) == ("sliding", 128, 100)
    assert (run.num_windows, run.num_scored, run.num_tokens, run.num_bytes) == (30, 3000, 3001, 12004)
    assert run.corpus_name == "text"
    assert run.text_identity == Corpus("text", TEXT, "", 1).fingerprint
    assert (run.dtype, run.quantization, run.versions) == ("float32", None, "scoremode 9.9.9, vLLM 0.32.0")
    assert {run.kld is None, run.same_top is None, run.reference is None, run.noise_floor is None} == {True}


def test_a_run_against_a_reference(kld_file):
    run = load_run(kld_file, "mine")
    assert (run.kind, run.label) == ("kld", "mine")
    assert run.kld.tolist() == KLD.astype(np.float64).tolist()
    assert run.reference_nlls.tolist() == made_up_nlls(0).tolist()
    assert run.same_top.tolist() == (KLD < 0.1).tolist()
    assert run.reference_confidence.tolist() == [0.5] * 3000
    assert (run.method, run.context_length, run.stride, run.num_bytes) == ("sliding", 128, 100, 12004)
    assert (run.reference.name, run.noise_floor, run.as_noise_floor) == ("base", 0.01, False)
    assert run.text_identity == "of the text"
    assert run.reference_identity == ("of the model", "of the text")
    assert run.corpus_name is None


def test_the_size_of_the_weights_is_known_where_the_server_said_it(tmp_path):
    said = {"weight_bytes": 1_000_000, "num_parameters": 2_000_000}
    run = load_run(write_perplexity_run(tmp_path / "said.json", NLLS, server=said))
    assert (run.weight_bytes, run.num_parameters, run.bits_per_weight) == (1_000_000, 2_000_000, 4.0)
    run = load_run(write_perplexity_run(tmp_path / "unsaid.json", NLLS))
    assert (run.weight_bytes, run.num_parameters, run.bits_per_weight) == (None, None, None)
    said = {"weight_bytes": 1_000_000, "num_parameters": None}
    assert load_run(write_perplexity_run(tmp_path / "half.json", NLLS, server=said)).bits_per_weight is None


def test_texts_of_tokens_are_there_where_the_run_kept_them(tmp_path, perplexity_file):
    assert load_run(perplexity_file).token_texts == {}
    path = write_perplexity_run(tmp_path / "texts.json", NLLS, more={"token_texts": {"7": " the", "8": "<b>"}})
    assert load_run(path).token_texts == {7: " the", 8: "<b>"}


def test_both_files_may_be_renamed_together(perplexity_file):
    perplexity_file.rename(perplexity_file.with_name("new.json"))
    perplexity_file.with_suffix(".safetensors").rename(perplexity_file.with_name("new.safetensors"))
    # Another run has the old name now.
    write_perplexity_run(perplexity_file, NLLS + 1)
    assert load_run(perplexity_file.with_name("new.json")).nlls.tolist() == NLLS.tolist()


def changed(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def with_arrays(path, **arrays):
    """The same record with other arrays, which it says are its own."""
    kept = {**load_file(path.with_suffix(".safetensors")), **arrays}
    content = save({name: array for name, array in kept.items() if array is not None})
    path.with_suffix(".safetensors").write_bytes(content)
    changed(path, arrays={"file": "run.safetensors", "sha256": hashlib.sha256(content).hexdigest()})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "cannot read {path}: No such file"),
        (lambda path: path.write_text("{"), "{path} is no JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\xfd"), "{path} is no JSON"),
        (lambda path: path.write_text("[]"), "{path} is no result of `ppl-client --output`"),
        (lambda path: changed(path, kind="guess"), "{path} is no result of `ppl-client --output`"),
        (lambda path: changed(path, version=2), "{path} is of version 2; this ppl-client reads version 1"),
        (lambda path: changed(path, settings={}), "{path}: settings.method: Field required"),
        (lambda path: changed(path, arrays=None), "{path} has no values of single tokens"),
        (lambda path: path.with_suffix(".safetensors").unlink(), "{path}: the values of its tokens, run.safetensors"),
        (
            lambda path: shutil.copy(
                write_perplexity_run(path.with_name("b.json"), NLLS + 1).with_suffix(".safetensors"),
                path.with_suffix(".safetensors"),
            ),
            "{path}: the values of its tokens, run.safetensors, are missing beside it or of another run",
        ),
        (lambda path: with_arrays(path, token_ids=None), "{path}: its arrays lack token_ids"),
        (
            lambda path: with_arrays(path, window_sizes=np.array([1, 2], np.int32)),
            "{path}: its windows have 3 tokens, and logprobs is of shape (3000,)",
        ),
        (lambda path: with_arrays(path, logprobs=np.full(3000, np.nan, np.float32)), "{path}: logprobs has NaN"),
        (
            lambda path: with_arrays(
                path,
                window_sizes=np.array([], np.int32),
                logprobs=np.array([], np.float32),
                token_ids=np.array([], np.int32),
            ),
            "{path} has no scored token",
        ),
    ],
)
def test_what_is_no_run_is_refused_by_name(perplexity_file, spoil, message):
    spoil(perplexity_file)
    with pytest.raises(RunError) as caught:
        load_run(perplexity_file)
    assert message.format(path=perplexity_file) in str(caught.value)


def test_a_server_side_run_has_no_values_of_tokens(tmp_path):
    path = write_perplexity_run(tmp_path / "run.json", NLLS, server_side=True)
    with pytest.raises(RunError, match="no values of single tokens, as a run with --server-side"):
        load_run(path)


def test_a_run_against_a_reference_needs_all_of_its_arrays(kld_file):
    with_arrays(kld_file, kld=None, ranks=None)
    with pytest.raises(RunError, match="lack kld, ranks"):
        load_run(kld_file)
