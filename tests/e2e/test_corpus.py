"""A corpus on a real server: `ppl-client corpus` vs an oracle, and the example for Ray Data."""

import json
import math
from itertools import accumulate, pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scoremode.cli.main import main
from tests import oracle
from tests.doc_examples import examples, run


def test_figures_are_those_of_an_oracle(server, client, random_model, wikitext, tmp_path):
    ends = accumulate([40, 300, 1, 1200, 80, 2500, 15] * 2, initial=0)
    texts = [None, "", *(wikitext[start:end] for start, end in pairwise(ends))]
    with pa.output_stream(str(tmp_path / "rows.jsonl.zst"), compression="detect") as stream:
        stream.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    # Windows of 256 tokens: some documents have several, and most have one.
    options = ("--url", server, "--output", str(tmp_path / "out"), "--context-length", "256", "--per-token")
    assert main(["corpus", "--quiet", str(tmp_path / "rows.jsonl.zst"), *options]) == 0
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


RAY_SETTINGS = """
import ray
# Two CPUs by name: one is the actor's as long as it lives, the other is for tasks that read.
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
"""


[(_, WITH_RAY)] = examples("import ray").values()
WITHOUT_RAY = f"""{WITH_RAY.partition("actors = ")[0].replace("import ray", "import pyarrow.parquet as pq")}
pq.write_table(ScoreBatch("http://gpu1:8000")(pq.read_table("pages")), "scored")
"""


# Ray takes a minute to start.
@pytest.mark.parametrize(
    "code",
    [WITHOUT_RAY, pytest.param(RAY_SETTINGS + WITH_RAY.replace("size=2", "size=1"), marks=pytest.mark.slow)],
    ids=["its class", "Ray"],
)
def test_a_dataset_is_scored_by_the_example(server, client, wikitext, tmp_path, monkeypatch, code):
    """In a process of its own, as people have it: Ray leaves threads and signal handlers."""
    texts = [*(wikitext[start : start + 200] for start in range(0, 4000, 200)), None, ""]
    (tmp_path / "pages").mkdir()
    pq.write_table(pa.table({"text": texts, "place": range(len(texts))}), tmp_path / "pages" / "rows.parquet")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    run("python", code.replace("http://gpu1:8000", server).replace(', "http://gpu2:8000"', ""), tmp_path)
    rows = sorted(pq.read_table(tmp_path / "scored").to_pylist(), key=lambda row: row["place"])
    assert [row["text"] for row in rows] == texts
    for row in rows[:20]:
        tokens = client.tokenize(row["text"], add_special_tokens=False)
        [score] = client.score([[client.info().prefix_token_id, *tokens]])
        assert row["num_tokens"] == len(tokens)
        assert row["nll"] / len(tokens) == pytest.approx(-score.sum_logprob / len(tokens), abs=1e-5)
    assert [row["nll"] for row in rows[20:]] == [None, None]
