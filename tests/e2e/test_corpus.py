"""`ppl-client corpus` on a real server: figures vs an oracle."""

import json
import math
from itertools import accumulate, pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import oracle
from tests.command_line import ppl_client


def documents(wikitext: str) -> list[str]:
    """Pieces of a text, most of them short."""
    ends = accumulate([40, 300, 1, 1200, 80, 2500, 15] * 2, initial=0)
    return [wikitext[start:end] for start, end in pairwise(ends)]


def test_figures_are_those_of_an_oracle(server, client, random_model, wikitext, tmp_path):
    texts = [None, "", *documents(wikitext)]
    with pa.output_stream(str(tmp_path / "rows.jsonl.zst"), compression="detect") as stream:
        stream.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    # Windows of 256 tokens: some documents have several, and most have one.
    options = ("--url", server, "--output", str(tmp_path / "out"), "--context-length", "256", "--per-token")
    ppl_client("corpus", "--quiet", str(tmp_path / "rows.jsonl.zst"), *options)
    rows = pq.read_table(tmp_path / "out" / "rows.parquet").to_pylist()
    assert [row["text"] for row in rows] == texts
    prefix = client.info().prefix_token_id
    num_windows = set()
    for row in rows:
        if not row["text"]:
            assert row["nll"] is row["num_tokens"] is None
            continue
        tokens = client.tokenize(row["text"], add_special_tokens=False)
        assert row["token_ids"] == tokens
        expected = oracle.perplexity(random_model, tokens, "rolling", 256, None, prefix=prefix)
        assert row["num_tokens"] == expected.num_scored == len(tokens)
        oracle.assert_close(row["token_logprobs"], -expected.nlls)
        assert row["nll"] == pytest.approx(-math.fsum(row["token_logprobs"]), rel=1e-6)
        num_windows.add(-(-len(tokens) // 256))
    assert num_windows >= {1, 2}
