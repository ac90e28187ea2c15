"""A corpus on a real server: `ppl-client corpus` vs an oracle, and the example for Ray Data."""

import json
import math
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scoremode.cli.main import main
from tests import oracle
from tests.doc_examples import examples, run
from tests.window_loops import lm_eval_rolling


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


def test_figures_of_distributions_are_those_of_the_authors_formulas(server, client, random_model, wikitext, tmp_path):
    """For a document of one window of 128 tokens, and for one of several."""

    def score(window):
        log_p = oracle.logits(random_model, window).log_softmax(-1).numpy()
        mean = (np.exp(log_p) * log_p).sum(axis=1)
        variance = (np.exp(log_p) * np.square(log_p)).sum(axis=1) - np.square(mean)
        return np.stack([log_p[np.arange(len(mean)), window[1:]], mean, variance], axis=1)

    pq.write_table(pa.table({"text": [wikitext[5000:5100], wikitext[6000:7500]]}), tmp_path / "rows.parquet")
    options = ("--url", server, "--context-length", "128", "--figures", "entropy,min_k,min_k++,fast_detect")
    assert main(["corpus", "--quiet", str(tmp_path / "rows.parquet"), "--output", str(tmp_path / "out"), *options]) == 0
    short, long = pq.read_table(tmp_path / "out" / "rows.parquet").to_pylist()
    assert short["num_tokens"] <= 128 < long["num_tokens"] / 2
    for row in (short, long):
        tokens = client.tokenize(row["text"], add_special_tokens=False)
        windows = lm_eval_rolling(score, tokens, 128, client.info().prefix_token_id)
        logprobs, mean, variance = np.concatenate([*windows]).T
        num_lowest = int(len(tokens) * 0.2)
        expected = {
            "entropy": -mean.mean(),
            "min_k": np.sort(logprobs)[:num_lowest].mean(),
            "min_k_plus_plus": np.sort((logprobs - mean) / np.sqrt(variance))[:num_lowest].mean(),
            "fast_detect": (logprobs.sum() - mean.sum()) / np.sqrt(variance.sum()),
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)


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
