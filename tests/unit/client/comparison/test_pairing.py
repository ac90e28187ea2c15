"""Runs are paired token by token, or refused with what differs."""

import numpy as np
import pytest
from run_files import WINDOW_SIZES, made_up_nlls, made_up_reference, made_up_tokens, write_kld_run, write_perplexity_run

from scoremode.comparison import load_run
from scoremode.comparison.pairing import check_comparable
from scoremode.errors import RunError

NLLS = made_up_nlls(1)


def perplexity_run(tmp_path, name, nlls=NLLS, **changes):
    return load_run(write_perplexity_run(tmp_path / f"{name}.json", nlls, **changes), name)


def kld_run(tmp_path, name, **reference):
    path = tmp_path / f"{name}.json"
    return load_run(write_kld_run(path, NLLS, np.ones(len(NLLS)), reference=made_up_reference(**reference)), name)


def test_runs_of_equal_tokens_and_windows_pair_whatever_their_kind(tmp_path):
    runs = [
        perplexity_run(tmp_path, "one"),
        perplexity_run(tmp_path, "two", nlls=NLLS + 1, model="another"),
        kld_run(tmp_path, "three"),
        kld_run(tmp_path, "four", fingerprint="another reference"),
    ]
    check_comparable(runs)


OTHER_TOKENS = made_up_tokens()
OTHER_TOKENS[250:] += 1


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"text": "another"}, "the text (its fingerprint) is "),
        ({"method": "rolling"}, "the method is sliding in the first and rolling in the second"),
        ({"context_length": 256}, "the context length is 128 in the first and 256 in the second"),
        ({"stride": 50}, "the stride is 100 in the first and 50 in the second"),
        ({"nlls": NLLS[:-100], "window_sizes": WINDOW_SIZES[:-1]}, "the number of windows is 30 in the first and 29"),
        ({"window_sizes": [99, 101, *WINDOW_SIZES[2:]]}, "their windows have different numbers of tokens"),
        (
            {"token_ids": OTHER_TOKENS},
            f"2,750 of 3,000 token ids differ, the first in window 2: {OTHER_TOKENS[250] - 1} and {OTHER_TOKENS[250]}",
        ),
    ],
)
def test_what_differs_is_said_of_both_runs(tmp_path, changes, difference):
    runs = [perplexity_run(tmp_path, "one"), perplexity_run(tmp_path, "two"), perplexity_run(tmp_path, "x", **changes)]
    with pytest.raises(RunError) as caught:
        check_comparable(runs)
    assert f"{tmp_path}/one.json and {tmp_path}/x.json cannot be compared: {difference}" in str(caught.value)


def test_references_of_different_texts_do_not_pair(tmp_path):
    runs = [kld_run(tmp_path, "one"), kld_run(tmp_path, "two", text_fingerprint="another")]
    with pytest.raises(RunError, match=r"the text \(its fingerprint\) is of the text in the first and another"):
        check_comparable(runs)


def test_runs_of_one_label_are_refused(tmp_path):
    run = perplexity_run(tmp_path, "one")
    with pytest.raises(RunError, match="2 runs are called 'one'"):
        check_comparable([run, run])


def test_no_runs_are_refused():
    with pytest.raises(RunError, match="no run"):
        check_comparable([])
