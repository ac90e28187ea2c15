"""Files of runs that `ppl-client` did not write: a line that names the file, and names that no terminal obeys."""

import hashlib
import json
import os

import numpy as np
import pytest
from run_files import made_up_nlls, made_up_reference, write_kld_run
from safetensors.numpy import load_file, save

from scoremode.cli import main

SIZES = [20] * 5
NLLS = made_up_nlls(1, SIZES)
NAME, SHOWN = "evil\x1b[2J\x9b\u202e\ud800\r\nbetter", r"evil\x1b[2J\x9b\u202e\ud800\r\nbetter"


def changed(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def with_content(path, content):
    """Arrays that are these bytes, with the checksum of these."""
    path.with_suffix(".safetensors").write_bytes(content)
    changed(path, arrays={"file": "bad.safetensors", "sha256": hashlib.sha256(content).hexdigest()})


def with_sizes(path, sizes):
    with_content(path, save({**load_file(path.with_suffix(".safetensors")), "window_sizes": sizes}))


def with_header(path, header):
    text = json.dumps(header).encode()
    with_content(path, len(text).to_bytes(8, "little") + text + bytes(100))


@pytest.fixture
def paths(tmp_path):
    return [write_kld_run(tmp_path / f"{name}.json", NLLS, NLLS, window_sizes=SIZES) for name in ("base", "bad")]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda path: changed(path, client_version=NAME, num=10**400),
            "{path} is not JSON: a whole number of 401 digits",
        ),
        (lambda path: path.write_text("[" * 100_000), "{path} is nested too deeply"),
        (lambda path: changed(path, kind=[]), "{path} is not a result of"),
        (lambda path: with_content(path, b"\xff" * 100), "cannot read {arrays}: SafetensorError"),
        (
            lambda path: with_header(path, {"kld": {"dtype": "F8_E4M3", "shape": [100], "data_offsets": [0, 100]}}),
            "cannot read {arrays}: KeyError",
        ),
        (lambda path: with_sizes(path, np.full(5, 20.0)), "{path}: window_sizes has values of type float64"),
        (lambda path: with_sizes(path, np.array([-1, 101], np.int32)), "{path}: its window_sizes are"),
        (lambda path: with_sizes(path, np.full((5, 1), 20, np.int32)), "{path}: its window_sizes are"),
    ],
)
def test_a_file_that_is_no_run_is_named_in_one_line(paths, capsys, spoil, message):
    spoil(paths[1])
    assert main(["compare", *map(str, paths)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"ppl-client: error: {message}".format(path=paths[1], arrays=paths[1].with_suffix(".safetensors"))
    )


def test_names_are_shown_without_what_a_terminal_obeys_or_a_report_cannot_hold(paths, capsys, tmp_path):
    server = {**json.loads(paths[1].read_text())["server"], "dtype": NAME}
    reference = {**made_up_reference(SIZES).model_dump(), "name": NAME, "model": NAME, "fingerprint": NAME}
    changed(paths[1], model=NAME, server=server, reference=reference, finished=NAME, token_texts={"7.0": "\x1b"})
    named = tmp_path / os.fsdecode(b"a\x1b\xff.json")
    paths[0].rename(named)
    paths[0].with_suffix(".safetensors").rename(named.with_suffix(".safetensors"))
    report = tmp_path / "report.html"
    options = ["--resamples", "100", "--html", str(report), "--plots", str(tmp_path / "plots")]
    assert main(["compare", str(named), str(paths[1]), *options]) == 0
    shown = capsys.readouterr().out
    assert SHOWN in shown
    assert all(character.isprintable() for character in shown.replace("\n", ""))
    text = report.read_text()
    assert SHOWN in text
    assert r"a\x1b\udcff.json" in text
    assert main(["compare", *map(str, [named, paths[1]]), "--labels", f"{NAME},b"]) == 0
    assert SHOWN in capsys.readouterr().out
