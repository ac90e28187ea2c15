"""Compressed files that unpack to a hundred times their size and more are read within bounds of memory."""

import gzip
import json
import subprocess
import sys

import pytest

MIB = 1 << 20
READ = """
import resource, sys
from pathlib import Path
from scoremode import CorpusError
from scoremode.corpus.json_lines import JsonLines

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

before = peak()
try:
    print(sum(batch.num_rows for batch in JsonLines(Path(sys.argv[1])).batches()), "rows")
except CorpusError as error:
    print(error)
print(peak() - before)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("part", "num_parts", "message", "most"),
    [
        (json.dumps({"text": "x" * 20_000}).encode() + b"\n", 10_000, "10000 rows", 48 * MIB),
        (b"x" * MIB, 300, "line 1 has more than 64 MiB", 192 * MIB),
    ],
    ids=["lines", "a line without an end"],
)
def test_memory_does_not_grow_with_what_a_file_unpacks_to(tmp_path, part, num_parts, message, most):
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(num_parts):
            file.write(part)
    assert 100 * path.stat().st_size < len(part) * num_parts
    read = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    found, num_bytes = read.stdout.splitlines()
    assert found.endswith(message)
    assert int(num_bytes) < most
