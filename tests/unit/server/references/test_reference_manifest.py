"""What is known of a reference, as it is on disk."""

import json
import math

import numpy as np
import pytest
from pydantic import ValidationError
from reference_setup import HEAD, PLAN, TEXT, manifest

from scoremode.protocol import NoiseFloor
from scoremode_server.references.manifest import HeadFormat, Manifest, ManifestError, Result, text_fingerprint

FLOOR = NoiseFloor(mean=1e-7, p99=2e-6, max=1e-5, num_scored=25, created=1_700_000_100)


@pytest.mark.parametrize("perplexity", [12.5, math.inf])
def test_what_was_written_is_read(perplexity: float):
    result = Result(perplexity=perplexity, perplexity_stderr=None, nll_mean=1 / 3)
    written = manifest().model_copy(update={"result": result, "noise_floor": FLOOR})
    assert Manifest.from_json(written.to_json()) == written


def test_no_character_that_means_something_can_change():
    """Other white space between fields is no change."""
    text = manifest().to_json()
    for position, character in enumerate(text):
        if not character.isspace():
            changed = text[:position] + chr(ord(character) ^ 1) + text[position + 1 :]
            with pytest.raises(ManifestError):
                Manifest.from_json(changed)


def test_a_text_that_is_cut_short_is_refused():
    text = manifest().to_json()
    for length in range(len(text)):
        with pytest.raises(ManifestError):
            Manifest.from_json(text[:length])


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_another_format_version_is_refused_by_its_number(version: object):
    """Whatever else a later version may have changed."""
    with pytest.raises(ManifestError, match=f"format version {version}, and this server reads 2"):
        Manifest.from_json(json.dumps({"format_version": version, "layers": []}))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000])
def test_what_is_no_manifest_is_refused(text: str):
    with pytest.raises(ManifestError):
        Manifest.from_json(text)


@pytest.mark.parametrize("dtype", ["float64", "int8", "load", ""])
def test_a_head_has_one_of_three_dtypes(dtype: str):
    with pytest.raises(ValidationError):
        HeadFormat.model_validate({**HEAD.model_dump(), "weight_dtype": dtype})


def test_bytes_of_a_head():
    assert HEAD.num_bytes == 100 * 8 * 2
    assert HEAD.model_copy(update={"has_bias": True}).num_bytes == 100 * 9 * 2
    assert HEAD.model_copy(update={"weight_dtype": "float32"}).num_bytes == 100 * 8 * 4


def test_text_fingerprints_tell_tokens_windows_and_methods_apart():
    token_ids, windows = TEXT.token_ids, TEXT.windows
    others = [
        text_fingerprint(token_ids, windows, "rolling"),
        text_fingerprint(token_ids[:-1], windows, "sliding"),
        text_fingerprint(token_ids + 1, windows, "sliding"),
        text_fingerprint(token_ids, windows[:-1], "sliding"),
        text_fingerprint(token_ids, windows + 1, "sliding"),
        # As many numbers, divided otherwise.
        text_fingerprint(np.concatenate([token_ids, windows[0]]), windows[1:], "sliding"),
    ]
    assert len({PLAN.fingerprint, *others}) == 7
    assert text_fingerprint(token_ids.copy(), windows.copy(), "sliding") == PLAN.fingerprint
