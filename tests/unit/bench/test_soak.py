"""What a soak reads from its server, and when it takes itself for too little."""

import pytest
import soak


def test_metrics_are_summed_over_labels():
    text = '# HELP a b\na{engine="0"} 2.0\na{engine="1"} 3.0\na_by_reason{engine="0"} 9.0\nb 1e+06\n'
    assert soak.metric(text, "a") == 5
    assert soak.metric(text, "b") == 1e6
    with pytest.raises(ValueError, match="no c"):
        soak.metric(text, "c")


def test_a_load_that_hardly_ran_is_told():
    load = soak.Load("http://localhost", [])
    load.tallies["/v1/score"].right = 5
    load.tallies["/v1/score"].hung_up = 1
    assert [line.partition(":")[0] for line in load.missing()] == ["/v1/completions", "/v1/perplexity"]


def test_tracebacks_of_the_log(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("INFO all is well\n")
    assert soak.tracebacks(log) == []
    log.write_text("Traceback (most recent call last):\n  no\n")
    assert soak.tracebacks(log) == [f"1 tracebacks in {log}"]
