"""What is known of a reference, as it is on disk."""

import math

import numpy as np
import pytest
from reference_setup import FLOOR, HEAD, PLAN, RESULT, TEXT, manifest

from scoremode_server.references.manifest import Manifest, ManifestError, text_fingerprint


@pytest.mark.parametrize("perplexity", [12.5, math.inf])
def test_what_was_written_is_read(perplexity: float):
    result = RESULT.model_copy(update={"perplexity": perplexity, "perplexity_stderr": None})
    written = manifest().model_copy(update={"result": result, "noise_floor": FLOOR})
    assert Manifest.from_json(written.to_json()) == written


def test_no_character_that_means_something_can_change_or_be_cut_off():
    """Other white space between fields is no change."""
    text = manifest().to_json()
    for position, character in enumerate(text):
        for changed in (text[:position], text[:position] + chr(ord(character) ^ 1) + text[position + 1 :]):
            if not character.isspace() or changed == text[:position]:
                with pytest.raises(ManifestError):
                    Manifest.from_json(changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format_version": 1, "layers": []}', "format version 1, and this server reads 2"),
        ('{"format_version": "2"}', "format version 2, and this server reads 2"),
        *(("{}", "format version None"), ("[]", "JSON"), ("null", "JSON"), ("[" * 100_000, "JSON")),
    ],
)
def test_other_json_and_other_format_versions_are_refused(text: str, message: str):
    with pytest.raises(ManifestError, match=message):
        Manifest.from_json(text)


def test_a_heads_bytes():
    assert HEAD.num_bytes == 100 * 8 * 2
    assert HEAD.model_copy(update={"has_bias": True, "weight_dtype": "float32"}).num_bytes == 100 * 9 * 4


def test_text_fingerprints_differ_with_tokens_windows_and_methods():
    token_ids, windows = TEXT.token_ids, TEXT.windows
    others = [
        text_fingerprint(token_ids, windows, "rolling"),
        text_fingerprint(token_ids[:-1], windows, "sliding"),
        text_fingerprint(token_ids + 1, windows, "sliding"),
        text_fingerprint(token_ids, windows + 1, "sliding"),
        # As many numbers, divided otherwise.
        text_fingerprint(np.concatenate([token_ids, windows[0]]), windows[1:], "sliding"),
    ]
    assert len({PLAN.fingerprint, *others}) == 6
    assert text_fingerprint(token_ids.copy(), windows.copy(), "sliding") == PLAN.fingerprint
