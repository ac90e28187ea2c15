"""`ppl-client corpus` from end to end against a server on a real socket, and through a kill."""

import json
import statistics
import subprocess
import sys
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from document_server import DocumentServer, nlls
from fake_scoremode import serve

from scoremode.cli import main

TEXTS = [f"document {index} of the corpus" for index in range(1000)]
NLLS = [sum(nlls(text)) for text in TEXTS]
MEDIAN = statistics.median(NLLS)


class GatedServer(DocumentServer):
    """Answers so many requests for scores, and keeps the others waiting."""

    def __init__(self, allowed):
        super().__init__()
        self._allowed = threading.Semaphore(allowed)

    def score(self, body):
        self._allowed.acquire()
        return super().score(body)

    def open(self):
        self._allowed.release(10**6)


@pytest.fixture
def corpus(tmp_path):
    """1,000 documents in two files, one compressed: five requests."""
    folder = tmp_path / "in"
    folder.mkdir()
    with pa.output_stream(str(folder / "a.jsonl.zst"), compression="detect") as stream:
        for text in TEXTS[:400]:
            stream.write(json.dumps({"text": text}).encode() + b"\n")
    pq.write_table(pa.table({"text": TEXTS[400:]}), folder / "b.parquet")
    return folder


def written(folder):
    return [pq.read_table(folder / name).to_pydict() for name in ("a.parquet", "b.parquet")]


def test_a_run_prints_what_it_came_to(corpus, tmp_path, capsys):
    with serve(DocumentServer()) as url:
        options = [str(corpus), "--url", url, "--output", str(tmp_path / "out"), "--filter", f"nll < {MEDIAN}"]
        assert main(["corpus", *options]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    kept = sum(nll < MEDIAN for nll in NLLS)
    assert 0 < kept < 1000
    assert lines["files"].strip() == "2"
    assert lines["documents"].strip() == "1,000"
    assert lines["kept"].strip() == f"{kept:,}"
    assert lines["tokens"].strip() == f"{sum(map(len, TEXTS)):,}"
    assert [text for part in written(tmp_path / "out") for text in part["text"]] == [
        text for text, nll in zip(TEXTS, NLLS, strict=True) if nll < MEDIAN
    ]


@pytest.mark.processes
def test_a_killed_run_goes_on_and_leaves_what_is_finished(corpus, tmp_path):
    output = tmp_path / "out"
    server = GatedServer(4)
    with serve(server) as url:
        command = ["corpus", str(corpus), "--url", url, "--output", str(output), "--concurrency", "1", "--quiet"]
        process = subprocess.Popen([sys.executable, "-m", "scoremode.cli", *command])
        try:
            journal = output / ".b.parquet.journal"
            deadline = time.monotonic() + 60
            while not (journal.exists() and journal.stat().st_size > 8000):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        finished = (output / "a.parquet").read_bytes()
        assert not (output / "b.parquet").exists()
        server.open()
        assert main([*command, "--resume"]) == 0
    assert (output / "a.parquet").read_bytes() == finished
    a, b = written(output)
    assert a["text"] + b["text"] == TEXTS
    assert a["nll"] + b["nll"] == NLLS
    assert sorted(path.name for path in output.iterdir()) == ["a.parquet", "b.parquet"]
    # Those that were asked for when the run was killed are asked for again; no more.
    assert server.num_scored <= 1000 + 2 * 256


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["missing.parquet"], "no such file or folder: missing.parquet"),
        (["IN", "--filter", "nll <"], "--filter 'nll <' is no condition"),
        (["IN", "--text-column", "body"], "no column 'body'"),
        (["IN", "--context-length", "64"], "the model takes at most 64"),
    ],
    ids=["no file", "no condition", "no column", "no such windows"],
)
def test_what_is_wrong_is_one_line_and_a_status(corpus, tmp_path, capsys, options, complaint):
    with serve(DocumentServer()) as url:
        arguments = [str(corpus) if option == "IN" else option for option in options]
        assert main(["corpus", *arguments, "--url", url, "--output", str(tmp_path / "out"), "--quiet"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ppl-client: error: ")
    assert complaint in line


def test_an_output_is_needed(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["corpus", "in.parquet"])
    assert exit_.value.code == 2
    assert "--output" in capsys.readouterr().err
